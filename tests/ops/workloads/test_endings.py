"""How things end: node by node, together with their tokens, and seen by all who saw them before."""

from typing import Any

import msgspec
import pytest

from bursar.api.objects.watch import Sight, event_type
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.values.access import Role
from bursar.core.values.selector import parse, parse_fields
from bursar.loops import housekeeping
from bursar.ops.access import token as token_ops
from bursar.ops.lifecycle.bootstrap import bootstrap, first_objects
from bursar.ops.lifecycle.dispatch import delete_command
from bursar.ops.objects import object as object_ops
from bursar.ops.objects.object import Preconditions
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.command import Reply, Written
from bursar.ops.runtime.feed import FedChange
from bursar.ops.runtime.runtime import Office
from bursar.ops.scheduling.evict import evict
from bursar.ops.workloads.report import Report, report
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects.listing import Query
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    bind_unit,
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


async def wide(office: Office, **spec: str) -> None:
    for name in ("a", "b"):
        await node(office, name, gpu=2)
    await allocation(office, "default", "wide", spec={"nodes": 2, **spec}, gpu=2)
    await bind(office, "default", "wide", "a", "b")


async def fails(office: Office, name: str, on: str, exit_code: int, gang: str = "") -> Reply:
    key = Key("Allocation", "default", name)
    command = Report(key=key, origin=TEST, phase=Phase.FAILED, node=on, exit_code=exit_code, gang=gang)
    return await report(office, command)


async def test_the_first_node_that_fails_stops_the_others_and_its_exit_code_is_told(office: Office) -> None:
    await wide(office)
    first = document(await fails(office, "wide", "b", 5))["status"]
    assert (first["phase"], first["reason"], first["message"]) == (
        "Terminating", "MemberFailed", "exit code 5 on b"
    )  # fmt: skip
    async with office.database.reader() as db:
        (left,) = await node_store.load_placements_on(db, ["a", "b"])
    assert (left.node, left.wanted) == ("a", False)
    last = document(await fails(office, "wide", "a", 143))["status"]
    assert (last["phase"], last["exitCode"], last["message"]) == ("Failed", 5, "exit code 5 on b")
    assert last["failure"] == {"node": "b", "exitCode": 5}
    assert [(one["name"], one["exitCode"]) for one in last["nodes"]] == [("a", 143), ("b", 5)]
    assert "reason" not in last
    await assert_counters_equal_charges(office)


async def test_the_others_go_on_where_the_work_asked_for_that(office: Office) -> None:
    await wide(office, onMemberFailure="wait")
    first = document(await fails(office, "wide", "b", 5))["status"]
    assert first["phase"] == "Scheduled"
    last = document(await says(office, "a", "wide", Phase.SUCCEEDED))["status"]
    assert (last["phase"], last["exitCode"], last["message"]) == ("Failed", 5, "exit code 5 on b")


async def test_a_member_that_fails_stops_its_gang_and_nothing_else(office: Office) -> None:
    await node(office, "a", gpu=8)
    gang = {"gangScheduling": {"groupId": "ring", "minMembers": 3}}
    for name in ("one", "two", "three"):
        await allocation(office, "default", name, spec=gang, gpu=1)
    await allocation(office, "default", "alone", gpu=1)
    assert code(await bind_unit(office, "default", dict.fromkeys(("one", "two", "three"), ("a",)))) == "ok"
    await bind(office, "default", "alone", "a")
    failed = document(await fails(office, "two", "a", 3, gang="ring"))["status"]
    assert (failed["phase"], failed["exitCode"], failed["message"]) == ("Failed", 3, "exit code 3 on a")
    assert failed["failure"] == {"node": "a", "exitCode": 3}
    assert failed["nodes"][0]["exitCode"] == 3
    for name in ("one", "three"):
        told = document_of(await get(office, "Allocation", "default", name))
        assert (told["phase"], told["eviction"]["requeue"]) == ("Terminating", False)
        assert told["message"] == "two failed: exit code 3 on a"
        ended = document(await fails(office, name, "a", 0, gang="ring"))["status"]
        assert (ended["phase"], ended["exitCode"], ended["reason"]) == ("Failed", 0, "MemberFailed")
        assert ended["message"] == "two failed: exit code 3 on a"
        assert ended["failure"] == {"allocation": "two", "node": "a", "exitCode": 3}
    assert document_of(await get(office, "Allocation", "default", "alone"))["phase"] == "Scheduled"
    await assert_counters_equal_charges(office)


async def test_work_that_was_preempted_says_so_when_it_runs_again(office: Office) -> None:
    await node(office, "a", gpu=2)
    await allocation(office, "default", "one", gpu=1)
    await bind(office, "default", "one", "a")
    one = await get(office, "Allocation", "default", "one")
    await evict(office, one, Notice("Preempted", "Admin", "root", "Preempted by root"), TEST)
    await says(office, "a", "one", Phase.FAILED)
    again = document(await bind(office, "default", "one", "a"))["status"]
    assert (again["restarts"], again["lastRestart"]["reason"]) == (1, "Preempted")
    assert "message" not in again


async def test_work_that_ended_before_anybody_heard_of_it_ran_for_as_long_as_was_measured(office: Office) -> None:
    await node(office, "a", gpu=2)
    await allocation(office, "default", "short", gpu=1)
    await bind(office, "default", "short", "a")
    key = Key("Allocation", "default", "short")
    ended = Report(key=key, origin=TEST, phase=Phase.SUCCEEDED, node="a", exit_code=0, measured=40_000)
    told = document(await report(office, ended))["status"]
    assert told["startTime"] <= told["endTime"]


def document_of(stored: Stored) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(stored.status)
    return found


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
    await housekeeping.finish_namespaces(office)
    await namespace(office, "lab", "lab")
    assert code(await object_ops.submit(office, command, tenant="")) == "not_found"


async def test_a_first_start_that_was_interrupted_is_completed_by_the_next(database_url: str) -> None:
    from support.runtime.runtime import opened

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
    assert await housekeeping._delete(office, BY_NAME["Allocation"], Key("Allocation", "default", "sly"))


async def _again(office: Office, name: str) -> Written:
    one = await get(office, "Allocation", "default", name)
    return Written(one.key, one.doc, one.status, one.revision)


async def test_everything_in_an_ending_namespace_is_told_to_stop(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "BATCH", 2)
    await namespace(office, "lab")
    await node(office, "a", cpu=10)
    for number in range(5):
        await allocation(office, "lab", f"job-{number}", cpu=1)
        await bind(office, "lab", f"job-{number}", "a")
    await delete(office, "Namespace", "", "lab")
    assert await housekeeping.finish_namespaces(office) == 0
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
