"""The SDK against a real server."""

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from bursar.client import (
    AsyncClient,
    Client,
    Conflict,
    Document,
    Event,
    Forbidden,
    Invalid,
    NotFound,
    QuotaExceeded,
    Resource,
    Unauthorized,
)
from bursar.wire.kinds.tenant import Tenant, TenantSpec
from bursar.wire.shared.meta import ObjectMeta
from support.client.cable import cable_to
from support.process.server import Server, migrated_directory, started

TENANT_LABEL = "bursar.io/tenant"


@dataclass(frozen=True, slots=True)
class Home:
    """A tenant and a namespace of a test's own. The scheduler writes to allocations; to quotas, nobody but the test."""

    tenant: str
    namespace: str
    allocations: Resource
    quotas: Resource


@pytest.fixture
def home(admin: Client) -> Home:
    return make_home(admin)


def make_home(client: Client) -> Home:
    name = f"t-{uuid.uuid4().hex[:12]}"
    client.tenants.create({"metadata": {"name": name}, "spec": {"limits": {"nvidia.com/gpu": 10}}})
    client.namespaces.create({"metadata": {"name": name, "labels": {TENANT_LABEL: name}}})
    return Home(name, name, client.allocations(name), client.resourcequotas(name))


def wanted(name: str, gpus: int = 0, **labels: str) -> Document:
    requests = {"cpu": "1", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"resources": {"requests": requests}}}


def quota(name: str, **labels: str) -> Document:
    return {"metadata": {"name": name, "labels": labels}, "spec": {"hard": {"cpu": "1"}}}


def told(event: Event) -> tuple[str, str]:
    return event.type, event.object["metadata"]["name"]


def take(events: Iterator[Event], count: int) -> list[tuple[str, str]]:
    return [told(next(events)) for _ in range(count)]


# --- Objects


def test_an_allocation_from_beginning_to_end(home: Home) -> None:
    created = home.allocations.create(wanted("train", gpus=2, team="ml"))
    assert created["status"]["phase"] == "Pending"
    assert created["metadata"]["uid"].startswith("alloc-")
    read = home.allocations.get("train")
    assert read["spec"] == created["spec"]
    patched = home.allocations.patch("train", {"metadata": {"labels": {"team": None, "batch": "7"}}})
    assert patched["metadata"]["labels"] == {"batch": "7"}
    home.allocations.delete("train", grace_period_seconds=0)
    with pytest.raises(NotFound) as caught:
        home.allocations.get("train")
    assert (caught.value.status, caught.value.code) == (404, "not_found")
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("patch_type", "patch"),
    [
        ("merge", {"metadata": {"labels": {"zone": "b"}}}),
        ("strategic", {"metadata": {"labels": {"zone": "b"}}}),
        ("json", [{"op": "replace", "path": "/metadata/labels/zone", "value": "b"}]),
    ],
)
def test_patches_of_every_type(home: Home, patch_type: Any, patch: Any) -> None:
    home.allocations.create(wanted("train", zone="a"))
    assert home.allocations.patch("train", patch, type=patch_type)["metadata"]["labels"] == {"zone": "b"}


def test_replacing_needs_the_current_revision(admin: Client, home: Home) -> None:
    read = admin.tenants.get(home.tenant)
    changed = {**read, "spec": {"limits": {"nodes": 3}}}
    assert admin.tenants.replace(changed)["spec"] == {"limits": {"nodes": 3}}
    with pytest.raises(Conflict):
        admin.tenants.replace(changed)


def test_a_typed_object_is_sent_as_the_api_names_it(admin: Client) -> None:
    name = f"t-{uuid.uuid4().hex[:12]}"
    created = admin.tenants.create(Tenant(metadata=ObjectMeta(name=name), spec=TenantSpec(fair_share_target=0.25)))
    assert created["spec"] == {"fairShareTarget": 0.25}


def test_a_list_is_followed_through_its_pages(home: Home) -> None:
    names = [f"a-{number}" for number in range(7)]
    for name in names:
        home.allocations.create(wanted(name, even=str(int(name[-1]) % 2 == 0).lower()))
    assert [one["metadata"]["name"] for one in home.allocations.list(limit=3)] == names
    even = home.allocations.list(label_selector="even=true", limit=2)
    assert [one["metadata"]["name"] for one in even] == names[::2]
    chosen = home.allocations.list(field_selector="metadata.name=a-3")
    assert [one["metadata"]["name"] for one in chosen] == ["a-3"]


