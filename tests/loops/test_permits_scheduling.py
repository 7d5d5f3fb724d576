"""What tenants may ask for, in the scheduler: it follows every change of that, and what it placed says nothing of
strangers."""

from typing import Any

from bursar.loops.informer import FeedLost, Informer
from bursar.ops.runtime.runtime import Runtime
from support.nodes.claims import joins
from support.runtime.runtime import change, code, create, get, namespace, node, tenant
from support.scheduling.schedulers import (
    HASTY,
    acting,
    assert_as_if_loaded,
    edit,
    is_in,
    loaded,
    scheduling,
    status,
    submit,
    uid_of,
    until,
    waits_for,
)

RUNNING = is_in("Running")


async def labs(runtime: Runtime) -> None:
    for name in ("acme", "rival"):
        await tenant(runtime, name, fairShareTarget=0.5)
        await namespace(runtime, f"{name}-lab", name)


async def followed(runtime: Runtime, informer: Informer) -> Informer:
    """The cluster state after the changes, loaded anew if necessary."""
    async with runtime.database.reader() as db:
        try:
            while await informer.catch_up(db) or informer.is_in_doubt:
                pass
        except FeedLost:
            return await loaded(runtime)
    await assert_as_if_loaded(runtime, informer)
    return informer


async def test_nodes_that_are_kept_for_a_tenant_take_no_other_work(runtime: Runtime) -> None:
    await labs(runtime)
    await node(runtime, "n1", gpu=2)
    await change(runtime, "Node", "", "n1", tenants=["acme"])
    async with acting(runtime), scheduling(runtime):
        every: dict[str, Any] = {"scheduling": {"tolerations": [{"operator": "Exists"}]}}
        await submit(runtime, "stranger", where="rival-lab", spec=every)
        await submit(runtime, "own", where="acme-lab")
        await until(runtime, "own", RUNNING, where="acme-lab")
        waiting = await until(runtime, "stranger", waits_for("no_matching_nodes"), where="rival-lab")
        assert waiting["message"].endswith("no node is open to its tenant: 1 node dedicated to other tenants")
        assert "acme" not in waiting["message"]
        await change(runtime, "Node", "", "n1", tenants=[])
        await until(runtime, "stranger", RUNNING, where="rival-lab")


async def test_work_of_a_tenant_that_demands_isolation_waits_for_a_node_that_isolates(runtime: Runtime) -> None:
    await labs(runtime)
    await node(runtime, "n1", gpu=2)
    await joins(runtime, "n1", isolation="none")
    await change(runtime, "Tenant", "", "acme", isolation="required")
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "careless", where="rival-lab")
        await until(runtime, "careless", RUNNING, where="rival-lab")
        await submit(runtime, "careful", where="acme-lab")
        await until(runtime, "careful", waits_for("no_matching_nodes"), where="acme-lab")
        await joins(runtime, "n1")
        await until(runtime, "careful", RUNNING, where="acme-lab")


async def test_work_that_waits_for_isolation_is_placed_once_its_tenant_no_longer_demands_it(runtime: Runtime) -> None:
    await labs(runtime)
    await node(runtime, "n1", gpu=2)
    await change(runtime, "Tenant", "", "acme", isolation="required")
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "careful", where="acme-lab")
        await until(runtime, "careful", waits_for("no_matching_nodes"), where="acme-lab")
        await change(runtime, "Tenant", "", "acme", isolation="none")
        await until(runtime, "careful", RUNNING, where="acme-lab")


async def test_reserved_taints_keep_off_what_tolerates_everything(runtime: Runtime) -> None:
    await labs(runtime)
    await node(runtime, "n1", gpu=2)
    await change(runtime, "Node", "", "n1", taints=[{"key": "tenant", "value": "acme", "effect": "NoSchedule"}])
    every: dict[str, Any] = {"scheduling": {"tolerations": [{"operator": "Exists"}]}}
    mine: dict[str, Any] = {"scheduling": {"tolerations": [{"key": "tenant", "operator": "Equal", "value": "acme"}]}}
    await change(runtime, "Tenant", "", "acme", tolerations=mine["scheduling"]["tolerations"])
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "stranger", where="rival-lab", spec=every)
        await submit(runtime, "own", where="acme-lab", spec=mine)
        await until(runtime, "own", RUNNING, where="acme-lab")
        await until(runtime, "stranger", waits_for("no_matching_nodes"), where="rival-lab")


