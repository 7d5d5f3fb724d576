"""Permits on a real database: checked when work is submitted, changed, bound, and when it preempts."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.scheduling.evict import EvictionVictim, Preempt
from bursar.core.nodes.eviction import EvictionRule, Notice
from bursar.core.objects.object import Key, Origin, Stored
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import preempt
from bursar.ops.workloads.priority import Priorities
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    assert_counters_equal_charges,
    bind,
    change,
    code,
    create,
    delete,
    get,
    namespace,
    node,
    quota,
    refusal,
    tenant,
)

KIND = BY_NAME["Allocation"]
USER = Origin("user:acme/ann", "test")
GPU = "nvidia.com/gpu"
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
async def acme(runtime: Runtime) -> Runtime:
    await tenant(runtime, "acme")
    await namespace(runtime, "lab", "acme")
    return runtime


def spec_of(name: str, spec: dict[str, Any], where: str = "lab", **metadata: Any) -> Any:
    body = {"resources": {"requests": {GPU: "1"}}, **spec}
    return msgspec.convert({"metadata": {"name": name, "namespace": where, **metadata}, "spec": body}, KIND.type)


async def submit(
    runtime: Runtime, name: str, spec: dict[str, Any] | None = None, *, admin: bool = False, where: str = "lab",
    **metadata: Any,
) -> Reply:  # fmt: skip
    one = spec_of(name, spec or {}, where, **metadata)
    assert KIND.check(one) == []
    origin = Origin("user:root", "create") if admin else USER
    return await object_ops.submit(runtime, create_command(KIND, one, origin, admin=admin), tenant="acme")


async def revise(runtime: Runtime, name: str, *, admin: bool = False, where: str = "lab", **fields: Any) -> Reply:
    """Set fields of the spec as a user does; None takes one away."""

    def edit(before: Stored, shown: dict[str, Any]) -> Any:
        spec = {key: value for key, value in {**shown["spec"], **fields}.items() if value is not None}
        one = msgspec.convert({**shown, "spec": spec}, KIND.type)
        return change_command(KIND, before, one, USER, spec_changed=True, admin=admin)

    return await object_ops.change(runtime, Key("Allocation", where, name), edit, tenant="acme")


async def status(runtime: Runtime, name: str, where: str = "lab") -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.json.decode((await get(runtime, "Allocation", where, name)).status)
    return shown


async def shown_of(runtime: Runtime, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.json.decode((await get(runtime, "Allocation", "lab", name)).doc)
    return shown


# Priorities.


async def test_users_may_ask_for_as_much_as_their_tenant(acme: Runtime) -> None:
    for name, spec in (("a", {"priority": 100}), ("b", {"priority": 1000}), ("c", {"priorityClass": "high-priority"}),
                       ("d", {"priorityClass": "batch-high"})):  # fmt: skip
        assert code(await submit(acme, name, spec)) == "ok"
    assert code(await submit(acme, "e", {"priority": 1001})) == "forbidden"
    assert code(await submit(acme, "f", {"priorityClass": "system-critical"})) == "forbidden"
    assert code(await submit(acme, "g", {"priorityClass": "none"})) == "invalid"
    await change(acme, "Tenant", "", "acme", userPriorityMax=5000)
    assert code(await submit(acme, "e", {"priority": 1001})) == "ok"


async def test_an_administrator_may_let_in_more_and_it_is_told_who_did(acme: Runtime) -> None:
    assert code(await submit(acme, "a", {"priorityClass": "system-critical"}, admin=True)) == "ok"
    assert (await status(acme, "a"))["permittedBy"] == "root"
    assert code(await submit(acme, "b", {"priority": 10}, admin=True)) == "ok"
    assert "permittedBy" not in await status(acme, "b")


async def test_a_class_may_be_granted_to_tenants(acme: Runtime) -> None:
    shown = {"metadata": {"name": "urgent"}, "value": 9000, "allowedTenants": ["acme"]}
    assert code(await create(acme, "PriorityClass", shown)) == "ok"
    assert code(await submit(acme, "a", {"priorityClass": "urgent"})) == "ok"
    assert code(await submit(acme, "b", {"priorityClass": "urgent"}, where="default")) == "forbidden"


async def test_a_number_counts_in_the_scope_of_the_class_that_it_reaches(acme: Runtime) -> None:
    terms = [{"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority"]}]
    await quota(acme, "lab", "urgent", hard={"allocations": "1"}, scopeSelector={"matchExpressions": terms})
    assert code(await submit(acme, "a", {"priorityClass": "high-priority"})) == "ok"
    assert code(await submit(acme, "b", {"priority": 1000})) == "quota_exceeded"
    assert code(await submit(acme, "c", {"priority": 999})) == "ok"
    # What the class is worth says which numbers reach it: they are counted anew.
    both = {"hard": {"allocations": "2"}}
    await change(acme, "ResourceQuota", "lab", "urgent", **both)

    def cheaper(before: Stored, shown: dict[str, Any]) -> Any:
        kind = BY_NAME["PriorityClass"]
        one = msgspec.convert({**shown, "value": 900}, kind.type)
        return change_command(kind, before, one, USER, spec_changed=True)

    key = Key("PriorityClass", "", "high-priority")
    assert code(await object_ops.change(acme, key, cheaper, tenant="")) == "ok"
    await assert_counters_equal_charges(acme)
    assert code(await submit(acme, "d", {"priority": 900})) == "quota_exceeded"


async def test_nobody_takes_a_boost_by_naming_a_job(acme: Runtime) -> None:
    """Owner references to a job are the server's to make, and a label makes nothing a part of it."""
    owner = {"apiVersion": "bursar.io/v1", "kind": "Job", "name": "train", "uid": "job-1"}
    await submit(acme, "a", labels={"bursar.io/job": "train"}, ownerReferences=[owner])
    shown = await shown_of(acme, "a")
    assert "ownerReferences" not in shown["metadata"]

    def claim_it(before: Stored, shown: dict[str, Any]) -> Any:
        one = msgspec.convert({**shown, "metadata": {**shown["metadata"], "ownerReferences": [owner]}}, KIND.type)
        return change_command(KIND, before, one, USER, spec_changed=False)

    assert code(await object_ops.change(acme, Key("Allocation", "lab", "a"), claim_it, tenant="acme")) == "ok"
    shown = await shown_of(acme, "a")
    assert "ownerReferences" not in shown["metadata"]
    assert await Priorities(acme.database).of([shown]) == [0]


