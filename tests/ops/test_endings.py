"""How things end: node by node, together with their tokens, and seen by all who saw them before."""

import pytest

from bursar.api.watch import Sight, event_type
from bursar.core.access import Role
from bursar.core.allocation import Phase
from bursar.core.object import Key
from bursar.core.selector import parse, parse_fields
from bursar.loops import upkeep
from bursar.ops import object as object_ops
from bursar.ops import token as token_ops
from bursar.ops.allocation import Report, report
from bursar.ops.bootstrap import bootstrap, first_objects
from bursar.ops.command import Reply, Written
from bursar.ops.dispatch import delete_command
from bursar.ops.feed import FedChange
from bursar.ops.object import Preconditions
from bursar.ops.office import Office, now
from bursar.store import change as change_store
from bursar.store import node as node_store
from bursar.store.listing import Query
from bursar.wire.kinds import BY_NAME
from offices import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    code,
    counters,
    create,
    delete,
    document,
    end,
    get,
    namespace,
    node,
    tenant,
)


async def says(office: Office, on: str, name: str, phase: Phase) -> Reply:
    return await report(office, Report(key=Key("Allocation", "default", name), origin=TEST, phase=phase, node=on))


async def test_work_on_two_nodes_ends_when_both_have_said_so(office: Office) -> None:
    for name in ("a", "b"):
        await node(office, name, gpu=2)
    await allocation(office, "default", "wide", spec={"nodes": 2}, gpu=2)
    assert code(await bind(office, "default", "wide", "a", "b")) == "ok"
    first = document(await says(office, "a", "wide", Phase.SUCCEEDED))
    assert first["status"]["phase"] == "Scheduled"
    async with office.database.reader() as db:
        rooms = await node_store.load(db, ["a", "b"])
    assert rooms["a"].allocated == {}
    assert rooms["b"].allocated["nvidia.com/gpu"] == 2000
    assert (await counters(office))["tenant:default", "nvidia.com/gpu"].bound == 4000
    assert code(await says(office, "a", "wide", Phase.SUCCEEDED)) == "forbidden"
    last = document(await says(office, "b", "wide", Phase.SUCCEEDED))
    assert last["status"]["phase"] == "Succeeded"
    assert (await counters(office))["tenant:default", "nvidia.com/gpu"].bound == 0
    await assert_counters_equal_charges(office)


async def test_work_that_failed_on_one_node_has_failed(office: Office) -> None:
    for name in ("a", "b"):
        await node(office, name, gpu=2)
    await allocation(office, "default", "wide", spec={"nodes": 2}, gpu=2)
    await bind(office, "default", "wide", "a", "b")
    await says(office, "a", "wide", Phase.FAILED)
    assert document(await says(office, "b", "wide", Phase.SUCCEEDED))["status"]["phase"] == "Failed"


async def test_a_report_that_says_nothing_new_is_no_change(office: Office) -> None:
    await node(office, "a", gpu=2)
    await allocation(office, "default", "one", gpu=1)
    await bind(office, "default", "one", "a")
    first = await says(office, "a", "one", Phase.RUNNING)
    again = await says(office, "a", "one", Phase.RUNNING)
    assert isinstance(first, Written)
    assert again == first
    ended = await says(office, "a", "one", Phase.SUCCEEDED)
    assert await says(office, "a", "one", Phase.SUCCEEDED) == ended


async def test_a_report_about_another_of_the_same_name_is_refused(office: Office) -> None:
    await node(office, "a", gpu=2)
    await allocation(office, "default", "one", gpu=1)
    await bind(office, "default", "one", "a")
    key = Key("Allocation", "default", "one")
    reply = await report(office, Report(key=key, origin=TEST, phase=Phase.FAILED, node="a", uid="alloc-earlier"))
    assert code(reply) == "conflict"