def test_all_namespaces(admin: Client, home: Home) -> None:
    home.allocations.create(wanted("everywhere", home=home.tenant))
    found = list(admin.allocations.list(label_selector=f"home={home.tenant}"))
    assert [one["metadata"]["namespace"] for one in found] == [home.namespace]


def test_a_table_has_the_servers_columns(home: Home) -> None:
    home.allocations.create(wanted("a"))
    home.allocations.create(wanted("b"))
    table = home.allocations.table(limit=1)
    assert table["columnDefinitions"][0]["name"] == "Name"
    assert [row["cells"][0] for row in table["rows"]] == ["a", "b"]
    assert [row["cells"][0] for row in home.allocations.table("b")["rows"]] == ["b"]


def test_a_dry_run_leaves_nothing(home: Home) -> None:
    assert home.allocations.create(wanted("ghost"), dry_run=True)["metadata"]["name"] == "ghost"
    assert list(home.allocations.list()) == []


def test_a_collection_is_deleted(home: Home) -> None:
    for name in ("a", "b", "c"):
        home.allocations.create(wanted(name, keep=str(name == "c").lower()))
    home.allocations.delete_collection(label_selector="keep=false")
    assert [one["metadata"]["name"] for one in home.allocations.list()] == ["c"]


def test_bulk_release(home: Home) -> None:
    for name in ("a", "b", "c"):
        home.allocations.create(wanted(name, batch="1" if name != "c" else "2"))
    assert home.allocations.bulk_release(label_selector="batch=1", dry_run=True)["released"] == 2
    assert home.allocations.bulk_release(label_selector="batch=1", grace_period_seconds=0)["released"] == 2
    assert [one["metadata"]["name"] for one in home.allocations.list()] == ["c"]
    with pytest.raises(Invalid):
        home.allocations.bulk_release(label_selector="")


def test_tenants_are_updated_field_by_field(admin: Client, home: Home) -> None:
    changed = admin.update_tenant(home.tenant, {"max_nodes": 250, "gpu_hours_budget": 150_000})
    assert changed["spec"] == {"limits": {"nvidia.com/gpu": 10, "nodes": 250}, "gpuHoursBudget": 150_000}
    quotas = admin.tenant_quotas(home.tenant)
    assert quotas["quotas"]["nodes"]["limit"] == "250"


def test_apply_creates_then_changes_then_leaves_alone(admin: Client, home: Home) -> None:
    name = f"t-{uuid.uuid4().hex[:12]}"
    first = {"metadata": {"name": name}, "spec": {"limits": {"nodes": 1, "memory": "8192Mi"}, "weight": 2.0}}
    assert admin.tenants.apply(first).outcome == "created"
    assert admin.tenants.apply(first).outcome == "unchanged"
    # Somebody else's field stays; one that is no longer applied goes.
    admin.tenants.patch(name, {"spec": {"displayName": "Physics"}})
    second = {"metadata": {"name": name}, "spec": {"limits": {"nodes": 2}}}
    applied = admin.tenants.apply(second)
    assert applied.outcome == "configured"
    assert applied.object["spec"] == {"limits": {"nodes": 2}, "displayName": "Physics"}
    assert admin.tenants.apply(second).outcome == "unchanged"


def test_any_request_can_be_made(admin: Client) -> None:
    assert admin.request("GET", "/healthz") == "ok"
    assert admin.request("GET", "/api/v1")["kind"] == "APIResourceList"
    assert admin.whoami()["role"] == "system-admin"


# --- What is refused


def test_a_full_quota_is_told_with_its_numbers(home: Home) -> None:
    home.allocations.create(wanted("first", gpus=8))
    with pytest.raises(QuotaExceeded) as caught:
        home.allocations.create(wanted("second", gpus=4))
    error = caught.value
    assert (error.status, error.reason, error.code) == (403, "Forbidden", "quota_exceeded")
    assert error.hint
    cause = error.causes[0]
    assert (cause.dimension, cause.limit, cause.current_usage, cause.requested_delta) == (
        "nvidia.com/gpu",
        "10",
        "8",
        "4",
    )