# Grants name tenants.


async def test_a_tenant_stays_while_a_node_or_a_class_names_it(acme: Runtime) -> None:
    await tenant(acme, "ghost")
    await node(acme, "n1", gpu=4)
    assert code(await change(acme, "Node", "", "n1", tenants=["acme", "ghost"])) == "ok"
    granted = {"metadata": {"name": "urgent"}, "value": 9000, "allowedTenants": ["ghost"]}
    assert code(await create(acme, "PriorityClass", granted)) == "ok"
    refused = refusal(await delete(acme, "Tenant", "", "ghost"))
    assert (refused.code, refused.message) == (
        "in_use", 'tenants "ghost" is named by spec.tenants of node n1 and by allowedTenants of priorityclass urgent',
    )  # fmt: skip
    assert "bursar edit node n1" in refused.hint
    assert code(await delete(acme, "PriorityClass", "", "urgent")) == "ok"
    assert code(await delete(acme, "Tenant", "", "ghost")) == "in_use"
    assert code(await change(acme, "Node", "", "n1", tenants=["acme"])) == "ok"
    assert code(await delete(acme, "Tenant", "", "ghost")) == "ok"


async def test_a_tenant_that_is_not_there_is_granted_nothing(acme: Runtime) -> None:
    absent = {"metadata": {"name": "urgent"}, "value": 9000, "allowedTenants": ["acme", "ghost"]}
    body = {"metadata": {"name": "n1"}, "spec": {"capacity": {"cpu": "1"}, "tenants": ["ghost"]}}
    await node(acme, "n2", gpu=4)
    for reply, field in (
        (await create(acme, "PriorityClass", absent), "allowedTenants"),
        (await create(acme, "Node", body), "spec.tenants"),
        (await change(acme, "Node", "", "n2", tenants=["ghost"]), "spec.tenants"),
    ):
        refused = refusal(reply)
        assert (refused.code, refused.message) == ("invalid", "Tenant 'ghost' does not exist")
        assert [one.field for one in refused.causes] == [field]


