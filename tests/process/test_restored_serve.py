"""`bursar serve --restored`: everything goes on, and what was seen since the backup cannot be gone on from."""

import pytest

from bursar.client import Client, Gone
from support.process.server import migrated_directory, started


def revision_of(client: Client, name: str) -> int:
    """Of something that is made now."""
    wanted = {"resources": {"requests": {"cpu": "1"}}}
    made = client.allocations("default").create({"kind": "Allocation", "metadata": {"name": name}, "spec": wanted})
    return int(made["metadata"]["resourceVersion"])


def test_a_server_on_a_restored_database_begins_a_new_era() -> None:
    with migrated_directory() as data:
        with started(data) as server, server.client() as client:
            before = revision_of(client, "before")
        with started(data, options=("--restored",)) as server, server.client() as client:
            assert revision_of(client, "after") > before + 1_000_000
            assert client.allocations("default").get("before")["status"]["phase"] == "Pending"
            with pytest.raises(Gone):
                client.request("GET", "/api/v1/allocations", query={"watch": "true", "resourceVersion": str(before)})