def test_what_exists_is_a_conflict(home: Home) -> None:
    home.allocations.create(wanted("train"))
    with pytest.raises(Conflict) as caught:
        home.allocations.create(wanted("train"))
    assert caught.value.code == "already_exists"


def test_every_fault_is_named(home: Home) -> None:
    body = {"metadata": {"name": "Bad Name"}, "spec": {"resources": {"requests": {"cpu": "many"}}}}
    with pytest.raises(Invalid) as caught:
        home.allocations.create(body)
    assert {cause.field for cause in caught.value.causes} >= {"metadata.name"}


def test_without_a_good_token(server: Server) -> None:
    for token in ("nonsense", "brs_unknown_secret"):
        with server.client(token) as client, pytest.raises(Unauthorized) as caught:
            client.tenants.get("x")
        assert "bursar login" in caught.value.hint


def test_roles_and_tenants_are_kept_apart(server: Server, admin: Client, home: Home) -> None:
    other = make_home(admin)
    home.allocations.create(wanted("secret"))
    tokens = admin.resource("tokens", namespaced=False)
    made = tokens.create({"role": "user", "tenant": other.tenant, "user": "mallory", "ttl": "1h"})
    with server.client(made["status"]["token"]) as client:
        assert client.whoami() == {"user": "mallory", "role": "user", "tenant": other.tenant}
        with pytest.raises(NotFound):
            client.allocations(home.namespace).get("secret")
        with pytest.raises(Forbidden):
            client.tenants.create({"metadata": {"name": "mine"}})


# --- Repetition


def test_a_request_id_has_one_effect_and_one_answer(home: Home) -> None:
    key = uuid.uuid4().hex
    first, again = (home.allocations.create(wanted("once"), request_id=key) for _ in range(2))
    for answer in (first, again):
        del answer["status"]["queuePosition"]  # of when it was asked: others come and go
    assert again == first


@pytest.mark.parametrize(
    "verb",
    [
        "create",
        "patch",
        "delete",
    ],
)
def test_a_lost_answer_is_asked_for_again_and_nothing_happens_twice(server: Server, home: Home, verb: str) -> None:
    if verb != "create":
        home.allocations.create(wanted("once"))
    with cable_to(server.url) as cable, Client(cable.url, server.token) as client:
        allocations = client.allocations(home.namespace)
        cable.lose_answers = 1
        if verb == "create":
            allocations.create(wanted("once"))
        elif verb == "patch":
            allocations.patch("once", [{"op": "add", "path": "/metadata/labels/x", "value": "1"}], type="json")
        else:
            allocations.delete("once", grace_period_seconds=0)
        assert cable.connections == 2
    assert len(list(home.allocations.list())) == (0 if verb == "delete" else 1)


# --- Watching