async def test_grants_from_before_keep_their_names_and_hand_them_to_nobody(acme: Runtime) -> None:
    """Older versions let a node name a tenant that does not exist."""
    await node(acme, "n1", gpu=4)
    async with acme.database.reader() as db:
        await db.execute("""UPDATE node SET gate = '{"tenants": ["ghost"]}' WHERE name = 'n1'""")
        named = """replace(doc::text, '"spec":{', '"spec":{"tenants":["ghost"],')::json"""
        await db.execute(f"UPDATE object SET doc = {named} WHERE name = 'n1'")
    assert code(await change(acme, "Node", "", "n1", unschedulable=True)) == "ok"
    assert code(await tenant(acme, "ghost")) == "in_use"
    assert code(await change(acme, "Node", "", "n1", tenants=["acme"])) == "ok"
    assert code(await tenant(acme, "ghost")) == "ok"


@pytest.mark.parametrize("first", ["naming", "deleting"])
async def test_a_tenant_is_never_deleted_past_a_grant_that_is_being_made(
    acme: Runtime, rival: Runtime, first: str
) -> None:
    """Whichever has the tree's lock first is held up by a row that it locks next; the other waits for the tree."""
    await tenant(acme, "ghost")
    await node(acme, "n1", gpu=4)
    by = {"naming": lambda: change(acme, "Node", "", "n1", tenants=["ghost"]),
          "deleting": lambda: delete(rival, "Tenant", "", "ghost")}  # fmt: skip
    other, row = {"naming": ("deleting", "n1"), "deleting": ("naming", "ghost")}[first]
    async with (
        acme.database.reader() as witness, asyncio.timeout(30), asyncio.TaskGroup() as both,
        acme.database.reader() as db, db.transaction(),
    ):  # fmt: skip
        await db.execute("SELECT FROM object WHERE name = $1 FOR UPDATE", row)
        tasks = []
        for number, verb in enumerate((first, other), 1):
            tasks.append(both.create_task(by[verb]()))
            while await witness.fetchval(BLOCKED) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    expected = {"naming": ["ok", "in_use"], "deleting": ["ok", "invalid"]}
    assert [code(one.result()) for one in tasks] == expected[first]


# Parts of devices.


async def test_parts_of_a_device_that_are_too_small_are_refused(acme: Runtime) -> None:
    small, fine = ({"resources": {"requests": {GPU: part}}} for part in ("0.05", "0.1"))
    assert code(await submit(acme, "a", small)) == "invalid"
    assert code(await submit(acme, "a", small, admin=True)) == "invalid"
    assert code(await submit(acme, "a", fine)) == "ok"
    await change(acme, "Settings", "", "system", scheduling={"gpuFractionMin": 0.01})
    assert code(await submit(acme, "b", small)) == "ok"


# Binding.


async def gated(runtime: Runtime, name: str, **spec: Any) -> None:
    await node(runtime, name, gpu=4)
    assert code(await change(runtime, "Node", "", name, **spec)) == "ok"


@pytest.mark.parametrize(
    ("said", "fine"), [({}, False), ({"gpuFractions": "Trusted"}, True), ({"gpuFractions": "Refused"}, False)]
)
async def test_parts_of_devices_are_held_to_the_systems_word_when_they_are_bound(
    acme: Runtime, said: dict[str, Any], fine: bool
) -> None:
    await gated(acme, "n1", **said)
    assert code(await submit(acme, "a", {"resources": {"requests": {GPU: "0.5"}}})) == "ok"
    await change(acme, "Settings", "", "system", scheduling={"gpuFractions": "Refused"})
    assert code(await bind(acme, "lab", "a", "n1")) == ("ok" if fine else "stale")


async def test_a_grant_that_was_taken_back_counts_no_more_when_work_is_bound(acme: Runtime) -> None:
    await gated(acme, "n1", taints=[{"key": "tenant", "value": "acme"}])
    asked = {"scheduling": {"tolerations": [{"key": "tenant", "operator": "Equal", "value": "acme"}]}}
    assert code(await submit(acme, "a", asked)) == "forbidden"
    await change(acme, "Tenant", "", "acme", tolerations=[{"key": "tenant", "operator": "Equal", "value": "acme"}])
    assert code(await submit(acme, "a", asked)) == "ok"
    assert code(await submit(acme, "b", asked)) == "ok"
    assert code(await bind(acme, "lab", "a", "n1")) == "ok"
    await change(acme, "Tenant", "", "acme", tolerations=[])
    assert code(await bind(acme, "lab", "b", "n1")) == "stale"


