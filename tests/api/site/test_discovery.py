"""What discovery announces: what is served, all of it that clients can use, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.site.discovery import documents
from bursar.wire.kinds.registry import KINDS
from support.api.sample_routes import ROUTES

DOCUMENTS = {path: msgspec.json.decode(body) for path, body in documents(ROUTES, release="1.2.3").items()}


def _resources(path: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in DOCUMENTS[path]["resources"]}


def test_the_core_version_is_listed() -> None:
    assert DOCUMENTS["/api"] == {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def test_every_kind_is_announced_with_its_names() -> None:
    announced = _resources("/api/v1")
    for kind in KINDS:
        assert kind.plural in _resources(kind.root)
    assert announced["allocations"] == {
        "name": "allocations",
        "singularName": "allocation",
        "namespaced": True,
        "kind": "Allocation",
        "verbs": ["list", "watch", "create", "get", "update", "patch", "delete"],
        "shortNames": ["alloc", "al"],
        "categories": ["all"],
    }
    assert announced["nodes"]["namespaced"] is False


def test_parts_are_announced_by_the_methods_they_answer() -> None:
    announced = _resources("/api/v1")
    assert announced["nodes/status"]["verbs"] == ["get", "patch"]
    assert announced["nodes/drain"]["verbs"] == ["create"]
    # A namespace's own part is not mistaken for something inside of it, nor the other way round.
    assert announced["namespaces/status"]["kind"] == "Namespace"
    assert "namespaces/allocations" not in announced


def test_drain_finds_the_eviction_with_its_group_and_version() -> None:
    eviction = _resources("/api/v1")["pods/eviction"]
    assert (eviction["kind"], eviction["group"], eviction["version"]) == ("Eviction", "policy", "v1")


def test_watch_is_announced_only_where_it_is_served() -> None:
    assert _resources("/api/v1")["events"]["verbs"] == ["list"]


def test_what_is_ours_alone_is_not_announced() -> None:
    announced = _resources("/api/v1")
    assert "metrics" not in announced
    assert not [name for name in announced if "bulk" in name]


def test_groups_are_listed_only_with_resources() -> None:
    groups = [group["name"] for group in DOCUMENTS["/apis"]["groups"]]
    assert sorted(groups) == ["authorization.k8s.io", "user.openshift.io"]
    assert "users" not in _resources("/api/v1")
    assert DOCUMENTS["/apis/authorization.k8s.io"]["preferredVersion"]["version"] == "v1"
    assert list(_resources("/apis/authorization.k8s.io/v1")) == ["selfsubjectaccessreviews"]


def test_without_foreign_groups_the_list_is_empty() -> None:
    alone = documents([route for route in ROUTES if route.path.startswith("/api/")], release="1.2.3")
    assert msgspec.json.decode(alone["/apis"])["groups"] == []


def test_the_version_is_there_with_and_without_the_slash() -> None:
    assert DOCUMENTS["/version"] == DOCUMENTS["/version/"]
    assert DOCUMENTS["/version"]["gitVersion"].endswith("bursar-1.2.3")
