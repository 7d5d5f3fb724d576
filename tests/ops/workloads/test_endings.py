"""How things end: node by node, together with their tokens, and seen by all who saw them before."""

import pytest

from bursar.api.objects.watch import Sight, event_type
from bursar.commands.command import Reply, Written
from bursar.commands.lifecycle.dispatch import delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.commands.workloads.report import Report
from bursar.core.nodes.eviction import Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.access import Role
from bursar.core.values.selector import parse, parse_fields
from bursar.loops import housekeeping
from bursar.ops.access import token as token_ops
from bursar.ops.lifecycle.bootstrap import bootstrap, first_objects
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.feed import FedChange
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import evict, report
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects.listing import Query
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
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


async def says(runtime: Runtime, on: str, name: str, phase: Phase) -> Reply:
    return await report(runtime, Report(key=Key("Allocation", "default", name), origin=TEST, phase=phase, node=on))


async def test_work_on_two_nodes_ends_when_both_have_said_so(runtime: Runtime) -> None:
    for name in ("a", "b"):
        await node(runtime, name, gpu=2)
    await allocation(runtime, "default", "wide", spec={"nodes": 2}, gpu=2)
    assert code(await bind(runtime, "default", "wide", "a", "b")) == "ok"
    first = document(await says(runtime, "a", "wide", Phase.SUCCEEDED))
    assert first["status"]["phase"] == "Scheduled"
    async with runtime.database.reader() as db:
        capacities = await node_store.load(db, ["a", "b"])
    assert capacities["a"].allocated == {}
    assert capacities["b"].allocated["nvidia.com/gpu"] == 2000
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 4000
    assert code(await says(runtime, "a", "wide", Phase.SUCCEEDED)) == "forbidden"
    last = document(await says(runtime, "b", "wide", Phase.SUCCEEDED))
    assert last["status"]["phase"] == "Succeeded"
    assert (await counters(runtime))["tenant:default", "nvidia.com/gpu"].bound == 0
    await assert_counters_equal_charges(runtime)


async def wide(runtime: Runtime, **spec: str) -> None:
    for name in ("a", "b"):
        await node(runtime, name, gpu=2)
    await allocation(runtime, "default", "wide", spec={"nodes": 2, **spec}, gpu=2)
    await bind(runtime, "default", "wide", "a", "b")


async def test_what_becomes_of_the_others_may_be_decided_while_it_runs(runtime: Runtime) -> None:
    await wide(runtime)
    assert code(await change(runtime, "Allocation", "default", "wide", onMemberFailure="wait")) == "ok"
    await assert_counters_equal_charges(runtime)
    for name in ("a", "b"):
        assert code(await says(runtime, name, "wide", Phase.RUNNING)) == "ok"
    first = document(await says(runtime, "b", "wide", Phase.FAILED))["status"]
    assert first["phase"] == "Running", "the other one goes on"
    assert document(await says(runtime, "a", "wide", Phase.SUCCEEDED))["status"]["phase"] == "Failed"
    assert code(await change(runtime, "Allocation", "default", "wide", onMemberFailure="stop")) == "immutable"
    await assert_counters_equal_charges(runtime)


async def test_work_that_was_preempted_says_so_when_it_runs_again(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=2)
    await allocation(runtime, "default", "one", gpu=1)
    await bind(runtime, "default", "one", "a")
    one = await get(runtime, "Allocation", "default", "one")
    await evict(runtime, one, Notice("Preempted", "Admin", "root", "Preempted by root"), TEST)
    await says(runtime, "a", "one", Phase.FAILED)
    again = document(await bind(runtime, "default", "one", "a"))["status"]
    assert (again["restarts"], again["lastRestart"]["reason"]) == (1, "Preempted")
    assert "message" not in again


async def test_work_that_ended_before_anybody_heard_of_it_ran_for_as_long_as_was_measured(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=2)
    await allocation(runtime, "default", "short", gpu=1)
    await bind(runtime, "default", "short", "a")
    key = Key("Allocation", "default", "short")
    ended = Report(key=key, origin=TEST, phase=Phase.SUCCEEDED, node="a", exit_code=0, measured=40_000)
    told = document(await report(runtime, ended))["status"]
    assert told["startTime"] <= told["endTime"]


async def test_a_report_that_says_nothing_new_is_no_change(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=2)
    await allocation(runtime, "default", "one", gpu=1)
    await bind(runtime, "default", "one", "a")
    first = await says(runtime, "a", "one", Phase.RUNNING)
    again = await says(runtime, "a", "one", Phase.RUNNING)
    assert isinstance(first, Written)
    assert again == first
    ended = await says(runtime, "a", "one", Phase.SUCCEEDED)
    assert await says(runtime, "a", "one", Phase.SUCCEEDED) == ended


