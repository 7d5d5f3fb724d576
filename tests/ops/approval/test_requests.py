"""Requests that somebody tries to get past a gate, or that change, end or lose their policy while they are pending."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import change_command, delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.core.objects.approval import Decision, Verdict
from bursar.core.objects.object import Origin, Stored
from bursar.ops.approval import decide as ops
from bursar.ops.approval.decide import Judgement
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.job_controller import step
from bursar.wire.kinds.registry import BY_NAME
from support.approval.requests import approval, claim, decide, gated, key, status, used
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    bind_unit,
    change,
    code,
    create,
    delete,
    get,
    node,
    refusal,
)

PENDING = "pending_requests"
OPERATOR = Origin("user:operator", "patch")
CLAIM = BY_NAME["ResourceClaim"]
PAIR = {"gangScheduling": {"groupId": "g", "minMembers": 2}}
CPU = {"resources": {"requests": {"cpu": "1"}}}


async def finalizer(runtime: Runtime, name: str, *finalizers: str) -> Reply:
    """Set the finalizers of a claim, as an operator does."""

    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document["metadata"]["finalizers"] = list(finalizers)
        one = msgspec.convert(document, CLAIM.type)
        return change_command(CLAIM, before, one, OPERATOR, spec_changed=False)

    return await object_ops.change(runtime, key("ResourceClaim", "acme", name), edit, tenant="acme")


async def report(runtime: Runtime, name: str, **said: Any) -> Reply:
    """Write the status of a claim, as an operator does."""

    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document["status"] = {**document["status"], **said}
        one = msgspec.convert(document, CLAIM.type)
        return change_command(CLAIM, before, one, OPERATOR, spec_changed=False, status=True)

    return await object_ops.change(runtime, key("ResourceClaim", "acme", name), edit, tenant="acme")


async def grown(runtime: Runtime, name: str, by: str, **resources: Any) -> Reply:
    """Change what a claim asks for, as a user."""

    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document["spec"]["resources"] = resources
        one = msgspec.convert(document, CLAIM.type)
        return change_command(
            CLAIM, before, one, Origin(f"user:{by}", "update"), spec_changed=True
        )  # fmt: skip

    return await object_ops.change(runtime, key("ResourceClaim", "acme", name), edit, tenant="acme")


async def judged(runtime: Runtime, kind: str, name: str, verdict: str = "approve", **more: Any) -> Judgement:
    """A decision that was made now and arrives later."""
    decision = Decision(more.pop("gate", "quota"), Verdict(verdict), "ann")
    return Judgement(
        await get(runtime, kind, "acme", name), decision, Origin("user:ann", verdict), pinned=more.get("pinned", False)
    )  # fmt: skip


# Gangs.


async def test_a_member_that_joins_later_passes_every_gate_with_the_others(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual", "quota"), limits={"cpu": 100})
    for name in ("m1", "m2"):
        await allocation(runtime, "acme", name, spec=PAIR, cpu=1)
    assert code(await decide(runtime, "Allocation", "acme", "m1", gate="manual")) == "ok"
    await allocation(runtime, "acme", "m3", spec=PAIR, cpu=64)
    for name in ("m1", "m2", "m3"):
        gates = (await approval(runtime, "Allocation", "acme", name))["gates"]
        assert gates["manual"]["state"] == "pending", name
    assert code(await decide(runtime, "Allocation", "acme", "m1", gate="quota")) == "conflict"
    assert await used(runtime, "acme", "cpu") == 0
    for gate in ("manual", "quota"):
        assert code(await decide(runtime, "Allocation", "acme", "m2", gate=gate)) == "ok"
    assert await used(runtime, "acme", "cpu") == 66
    await assert_counters_equal_charges(runtime)


async def test_a_gang_that_grew_since_it_was_read_is_not_decided_by_its_old_version(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual",))
    for name in ("m1", "m2"):
        await allocation(runtime, "acme", name, spec=PAIR, cpu=1)
    pinned = await judged(runtime, "Allocation", "m2", gate="manual", pinned=True)
    await allocation(runtime, "acme", "m3", spec=PAIR, cpu=64)
    assert code(await ops.decide(runtime, pinned)) == "conflict"
    assert (
        code(await ops.decide(runtime, await judged(runtime, "Allocation", "m3", gate="manual", pinned=True))) == "ok"
    )


async def test_nobody_approves_a_gang_of_which_they_submitted_a_member(runtime: Runtime) -> None:
    await gated(runtime)
    for name, user in (("m1", "acme/bob"), ("m2", "acme/ann")):
        document = {"metadata": {"name": name, "namespace": "acme"}, "spec": {**CPU, **PAIR}}
        one = msgspec.convert(document, BY_NAME["Allocation"].type)
        command = create_command(BY_NAME["Allocation"], one, Origin(f"user:{user}", "create"))
        assert code(await object_ops.submit(runtime, command, tenant="acme")) == "ok"
    assert code(await decide(runtime, "Allocation", "acme", "m1", by="ann", tenants=("*",))) == "forbidden"
    assert code(await decide(runtime, "Allocation", "acme", "m1", by="eve", tenants=("*",))) == "ok"


async def test_a_job_does_not_charge_members_of_its_gang_that_await_approval(runtime: Runtime) -> None:
    """The policy gates allocations alone; a job whose template names their gang joins them without a gate."""
    await gated(runtime, approval={"kinds": ["Allocation"]}, limits={"cpu": 8})
    await node(runtime, "n1", cpu=8)
    await allocation(runtime, "acme", "m1", spec=PAIR, cpu=4)
    template = {"spec": {**CPU, **PAIR}}
    spec = {"parallelism": 2, "completions": 2, "template": template}
    assert code(await create(runtime, "Job", {"metadata": {"name": "j", "namespace": "acme"}, "spec": spec})) == "ok"
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (0, 1)
    every = {"m1": ("n1",), "j-0": ("n1",), "j-1": ("n1",)}
    assert code(await bind_unit(runtime, "acme", every)) == "stale"
    assert code(await bind(runtime, "acme", "j-0", "n1")) == "stale", "its gang is not approved as a whole"
    assert code(await decide(runtime, "Allocation", "acme", "m1")) == "ok"
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (6, 0)
    assert code(await bind_unit(runtime, "acme", every)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_a_job_beside_a_late_member_that_awaits_approval_charges_its_own_alone(runtime: Runtime) -> None:
    await gated(runtime, approval={"kinds": ["Allocation"]})
    await allocation(runtime, "acme", "m1", spec=PAIR, cpu=4)
    await allocation(runtime, "acme", "m2", spec=PAIR, cpu=4)
    assert code(await decide(runtime, "Allocation", "acme", "m1")) == "ok"
    await allocation(runtime, "acme", "late", spec=PAIR, cpu=16)
    spec = {"parallelism": 2, "completions": 2, "template": {"spec": {**CPU, **PAIR}}}
    assert code(await create(runtime, "Job", {"metadata": {"name": "j", "namespace": "acme"}, "spec": spec})) == "ok"
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (10, 1)
    await assert_counters_equal_charges(runtime)


# Changes while a request is pending.


async def test_a_decision_is_about_the_spec_that_was_judged(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual",))
    await claim(runtime, "acme", "c", clusters=1)
    old = await judged(runtime, "ResourceClaim", "c", gate="manual")
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 100})
    said = refusal(await ops.decide(runtime, old))
    assert (said.code, "changed meanwhile; it is pending" in said.message) == ("conflict", True)
    assert await used(runtime, "acme", "clusters") == 0
    assert code(await ops.decide(runtime, await judged(runtime, "ResourceClaim", "c", gate="manual"))) == "ok"


async def test_asking_for_more_has_every_gate_judge_again_and_asking_for_less_does_not(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual", "quota"))
    await claim(runtime, "acme", "c", clusters=4)
    assert code(await decide(runtime, "ResourceClaim", "acme", "c", gate="manual")) == "ok"
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 3})
    assert (await approval(runtime, "ResourceClaim", "acme", "c"))["gates"]["manual"]["state"] == "approved"
    await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 4})
    assert (await approval(runtime, "ResourceClaim", "acme", "c"))["gates"]["manual"]["state"] == "pending"
    assert await used(runtime, "acme", PENDING) == 1
    await assert_counters_equal_charges(runtime)


async def test_nobody_approves_growth_that_they_asked_for(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "c", clusters=1)
    assert code(await decide(runtime, "ResourceClaim", "acme", "c")) == "ok"
    assert code(await grown(runtime, "c", "acme/ann", clusters=5)) == "ok"
    assert (await approval(runtime, "ResourceClaim", "acme", "c"))["change"]["user"] == "acme/ann"
    assert code(await decide(runtime, "ResourceClaim", "acme", "c", by="ann", tenants=("company",))) == "forbidden"
    assert code(await decide(runtime, "ResourceClaim", "acme", "c", by="eve", tenants=("company",))) == "ok"
    assert await used(runtime, "acme", "clusters") == 5


async def test_a_denied_request_that_asks_again_is_a_new_request(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "c", clusters=9)
    await decide(runtime, "ResourceClaim", "acme", "c", "deny", reason="too many")
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 1})) == "ok"
    now = await approval(runtime, "ResourceClaim", "acme", "c")
    assert (now["state"], "reason" in now, now["gates"]["quota"]["state"]) == ("pending", False, "pending")
    assert await used(runtime, "acme", PENDING) == 1
    await assert_counters_equal_charges(runtime)


async def test_work_keeps_its_gate_when_its_urgency_changes(runtime: Runtime) -> None:
    await gated(runtime)
    await node(runtime, "n1", cpu=8)
    await allocation(runtime, "acme", "a", cpu=1)
    assert code(await change(runtime, "Allocation", "acme", "a", priority=5)) == "ok"
    assert (await approval(runtime, "Allocation", "acme", "a"))["state"] == "pending"
    assert code(await bind(runtime, "acme", "a", "n1")) == "stale"
    assert code(await decide(runtime, "Allocation", "acme", "a")) == "ok"
    assert code(await bind(runtime, "acme", "a", "n1")) == "ok"
    await assert_counters_equal_charges(runtime)


# Policies that change.


async def test_requests_stay_decidable_when_their_policy_is_gone(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual", "external:budget"))
    await claim(runtime, "acme", "c", clusters=1)
    assert code(await change(runtime, "Tenant", "", "acme", approval={"gates": []})) == "ok"
    await claim(runtime, "acme", "free", clusters=1)
    assert "approval" not in await status(runtime, "ResourceClaim", "acme", "free")
    assert await used(runtime, "acme", "clusters") == 1
    for gate in ("manual", "external:budget"):
        assert code(await decide(runtime, "ResourceClaim", "acme", "c", gate=gate)) == "ok"
    assert await used(runtime, "acme", "clusters") == 2
    await assert_counters_equal_charges(runtime)


async def test_a_policy_that_comes_later_gates_growth_and_leaves_what_runs(runtime: Runtime) -> None:
    await gated(runtime, gates=())
    await claim(runtime, "acme", "c", clusters=2)
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (2, 0)
    assert code(await change(runtime, "Tenant", "", "acme", approval={"gates": ["manual"]})) == "ok"
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 1})) == "ok"
    assert await used(runtime, "acme", "clusters") == 1
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 3})) == "ok"
    now = await status(runtime, "ResourceClaim", "acme", "c")
    assert (now["approval"]["change"]["state"], now["granted"]["resources"]) == ("pending", {"clusters": "1"})
    assert code(await decide(runtime, "ResourceClaim", "acme", "c", gate="manual")) == "ok"
    assert await used(runtime, "acme", "clusters") == 3
    await assert_counters_equal_charges(runtime)


# Jobs.


async def job(runtime: Runtime, name: str, **spec: Any) -> Reply:
    document = {"metadata": {"name": name, "namespace": "acme"}, "spec": {"template": {"spec": CPU}, **spec}}
    return await create(runtime, "Job", document)


async def test_a_job_whose_names_are_taken_stays_pending_and_says_so(runtime: Runtime) -> None:
    await gated(runtime, approval={"kinds": ["Job"]})
    await job(runtime, "train", parallelism=2, completions=2)
    await allocation(runtime, "acme", "train-1", cpu=1)
    assert code(await decide(runtime, "Job", "acme", "train")) == "already_exists"
    now = await approval(runtime, "Job", "acme", "train")
    assert (now["state"], now["reason"]) == ("pending", 'allocations "train-1" already exists')
    await delete(runtime, "Allocation", "acme", "train-1")
    assert code(await decide(runtime, "Job", "acme", "train")) == "ok"
    assert (await used(runtime, "acme", "cpu"), await used(runtime, "acme", PENDING)) == (2, 0)
    await assert_counters_equal_charges(runtime)


async def test_a_denied_job_is_over_and_its_controller_makes_nothing(runtime: Runtime) -> None:
    await gated(runtime)
    await job(runtime, "train", parallelism=2, completions=2)
    assert code(await decide(runtime, "Job", "acme", "train", "deny", reason="not now")) == "ok"
    await step(runtime, key("Job", "acme", "train"))
    now = await status(runtime, "Job", "acme", "train")
    assert (now["phase"], now["reason"], now["approval"]["state"]) == ("Failed", "ApprovalDenied", "denied")
    assert code(await delete(runtime, "Allocation", "acme", "train-0")) == "not_found"
    assert code(await delete(runtime, "Job", "acme", "train")) == "ok"
    await assert_counters_equal_charges(runtime)


# Deletion, and charges that stay until an operator is done.


async def test_pending_work_that_is_deleted_awaits_nothing(runtime: Runtime) -> None:
    await gated(runtime)
    await allocation(runtime, "acme", "a", cpu=1)
    before = await get(runtime, "Allocation", "acme", "a")

    def hold(one: Stored, document: dict[str, Any]) -> Any:
        document["metadata"]["finalizers"] = ["example.com/hold"]
        held = msgspec.convert(document, BY_NAME["Allocation"].type)
        return change_command(BY_NAME["Allocation"], one, held, Origin("user:x", "patch"), spec_changed=False)

    assert code(await object_ops.change(runtime, before.key, hold, tenant="acme")) == "ok"
    assert code(await delete(runtime, "Allocation", "acme", "a")) == "ok"
    now = await status(runtime, "Allocation", "acme", "a")
    assert (now["phase"], now["approval"]["state"], now["approval"]["reason"]) == ("Cancelled", "expired", "Withdrawn")
    assert await used(runtime, "acme", PENDING) == 0
    assert code(await decide(runtime, "Allocation", "acme", "a")) == "conflict"
    assert code(await delete(runtime, "Allocation", "acme", "a")) == "ok", "deleted twice"


async def test_a_deleted_claim_is_charged_until_its_operator_is_done(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "c", clusters=2)
    await decide(runtime, "ResourceClaim", "acme", "c")
    assert code(await finalizer(runtime, "c", "example.com/operator")) == "ok"
    assert code(await report(runtime, "c", state="Failed", externalId="c-17")) == "ok"
    assert await used(runtime, "acme", "clusters") == 2, "what failed counts until it is deleted"
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 5})) == "ok"
    assert await used(runtime, "acme", PENDING) == 1
    for _ in range(2):
        assert code(await delete(runtime, "ResourceClaim", "acme", "c")) == "ok"
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (2, 0)
    growth = (await approval(runtime, "ResourceClaim", "acme", "c"))["change"]
    assert (growth["state"], growth["reason"]) == ("expired", "Withdrawn")
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"clusters": 9})) == "conflict"
    assert code(await finalizer(runtime, "c")) == "ok"
    assert await used(runtime, "acme", "clusters") == 0
    assert code(await delete(runtime, "ResourceClaim", "acme", "c")) == "not_found"
    await assert_counters_equal_charges(runtime)


async def test_an_operator_writes_its_part_of_the_status_alone(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "c", clusters=2)
    forged = {"state": "approved", "gates": {}}
    said = {"approval": forged, "granted": {"resources": {"clusters": 9}}, "user": "acme/eve", "state": "Ready"}
    assert code(await report(runtime, "c", **said)) == "ok"
    now = await get(runtime, "ResourceClaim", "acme", "c")
    shown = msgspec.json.decode(now.status)
    assert (shown["approval"]["state"], "granted" in shown, shown["user"], shown["state"]) == (
        "pending",
        False,
        "test",
        "Ready",
    )
    assert (now.fields["status.user"], now.fields["status.approval.state"]) == ("test", "pending")
    assert await used(runtime, "acme", "clusters") == 0


async def test_requests_cannot_claim_the_count_of_requests(runtime: Runtime) -> None:
    for kind, spec in (
        ("ResourceClaim", {"resources": {"pending_requests": 1}}),
        ("Allocation", {"resources": {"requests": {"pending_requests": 1}}}),
    ):
        document = {"metadata": {"name": "x", "namespace": "acme"}, "spec": spec}
        assert BY_NAME[kind].check(msgspec.convert(document, BY_NAME[kind].type)), kind


async def test_a_name_that_is_used_again_is_another_request(runtime: Runtime) -> None:
    await gated(runtime, gates=("manual",))
    await claim(runtime, "acme", "c", clusters=1)
    old = await judged(runtime, "ResourceClaim", "c", gate="manual")
    await delete(runtime, "ResourceClaim", "acme", "c")
    assert code(await ops.decide(runtime, old)) == "not_found"
    await claim(runtime, "acme", "c", clusters=50)
    assert code(await ops.decide(runtime, old)) == "conflict"
    assert await used(runtime, "acme", "clusters") == 0


async def test_a_namespace_is_emptied_of_pending_and_held_claims(runtime: Runtime) -> None:
    await gated(runtime)
    await claim(runtime, "acme", "pending", clusters=1)
    await claim(runtime, "acme", "held", clusters=1)
    await decide(runtime, "ResourceClaim", "acme", "held")
    await finalizer(runtime, "held", "example.com/operator")
    await allocation(runtime, "acme", "a", cpu=1)
    await job(runtime, "train", completions=1)
    assert code(await delete(runtime, "Namespace", "", "acme")) == "ok"
    for kind, name in (("ResourceClaim", "pending"), ("Job", "train")):
        assert code(await decide(runtime, kind, "acme", name)) == "terminating", "nothing new comes to be there"
    for kind, name in (("ResourceClaim", "pending"), ("ResourceClaim", "held"), ("Allocation", "a"), ("Job", "train")):
        found = await get(runtime, kind, "acme", name)
        command = delete_command(BY_NAME[kind], found, Origin("system", "delete"), preconditions=DeletePreconditions())
        assert code(await object_ops.submit(runtime, command, tenant="acme")) == "ok", (kind, name)
    assert (await used(runtime, "acme", "clusters"), await used(runtime, "acme", PENDING)) == (1, 0)
    assert code(await finalizer(runtime, "held")) == "ok"
    assert await used(runtime, "acme", "clusters") == 0
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM approval") == 0
