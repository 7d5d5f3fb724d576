"""The reference operator of docs/approvals.md, run as the very text of the page, and the example beside it."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.api.site import Document, Site, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "approvals.md").read_text(encoding="utf-8")
HOLD = "example.com/clusters"


def operator_text() -> str:
    found = re.search(r"<!-- operator -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, "the page has the operator"
    return found[1]


@asynccontextmanager
async def operating(site: Site) -> AsyncIterator[asyncio.subprocess.Process]:
    """The operator of the page as a process."""
    token = await site.token("service", user="operator")
    where = {**os.environ, "BURSAR_URL": site.url, "BURSAR_TOKEN": token}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", operator_text(), env=where)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


async def applied(site: Site) -> tuple[str, str]:
    """The objects of the example; the path of the claim, and the tenant."""
    tenant, namespace, claim = yaml.safe_load_all((ROOT / "examples" / "approvals.yaml").read_text(encoding="utf-8"))
    for path, body in (("tenants", tenant), ("namespaces", namespace)):
        assert (await site.post(path, body)).status == 201, path
    name = tenant["metadata"]["name"]
    where = f"namespaces/{namespace['metadata']['name']}/resourceclaims"
    made = await site.post(where, claim, token=await site.token("user", tenant=name, user="ann"))
    assert made.status == 201, made
    return f"{where}/{claim['metadata']['name']}", name


async def test_the_operator_of_the_page_provides_what_is_approved_and_holds_its_charge(site: Site) -> None:
    path, tenant = await applied(site)
    assert len([line for line in operator_text().splitlines() if line.strip()]) <= 35, "it is short"

    async def shows(wanted: Callable[[Document], Any]) -> None:
        async def holds() -> bool:
            return bool(wanted((await site.get(path)).body))

        await eventually(holds)

    async def charged() -> str:
        return str((await site.get(f"tenants/{tenant}/quotas")).body["quotas"]["baremetal-hosts"]["accepted"])

    async with operating(site) as process:
        assert (await site.post(f"{path}/approve", {"gate": "manual"})).status == 200
        pending = (await site.get(path)).body
        assert ("finalizers" in pending["metadata"], "state" in pending["status"]) == (False, False)
        assert (await site.post(f"{path}/approve", {"gate": "quota"})).status == 200
        uid = pending["metadata"]["uid"]
        await shows(lambda one: one["status"].get("externalId") == f"cluster-{uid}")
        ready = (await site.get(path)).body
        assert (ready["metadata"]["finalizers"], ready["status"]["state"]) == ([HOLD], "Ready")

        process.send_signal(signal.SIGSTOP)
        assert (await site.delete(path)).status == 200
        assert (await charged(), (await site.get(path)).status) == ("5", 200), "the operator has not taken it back"
        process.send_signal(signal.SIGCONT)

        async def gone() -> bool:
            return (await site.get(path)).status == 404

        await eventually(gone)
        assert await charged() == "0"
        assert process.returncode is None, "it goes on"