def test_a_watch_tells_what_there_is_and_every_change(home: Home) -> None:
    home.quotas.create(quota("a"))
    events = home.quotas.watch()
    assert take(events, 1) == [("ADDED", "a")]
    home.quotas.create(quota("b"))
    home.quotas.patch("a", {"metadata": {"labels": {"x": "1"}}})
    home.quotas.delete("b", grace_period_seconds=0)
    assert take(events, 3) == [("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]
    events.close()


def test_a_watch_tells_what_the_scheduler_wrote(home: Home) -> None:
    home.allocations.create(wanted("a"))
    events = home.allocations.watch(timeout_seconds=30)
    noted = next(event for event in events if "reason" in event.object["status"])
    assert noted.object["status"]["reason"] == "no_nodes_active"
    home.allocations.delete("a", grace_period_seconds=0)
    assert take(events, 1) == [("DELETED", "a")]
    events.close()


def test_leaving_a_selector_is_a_deletion(home: Home) -> None:
    home.quotas.create(quota("a", team="ml"))
    events = home.quotas.watch(label_selector="team=ml")
    assert take(events, 1) == [("ADDED", "a")]
    home.quotas.patch("a", {"metadata": {"labels": {"team": "web"}}})
    home.quotas.patch("a", {"metadata": {"labels": {"team": "ml"}}})
    assert take(events, 2) == [("DELETED", "a"), ("ADDED", "a")]
    events.close()


def test_a_cut_connection_loses_nothing_and_repeats_nothing(server: Server, home: Home) -> None:
    home.quotas.create(quota("a"))
    with cable_to(server.url) as cable, Client(cable.url, server.token) as client:
        events = client.resourcequotas(home.namespace).watch()
        assert take(events, 1) == [("ADDED", "a")]
        for number in range(5):
            home.quotas.create(quota(f"b-{number}"))
            cable.cut()
            assert take(events, 1) == [("ADDED", f"b-{number}")]
        home.quotas.delete("a", grace_period_seconds=0)
        assert take(events, 1) == [("DELETED", "a")]
        events.close()


def test_a_watch_ends_when_its_time_is_over(home: Home) -> None:
    home.quotas.create(quota("a"))
    assert [told(event) for event in home.quotas.watch(timeout_seconds=0.5)] == [("ADDED", "a")]


def test_tables_can_be_watched(home: Home) -> None:
    home.quotas.create(quota("a"))
    events = home.quotas.watch(as_table=True)
    assert next(events).object["rows"][0]["cells"][0] == "a"
    home.quotas.create(quota("b"))
    assert next(events).object["rows"][0]["cells"][0] == "b"
    events.close()


def test_a_future_revision_is_listed_anew(home: Home) -> None:
    """As after a restore to an older state: the server knows nothing of the revision, so what there is counts."""
    home.quotas.create(quota("a"))
    events = home.quotas.watch(resource_version="999999999")
    assert take(events, 1) == [("ADDED", "a")]
    events.close()


def test_a_watch_goes_on_through_a_restart_of_the_server() -> None:
    with migrated_directory() as data, ExitStack() as watching:
        with started(data) as first:
            watcher = watching.enter_context(first.client())
            home = make_home(watcher)
            home.quotas.create(quota("a"))
            events = home.quotas.watch()
            assert take(events, 1) == [("ADDED", "a")]
        with started(data, int(first.url.rpartition(":")[2])) as second, second.client() as client:
            client.resourcequotas(home.namespace).create(quota("b"))
            assert take(events, 1) == [("ADDED", "b")]
            events.close()


# --- The same, without blocking


async def test_the_async_client_does_the_same(server: Server, home: Home) -> None:
    async with AsyncClient(server.url, server.token) as client:
        quotas = client.resourcequotas(home.namespace)
        await quotas.create(quota("a"))
        await quotas.create(quota("b"))
        assert [one["metadata"]["name"] async for one in quotas.list(limit=1)] == ["a", "b"]
        assert (await quotas.apply(quota("c"))).outcome == "created"
        with pytest.raises(Conflict):
            await quotas.create(quota("a"))
        async with aclosing(quotas.watch()) as events:
            first = [told(await anext(events)) for _ in range(3)]
            await quotas.delete("b", grace_period_seconds=0)
            assert told(await anext(events)) == ("DELETED", "b")
        assert first == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]


async def test_the_async_client_goes_on_after_a_cut(server: Server, home: Home) -> None:
    with cable_to(server.url) as cable:
        async with AsyncClient(cable.url, server.token) as client:
            quotas = client.resourcequotas(home.namespace)
            cable.lose_answers = 1
            await quotas.create(quota("a"))
            async with aclosing(quotas.watch()) as events:
                assert told(await anext(events)) == ("ADDED", "a")
                cable.cut()
                home.quotas.create(quota("b"))
                assert told(await anext(events)) == ("ADDED", "b")


async def test_update_tenant_as_the_specification_shows_it(server: Server, home: Home) -> None:
    async with AsyncClient(server.url, server.token) as client:
        await client.update_tenant(
            home.tenant,
            {
                "max_nodes": 250,
                "max_concurrent_allocations": 50,
                "gpu_hours_budget": 150000,
                "node_hours_budget": 500000,
            },
        )
        quotas = (await client.tenant_quotas(home.tenant))["quotas"]
    assert {name: quotas[name]["limit"] for name in ("nodes", "allocations")} == {"nodes": "250", "allocations": "50"}