async def test_with_a_node_or_a_tenant_go_its_tokens(runtime: Runtime) -> None:
    await node(runtime, "a", gpu=2)
    await tenant(runtime, "lab")
    async with runtime.database.reader() as db:
        made = [
            await token_ops.create_token(db, role=Role.NODE, node="a", user="a", created_by="test", now=now()),
            await token_ops.create_token(db, role=Role.USER, tenant="lab", user="u", created_by="test", now=now()),
        ]
    assert code(await delete(runtime, "Node", "", "a")) == "ok"
    assert code(await delete(runtime, "Tenant", "", "lab")) == "ok"
    async with runtime.database.reader() as db:
        found = await token_ops.find_tokens(db, [one[0].id for one in made if isinstance(one, tuple)])
    assert len(found) == 2
    assert all(one.revoked_at is not None for one in found.values())


async def test_what_became_anothers_is_not_deleted_by_its_former_owner(runtime: Runtime) -> None:
    await tenant(runtime, "lab")
    await namespace(runtime, "lab", "default")
    before = await get(runtime, "Namespace", "", "lab")
    command = delete_command(BY_NAME["Namespace"], before, TEST, preconditions=DeletePreconditions())
    await delete(runtime, "Namespace", "", "lab")
    await housekeeping.finish_namespaces(runtime)
    await namespace(runtime, "lab", "lab")
    assert code(await object_ops.submit(runtime, command, tenant="")) == "not_found"


async def test_a_first_start_that_was_interrupted_is_completed_by_the_next(database_url: str) -> None:
    from support.runtime.runtime import opened

    async with opened(database_url) as runtime:
        async with runtime.database.reader() as db:
            await db.execute("DELETE FROM object WHERE kind IN ('Settings', 'Queue')")
        assert await bootstrap(runtime) == sum(one["kind"] in ("Settings", "Queue") for one in first_objects())
        assert await bootstrap(runtime) == 0


async def test_work_without_requests_still_takes_its_place(runtime: Runtime) -> None:
    await node(runtime, "a", cpu=4)
    await allocation(runtime, "default", "light")
    await bind(runtime, "default", "light", "a")
    await allocation(runtime, "default", "whole", spec={"exclusive": True}, cpu=1)
    assert code(await bind(runtime, "default", "whole", "a")) == "no_capacity"
    assert code(await delete(runtime, "Node", "", "a")) == "in_use"
    await end(runtime, "default", "light")
    assert code(await bind(runtime, "default", "whole", "a")) == "ok"


async def test_a_client_cannot_mark_its_object_as_ending(runtime: Runtime) -> None:
    await create(
        runtime,
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
    assert "deletionTimestamp" not in document(await _again(runtime, "sly"))["metadata"]
    assert await housekeeping._delete(runtime, BY_NAME["Allocation"], Key("Allocation", "default", "sly"))


async def _again(runtime: Runtime, name: str) -> Written:
    one = await get(runtime, "Allocation", "default", name)
    return Written(one.key, one.doc, one.status, one.revision)


async def test_everything_in_an_ending_namespace_is_told_to_stop(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "BATCH", 2)
    await namespace(runtime, "lab")
    await node(runtime, "a", cpu=10)
    for number in range(5):
        await allocation(runtime, "lab", f"job-{number}", cpu=1)
        await bind(runtime, "lab", f"job-{number}", "a")
    await delete(runtime, "Namespace", "", "lab")
    assert await housekeeping.finish_namespaces(runtime) == 0
    for number in range(5):
        assert (await get(runtime, "Allocation", "lab", f"job-{number}")).fields["status.phase"] == "Terminating"


async def test_whoever_saw_an_object_before_is_told_that_it_is_gone(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", cpu=1)
    await delete(runtime, "Allocation", "default", "one")
    async with runtime.database.reader() as db:
        changes = await change_store.load_since(db, 0, 100)
    gone = FedChange(changes[-1])
    assert gone.change.type == "DELETED"
    pending = parse_fields("status.phase=Pending", ("status.phase",))
    cancelled = parse_fields("status.phase=Cancelled", ("status.phase",))
    assert event_type(Query("Allocation", fields=pending), gone, Sight(True, True)) == "DELETED"
    assert event_type(Query("Allocation", fields=cancelled), gone, Sight(True, True)) is None
    assert event_type(Query("Allocation", labels=parse("app=other")), gone, Sight(True, True)) is None