async def test_with_a_node_or_a_tenant_go_its_tokens(office: Office) -> None:
    await node(office, "a", gpu=2)
    await tenant(office, "lab")
    async with office.database.reader() as db:
        made = [
            await token_ops.create_token(db, role=Role.NODE, node="a", user="a", created_by="test", now=now()),
            await token_ops.create_token(db, role=Role.USER, tenant="lab", user="u", created_by="test", now=now()),
        ]
    assert code(await delete(office, "Node", "", "a")) == "ok"
    assert code(await delete(office, "Tenant", "", "lab")) == "ok"
    async with office.database.reader() as db:
        found = await token_ops.find_tokens(db, [one[0].id for one in made if isinstance(one, tuple)])
    assert len(found) == 2
    assert all(one.revoked_at is not None for one in found.values())


async def test_what_became_anothers_is_not_deleted_by_its_former_owner(office: Office) -> None:
    await tenant(office, "lab")
    await namespace(office, "lab", "default")
    before = await get(office, "Namespace", "", "lab")
    command = delete_command(BY_NAME["Namespace"], before, TEST, preconditions=Preconditions())
    await delete(office, "Namespace", "", "lab")
    await upkeep.finish_namespaces(office)
    await namespace(office, "lab", "lab")
    assert code(await object_ops.submit(office, command, tenant="")) == "not_found"


async def test_a_first_start_that_was_interrupted_is_completed_by_the_next(database_url: str) -> None:
    from offices import opened

    async with opened(database_url) as office:
        async with office.database.reader() as db:
            await db.execute("DELETE FROM object WHERE kind IN ('Settings', 'Queue')")
        assert await bootstrap(office) == sum(one["kind"] in ("Settings", "Queue") for one in first_objects())
        assert await bootstrap(office) == 0


async def test_work_without_requests_still_takes_its_place(office: Office) -> None:
    await node(office, "a", cpu=4)
    await allocation(office, "default", "light")
    await bind(office, "default", "light", "a")
    await allocation(office, "default", "whole", spec={"exclusive": True}, cpu=1)
    assert code(await bind(office, "default", "whole", "a")) == "no_capacity"
    assert code(await delete(office, "Node", "", "a")) == "in_use"
    await end(office, "default", "light")
    assert code(await bind(office, "default", "whole", "a")) == "ok"


async def test_a_client_cannot_mark_its_object_as_ending(office: Office) -> None:
    await create(
        office,
        "Allocation",
        {
            "metadata": {
                "name": "sly",
                "namespace": "default",
                "deletionTimestamp": "2020-01-01T00:00:00Z",
                "labels": {"deletionTimestamp": "x"},
            },
            "spec": {},
        },
    )
    assert "deletionTimestamp" not in document(await _again(office, "sly"))["metadata"]
    assert await upkeep._delete(office, BY_NAME["Allocation"], Key("Allocation", "default", "sly"))


async def _again(office: Office, name: str) -> Written:
    one = await get(office, "Allocation", "default", name)
    return Written(one.key, one.doc, one.status, one.revision)


async def test_everything_in_an_ending_namespace_is_told_to_stop(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "BATCH", 2)
    await namespace(office, "lab")
    await node(office, "a", cpu=10)
    for number in range(5):
        await allocation(office, "lab", f"job-{number}", cpu=1)
        await bind(office, "lab", f"job-{number}", "a")
    await delete(office, "Namespace", "", "lab")
    assert await upkeep.finish_namespaces(office) == 0
    for number in range(5):
        assert (await get(office, "Allocation", "lab", f"job-{number}")).fields["status.phase"] == "Terminating"


async def test_whoever_saw_an_object_before_is_told_that_it_is_gone(office: Office) -> None:
    await allocation(office, "default", "one", cpu=1)
    await delete(office, "Allocation", "default", "one")
    async with office.database.reader() as db:
        changes = await change_store.load_since(db, 0, 100)
    gone = FedChange(changes[-1])
    assert gone.change.type == "DELETED"
    pending = parse_fields("status.phase=Pending", ("status.phase",))
    cancelled = parse_fields("status.phase=Cancelled", ("status.phase",))
    assert event_type(Query("Allocation", fields=pending), gone, Sight(True, True)) == "DELETED"
    assert event_type(Query("Allocation", fields=cancelled), gone, Sight(True, True)) is None
    assert event_type(Query("Allocation", labels=parse("app=other")), gone, Sight(True, True)) is None