async def rivals(acme: Runtime, spec: dict[str, Any] | None = None, *, admin: bool = False) -> Preempt:
    """The plan of an eviction by priority: work of acme, with this spec, evicts work of rival."""
    await tenant(acme, "rival")
    await namespace(acme, "den", "rival")
    await node(acme, "n1", gpu=1)
    await submit(acme, "victim", where="den")
    assert code(await bind(acme, "den", "victim", "n1")) == "ok"
    assert code(await submit(acme, "asker", spec, admin=admin)) == "ok"
    asker, victim = await get(acme, "Allocation", "lab", "asker"), await get(acme, "Allocation", "den", "victim")
    notice = Notice("Preempted", EvictionRule.LOWER_PRIORITY, "x", "x", 0)
    return Preempt(
        key=asker.key, uid=asker.uid, nominated=("n1",), until=now(), origin=USER,
        victims=(EvictionVictim(victim.key, victim.uid, notice),),
    )  # fmt: skip


async def class_changes(runtime: Runtime, name: str, **fields: Any) -> None:
    def by(before: Stored, shown: dict[str, Any]) -> Any:
        kind = BY_NAME["PriorityClass"]
        return change_command(kind, before, msgspec.convert({**shown, **fields}, kind.type), USER, spec_changed=True)

    assert code(await object_ops.change(runtime, Key("PriorityClass", "", name), by, tenant="")) == "ok"


async def test_between_tenants_a_plan_by_priority_is_refused_unless_the_class_says_so(acme: Runtime) -> None:
    plan = await rivals(acme, {"priorityClass": "high-priority"})
    assert [code(one) for one in await preempt(acme, [plan])] == ["stale"]
    await class_changes(acme, "high-priority", crossTenant=True)
    assert [code(one) for one in await preempt(acme, [plan])] == ["ok"]


@pytest.mark.parametrize(("admin", "expected"), [(False, "stale"), (True, "ok")])
async def test_a_class_that_a_tenant_may_no_longer_use_evicts_nothing_for_it(
    acme: Runtime, admin: bool, expected: str
) -> None:
    await class_changes(acme, "high-priority", crossTenant=True)
    if admin:  # The administrator's exception is for a class that the tenant could not use to begin with.
        await change(acme, "Tenant", "", "acme", userPriorityMax=100)
    plan = await rivals(acme, {"priorityClass": "high-priority"}, admin=admin)
    await change(acme, "Tenant", "", "acme", userPriorityMax=100)
    assert [code(one) for one in await preempt(acme, [plan])] == [expected]


@pytest.mark.parametrize(("spec", "expected"), [({}, "ok"), ({"priority": 900}, "ok"), ({"priority": 901}, "stale")])
async def test_work_without_a_class_has_the_default_one_when_a_plan_is_committed(
    acme: Runtime, spec: dict[str, Any], expected: str
) -> None:
    shown = {"metadata": {"name": "usual"}, "value": 900, "globalDefault": True, "crossTenant": True}
    assert code(await create(acme, "PriorityClass", shown)) == "ok"
    plan = await rivals(acme, spec)
    assert [code(one) for one in await preempt(acme, [plan])] == [expected]


# Changing what is pending.


async def test_what_is_pending_may_be_made_more_urgent_and_keeps_its_place(acme: Runtime) -> None:
    await submit(acme, "a", {"priority": 1, "queue": "default"})
    before = await shown_of(acme, "a")
    more = {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}
    assert code(await revise(acme, "a", priority=200, queue="hpc", ttl="2h", scheduling=more)) == "ok"
    after = await shown_of(acme, "a")
    assert (after["spec"]["priority"], after["spec"]["queue"], after["spec"]["ttl"]) == (200, "hpc", "2h")
    assert after["spec"]["scheduling"] == more
    assert after["metadata"]["creationTimestamp"] == before["metadata"]["creationTimestamp"]
    assert after["metadata"]["generation"] == 2
    await assert_counters_equal_charges(acme)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"priority": 1001}, "forbidden", id="above what it may"),
        pytest.param({"priorityClass": "system-critical"}, "forbidden", id="a class for administrators"),
        pytest.param({"priorityClass": "none"}, "invalid", id="a class that is not there"),
        pytest.param({"queue": "none"}, "invalid", id="a queue that is not there"),
        pytest.param(
            {"scheduling": {"tolerations": [{"key": "tenant", "operator": "Exists"}]}}, "forbidden", id="taint"
        ),
        pytest.param({"resources": {"requests": {GPU: "2"}}}, "immutable", id="other resources"),
        pytest.param({"command": ["true"]}, "immutable", id="another command"),
        pytest.param({"scheduling": {"nodeSelector": {"a": "b"}}}, "immutable", id="other nodes"),
    ],
)
async def test_a_change_is_judged_as_a_submission_is(acme: Runtime, fields: dict[str, Any], expected: str) -> None:
    await submit(acme, "a")
    assert code(await revise(acme, "a", **fields)) == expected
    await assert_counters_equal_charges(acme)