async def test_parts_of_devices_go_where_the_node_says_so_once_the_system_refuses_them(runtime: Runtime) -> None:
    """A node's own word counts before the setting; a change of it moves what is pending at once."""
    await labs(runtime)
    await change(runtime, "Settings", "", "system", scheduling={"gpuFractions": "Refused"})
    await node(runtime, "n1", gpu=2)
    part: dict[str, Any] = {"resources": {"requests": {"nvidia.com/gpu": "0.5"}}}
    async with acting(runtime), scheduling(runtime):
        await submit(runtime, "first", where="acme-lab", spec=part)
        waiting = await until(runtime, "first", waits_for("no_matching_nodes"), where="acme-lab")
        assert "accepting whole devices only (1)" in waiting["message"]
        await submit(runtime, "whole", where="rival-lab")
        await until(runtime, "whole", RUNNING, where="rival-lab")
        await change(runtime, "Settings", "", "system", scheduling={"gpuFractions": "Trusted"})
        await until(runtime, "first", RUNNING, where="acme-lab")
        await change(runtime, "Settings", "", "system", scheduling={"gpuFractions": "Refused"})
        await submit(runtime, "second", where="acme-lab", spec=part)
        await until(runtime, "second", waits_for("no_matching_nodes"), where="acme-lab")
        await change(runtime, "Node", "", "n1", gpuFractions="Enforced")
        await until(runtime, "second", RUNNING, where="acme-lab")


async def test_whoever_is_preempted_by_a_stranger_is_not_told_who_it_was(runtime: Runtime) -> None:
    await labs(runtime)
    await node(runtime, "n1", gpu=1)
    crossing = {"metadata": {"name": "crossing"}, "value": 900, "crossTenant": True}
    assert code(await create(runtime, "PriorityClass", crossing)) == "ok"
    async with acting(runtime), scheduling(runtime, HASTY):
        await submit(runtime, "old", where="acme-lab")
        await until(runtime, "old", RUNNING, where="acme-lab")
        await submit(runtime, "plain", where="rival-lab", spec={"priority": 1000})
        await until(runtime, "plain", lambda now: bool(now.get("reason")), where="rival-lab")
        assert (await status(runtime, "old", "acme-lab"))["phase"] == "Running", "priority alone crosses no tenant"
        await submit(runtime, "urgent", where="rival-lab", spec={"priorityClass": "crossing"})
        evicted = await until(runtime, "old", is_in("Terminating", "Pending"), where="acme-lab")
        assert evicted["message"].startswith("Preempted by work of another tenant")
        assert "rival" not in str(evicted)


async def test_what_is_pending_follows_what_its_tenant_may_ask_for(runtime: Runtime) -> None:
    await labs(runtime)
    informer = await loaded(runtime)
    await submit(runtime, "a", where="acme-lab", spec={"priority": 900})
    informer = await followed(runtime, informer)
    which = (await get(runtime, "Allocation", "acme-lab", "a")).uid

    def in_force() -> int:
        ask = informer.cluster.ask(which)
        assert ask is not None
        return ask.priority

    assert in_force() == 900
    await change(runtime, "Tenant", "", "acme", userPriorityMax=100)
    informer = await followed(runtime, informer)
    assert in_force() == 100
    await change(runtime, "Tenant", "", "acme", userPriorityMax=2000)
    informer = await followed(runtime, informer)
    assert in_force() == 900


async def test_a_change_of_what_is_pending_reaches_the_cluster_state_and_keeps_its_place(runtime: Runtime) -> None:
    informer = await loaded(runtime)
    await submit(runtime, "a", spec={"priority": 1})
    informer = await followed(runtime, informer)
    before = informer.cluster.ask(await uid_of(runtime, "a"))

    def by(document: dict[str, Any]) -> None:
        document["spec"] |= {"priority": 77, "queue": "hpc", "ttl": "1h"}

    assert code(await edit(runtime, "Allocation", "default", "a", by)) == "ok"
    informer = await followed(runtime, informer)
    after = informer.cluster.ask(await uid_of(runtime, "a"))
    assert before is not None
    assert after is not None
    assert (after.priority, after.queue, after.ttl_seconds) == (77, "hpc", 3600)
    assert after.submitted_at == before.submitted_at
