"""What tenants may ask for, in the scheduler: it follows every change of that, and what it placed says nothing of
strangers."""

from typing import Any

from bursar.loops.informer import Keeper, Lost
from bursar.ops.runtime.runtime import Office
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


async def labs(office: Office) -> None:
    for name in ("acme", "rival"):
        await tenant(office, name, fairShareTarget=0.5)
        await namespace(office, f"{name}-lab", name)


async def followed(office: Office, keeper: Keeper) -> Keeper:
    """The world after what happened, loaded anew where it has to be."""
    async with office.database.reader() as db:
        try:
            while await keeper.catch_up(db) or keeper.is_in_doubt:
                pass
        except Lost:
            return await loaded(office)
    await assert_as_if_loaded(office, keeper)
    return keeper


async def test_nodes_that_are_kept_for_a_tenant_take_no_other_work(office: Office) -> None:
    await labs(office)
    await node(office, "n1", gpu=2)
    await change(office, "Node", "", "n1", tenants=["acme"])
    async with acting(office), scheduling(office):
        every: dict[str, Any] = {"scheduling": {"tolerations": [{"operator": "Exists"}]}}
        await submit(office, "stranger", where="rival-lab", spec=every)
        await submit(office, "own", where="acme-lab")
        await until(office, "own", RUNNING, where="acme-lab")
        waiting = await until(office, "stranger", waits_for("no_matching_nodes"), where="rival-lab")
        assert "acme" not in waiting["message"]
        await change(office, "Node", "", "n1", tenants=[])
        await until(office, "stranger", RUNNING, where="rival-lab")


async def test_work_of_a_tenant_that_demands_isolation_waits_for_a_node_that_isolates(office: Office) -> None:
    await labs(office)
    await node(office, "n1", gpu=2)
    await joins(office, "n1", isolation="none")
    await change(office, "Tenant", "", "acme", isolation="required")
    async with acting(office), scheduling(office):
        await submit(office, "careless", where="rival-lab")
        await until(office, "careless", RUNNING, where="rival-lab")
        await submit(office, "careful", where="acme-lab")
        await until(office, "careful", waits_for("no_matching_nodes"), where="acme-lab")
        await joins(office, "n1")
        await until(office, "careful", RUNNING, where="acme-lab")


async def test_work_that_waits_for_isolation_is_placed_once_its_tenant_no_longer_demands_it(office: Office) -> None:
    await labs(office)
    await node(office, "n1", gpu=2)
    await change(office, "Tenant", "", "acme", isolation="required")
    async with acting(office), scheduling(office):
        await submit(office, "careful", where="acme-lab")
        await until(office, "careful", waits_for("no_matching_nodes"), where="acme-lab")
        await change(office, "Tenant", "", "acme", isolation="none")
        await until(office, "careful", RUNNING, where="acme-lab")


async def test_reserved_taints_keep_off_what_tolerates_everything(office: Office) -> None:
    await labs(office)
    await node(office, "n1", gpu=2)
    await change(office, "Node", "", "n1", taints=[{"key": "tenant", "value": "acme", "effect": "NoSchedule"}])
    every: dict[str, Any] = {"scheduling": {"tolerations": [{"operator": "Exists"}]}}
    mine: dict[str, Any] = {"scheduling": {"tolerations": [{"key": "tenant", "operator": "Equal", "value": "acme"}]}}
    await change(office, "Tenant", "", "acme", tolerations=mine["scheduling"]["tolerations"])
    async with acting(office), scheduling(office):
        await submit(office, "stranger", where="rival-lab", spec=every)
        await submit(office, "own", where="acme-lab", spec=mine)
        await until(office, "own", RUNNING, where="acme-lab")
        await until(office, "stranger", waits_for("no_matching_nodes"), where="rival-lab")


async def test_whoever_is_preempted_by_a_stranger_is_not_told_who_it_was(office: Office) -> None:
    await labs(office)
    await node(office, "n1", gpu=1)
    crossing = {"metadata": {"name": "crossing"}, "value": 900, "crossTenant": True}
    assert code(await create(office, "PriorityClass", crossing)) == "ok"
    async with acting(office), scheduling(office, HASTY):
        await submit(office, "old", where="acme-lab")
        await until(office, "old", RUNNING, where="acme-lab")
        await submit(office, "plain", where="rival-lab", spec={"priority": 1000})
        await until(office, "plain", lambda now: bool(now.get("reason")), where="rival-lab")
        assert (await status(office, "old", "acme-lab"))["phase"] == "Running", "priority alone crosses no tenant"
        await submit(office, "urgent", where="rival-lab", spec={"priorityClass": "crossing"})
        evicted = await until(office, "old", is_in("Terminating", "Pending"), where="acme-lab")
        assert evicted["message"].startswith("Preempted by work of another tenant")
        assert "rival" not in str(evicted)


async def test_what_is_pending_follows_what_its_tenant_may_ask_for(office: Office) -> None:
    await labs(office)
    keeper = await loaded(office)
    await submit(office, "a", where="acme-lab", spec={"priority": 900})
    keeper = await followed(office, keeper)
    which = (await get(office, "Allocation", "acme-lab", "a")).uid

    def in_force() -> int:
        ask = keeper.world.ask(which)
        assert ask is not None
        return ask.priority

    assert in_force() == 900
    await change(office, "Tenant", "", "acme", userPriorityMax=100)
    keeper = await followed(office, keeper)
    assert in_force() == 100
    await change(office, "Tenant", "", "acme", userPriorityMax=2000)
    keeper = await followed(office, keeper)
    assert in_force() == 900


async def test_a_change_of_what_is_pending_reaches_the_world_and_keeps_its_place(office: Office) -> None:
    keeper = await loaded(office)
    await submit(office, "a", spec={"priority": 1})
    keeper = await followed(office, keeper)
    before = keeper.world.ask(await uid_of(office, "a"))

    def by(document: dict[str, Any]) -> None:
        document["spec"] |= {"priority": 77, "queue": "hpc", "ttl": "1h"}

    assert code(await edit(office, "Allocation", "default", "a", by)) == "ok"
    keeper = await followed(office, keeper)
    after = keeper.world.ask(await uid_of(office, "a"))
    assert before is not None
    assert after is not None
    assert (after.priority, after.queue, after.ttl_seconds) == (77, "hpc", 3600)
    assert after.submitted_at == before.submitted_at