async def test_what_a_scoped_quota_counts_moves_with_a_change(acme: Runtime) -> None:
    terms = [{"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority"]}]
    await quota(acme, "lab", "urgent", hard={"allocations": "1"}, scopeSelector={"matchExpressions": terms})
    for name in ("a", "b"):
        await submit(acme, name)
    assert code(await revise(acme, "a", priorityClass="high-priority")) == "ok"
    assert code(await revise(acme, "b", priority=1000)) == "quota_exceeded"
    assert code(await revise(acme, "a", priorityClass=None)) == "ok"
    assert code(await revise(acme, "b", priority=1000)) == "ok"
    await assert_counters_equal_charges(acme)


async def test_a_member_of_a_gang_that_is_not_complete_may_be_changed(acme: Runtime) -> None:
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 2}}
    await submit(acme, "a", gang)
    assert code(await revise(acme, "a", priority=7)) == "ok"
    assert code(await submit(acme, "b", gang)) == "ok"
    await assert_counters_equal_charges(acme)
    assert code(await revise(acme, "a", ttl="1h")) == "ok"
    await assert_counters_equal_charges(acme)


async def test_of_what_is_placed_only_the_policy_on_failures_changes(acme: Runtime) -> None:
    await node(acme, "n1", gpu=1)
    await submit(acme, "a")
    await bind(acme, "lab", "a", "n1")
    refused = refusal(await revise(acme, "a", ttl="1h"))
    assert refused.code == "immutable"
    assert "Scheduled" in refused.message
    assert "except onMemberFailure" in refused.message
    assert "priorityClass" in refused.hint
    await change(acme, "Tenant", "", "acme", userPriorityMax=-1)
    assert code(await revise(acme, "a", onMemberFailure="wait")) == "ok", "what it was placed with is not asked again"
    assert code(await revise(acme, "a", onMemberFailure="stop", ttl="1h")) == "immutable"
    await assert_counters_equal_charges(acme)


async def test_an_administrator_s_exception_ends_with_the_change_that_needs_none(acme: Runtime) -> None:
    await submit(acme, "a", {"priority": 5000}, admin=True)
    assert code(await revise(acme, "a", ttl="1h")) == "forbidden"
    assert code(await revise(acme, "a", ttl="1h", admin=True)) == "ok"
    assert "permittedBy" in await status(acme, "a")
    assert code(await revise(acme, "a", priority=5)) == "ok"
    assert "permittedBy" not in await status(acme, "a")


# Whose figures are told.


async def test_a_limit_above_the_tenant_is_told_without_its_figures(runtime: Runtime) -> None:
    await tenant(runtime, "acme", limits={"allocations": "6"})
    await tenant(runtime, "child", parent="acme")
    await namespace(runtime, "lab", "acme")
    await namespace(runtime, "den", "child")
    for number in range(6):
        await submit(runtime, f"a{number}")
    one = spec_of("b", {}, "den")
    refused = refusal(
        await object_ops.submit(runtime, create_command(KIND, one, Origin("user:child/kim", "create")), tenant="child")
    )
    assert refused.code == "quota_exceeded"
    assert "acme" not in refused.message
    assert not any(cause.limit or cause.current_usage or cause.scope for cause in refused.causes)
    own = refusal(await submit(runtime, "b"))
    assert (own.causes[0].limit, own.causes[0].current_usage) == ("6", "6")
    assert 'tenant "acme"' in own.message
    admin = refusal(await submit(runtime, "b", where="den", admin=True))
    assert 'tenant "acme"' in admin.message
