"""What cannot be paid for waits with its reason, is tried again when its account changes, and is in nobody's way."""

import asyncio
from typing import Any

import pytest

from bursar.commands.credit.credit import PutAccount
from bursar.core.credit.account import Owner
from bursar.core.objects.pending_reason import PendingReason, ReasonCode
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.values.money import nanocredits
from bursar.loops.credit_backoff import TIDIED_MAX, Unpaid
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit.ledger import ALL
from support.api.site import eventually
from support.credit.ledgers import LAB, assert_books_balance, funded, priced, receipt
from support.credit.paying import account, assert_all_is_paid, ended, leases, machine, paid_nodes, submitted_by
from support.runtime.runtime import change, code, end, namespace, tenant
from support.scheduling.cluster_states import ask
from support.scheduling.cluster_states import submit as submitted
from support.scheduling.evictions import assert_books_balance as assert_rooms_balance
from support.scheduling.schedulers import HASTY, acting, is_in, scheduling, settled, status, submit, until, waits_for

RUNNING = is_in("Running")
BOUND = is_in("Scheduled", "Running")
WAIT = 3600.0  # what is tried again only because time passes is not tried in these tests


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await paid_nodes(runtime, "n1", "n2")
    return runtime


async def amend(runtime: Runtime, owner: Owner = LAB, **changes: object) -> None:
    receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=owner, changes=changes)))


async def until_leased(runtime: Runtime, count: int) -> None:
    async def are_there() -> bool:
        return len(await leases(runtime)) >= count

    await eventually(are_there, 30)


async def test_without_credit_it_waits_and_says_so_and_a_top_up_starts_it_at_once(lab: Runtime) -> None:
    await funded(lab, "0.1")
    async with scheduling(lab, quota_backoff_seconds=WAIT) as scheduler:
        await submit(lab, "train")
        told = await until(lab, "train", waits_for("insufficient_credit"))
        assert told["message"] == "account default has 0.1 credits available, 0.15 are needed"
        assert await leases(lab) == []
        assert not scheduler.cluster.placed
        await funded(lab, "0.05")
        await until(lab, "train", BOUND)
        await settled(scheduler)
    await assert_all_is_paid(lab)
    await assert_books_balance(lab)


async def test_an_account_that_is_opened_later_is_found(lab: Runtime) -> None:
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        await submitted_by(lab, "default/ann", "train")
        told = await until(lab, "train", waits_for("insufficient_credit"))
        assert "there is no account default/ann or default" in told["message"]
        await amend(lab, Owner("default", "ann"), credit_limit=nanocredits("1"))
        await until(lab, "train", BOUND)
    assert (await account(lab, user="ann"))["held"] == nanocredits("0.15")


async def test_one_users_empty_account_does_not_keep_others_waiting(lab: Runtime) -> None:
    """What they ask for is alike in everything but who pays."""
    await funded(lab, "10")
    await amend(lab, Owner("default", "ann"))
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        for number in range(3):
            await submitted_by(lab, "default/ann", f"ann-{number}")
        await until(lab, "ann-0", waits_for("insufficient_credit"))
        await submitted_by(lab, "default/bob", "bob")
        await until(lab, "bob", BOUND)
    assert [(await status(lab, f"ann-{number}"))["phase"] for number in range(3)] == ["Pending"] * 3


async def test_a_limit_on_gpus_lets_the_next_start_when_one_has_ended(lab: Runtime) -> None:
    await funded(lab, "100")
    await amend(lab, gpus_max=2000)
    names = [f"w{number}" for number in range(6)]
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        for name in names:
            await submit(lab, name)
        done: list[str] = []
        async with asyncio.timeout(60):
            while len(done) < len(names):
                ready = [name for name in names if name not in done and BOUND(await status(lab, name))]
                assert len(ready) <= 2
                for name in ready:
                    assert code(await end(lab, "default", name)) == "ok"
                    done.append(name)
                await asyncio.sleep(0.01)
    assert len(await ended(lab)) == 6
    await assert_books_balance(lab)
    await assert_rooms_balance(lab)


async def test_credit_for_some_of_many_is_used_and_the_rest_waits(lab: Runtime) -> None:
    await funded(lab, "0.75")
    names = [f"w{number}" for number in range(16)]
    async with scheduling(lab, quota_backoff_seconds=WAIT) as scheduler:
        await asyncio.gather(*(submit(lab, name) for name in names))
        await until_leased(lab, 5)
        waiting = [name for name in names if not BOUND(await status(lab, name))]
        assert len(waiting) == 11
        for name in waiting[:2]:
            await until(lab, name, waits_for("insufficient_credit"))
        await funded(lab, "10")
        for name in names:
            await until(lab, name, BOUND)
        await settled(scheduler)
        assert not scheduler.cluster.memory.probes.most or max(scheduler.cluster.memory.probes.most.values()) > 1
    assert (await account(lab))["held"] == nanocredits("2.4")
    await assert_all_is_paid(lab)


async def test_what_cannot_be_paid_for_takes_no_capacity_from_others(lab: Runtime) -> None:
    """All of the nodes are asked for by somebody without credit, who comes first."""
    await tenant(lab, "free")
    await namespace(lab, "free", "free")
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        for number in range(4):
            await submit(lab, f"broke-{number}", spec={"priority": 100}, gpu=8)
        await until(lab, "broke-0", waits_for("insufficient_credit"))
        for number in range(2):
            await submit(lab, f"free-{number}", where="free", gpu=8)
        for number in range(2):
            await until(lab, f"free-{number}", BOUND, where="free")


async def test_nobody_is_stopped_for_who_cannot_pay(lab: Runtime) -> None:
    await tenant(lab, "free")
    await namespace(lab, "free", "free")
    await funded(lab, "0.1")
    async with acting(lab), scheduling(lab, HASTY, quota_backoff_seconds=WAIT):
        for number in range(2):
            await submit(lab, f"free-{number}", where="free", gpu=8)
        for number in range(2):
            await until(lab, f"free-{number}", RUNNING, where="free")
        await submit(lab, "urgent", spec={"priority": 1000}, gpu=8)
        await until(lab, "urgent", waits_for("insufficient_credit"))
        assert [(await status(lab, f"free-{number}", "free"))["phase"] for number in range(2)] == ["Running"] * 2
        await funded(lab, "10")
        await until(lab, "urgent", BOUND)
    await assert_all_is_paid(lab)


async def test_a_gang_waits_for_credit_as_a_whole(lab: Runtime) -> None:
    await funded(lab, "0.3")
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        for name in ("a", "b", "c"):
            await submit(lab, name, spec=gang)
        told = await until(lab, "a", waits_for("insufficient_credit"))
        assert "0.3 credits available, 0.45 are needed" in told["message"]
        assert await leases(lab) == []
        await funded(lab, "0.15")
        for name in ("a", "b", "c"):
            await until(lab, name, BOUND)
    await assert_all_is_paid(lab)


async def test_a_price_that_is_missing_is_told(lab: Runtime) -> None:
    await funded(lab, "10")
    await change(lab, "Tenant", "", "default", billing={"mode": "prepaid", "leaseSeconds": 15})
    async with scheduling(lab, quota_backoff_seconds=0.2):
        await submit(lab, "train", spec={"nodeSelector": {"gpu-type": "b200"}})
        await machine(lab, "new", "b200")
        told = await until(lab, "train", waits_for("unpriced"))
        assert "b200" in told["message"]
        await priced(lab, "0.02", "b200")
        await until(lab, "train", BOUND)


async def test_spending_too_fast_is_a_matter_of_time(lab: Runtime) -> None:
    await funded(lab, "10")
    await amend(lab, spend_rate_max=nanocredits("0.15"), spend_burst=nanocredits("0.15"))
    async with scheduling(lab, quota_backoff_seconds=WAIT):
        for name in ("one", "two"):
            await submit(lab, name)
        await until_leased(lab, 2)
    await assert_all_is_paid(lab)


class Counted(dict[Any, Any]):
    """A dictionary that knows how often it was asked."""

    asked = 0

    def get(self, key: Any, otherwise: Any = None) -> Any:
        self.asked += 1
        return super().get(key, otherwise)

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)


async def test_only_those_are_looked_at_whose_tenant_was_told_of(runtime: Runtime) -> None:
    """Of the others only a few in passing, however many wait."""
    number = await funded(runtime, "1")
    cluster, unpaid = ClusterState(), Unpaid()
    blocked = cluster.memory.blocked = Counted()
    mine = [ask(f"mine-{index}", tenant="default", namespace=f"m{index}") for index in range(3)]
    others = [ask(f"other-{index}", tenant=f"t{index}", namespace=f"o{index}") for index in range(2000)]
    submitted(cluster, *mine, *others)
    unpaid.wait(cluster, [*mine, *others], PendingReason(ReasonCode.INSUFFICIENT_CREDIT), float("inf"), unpaid.heard)
    blocked.asked = 0
    async with runtime.database.reader() as db:
        await unpaid.review(db, cluster)
        assert blocked.asked <= TIDIED_MAX
        assert len(cluster.memory.blocked) == 2003
        assert unpaid.tell(str(number))
        blocked.asked = 0
        await unpaid.review(db, cluster)
        assert blocked.asked <= TIDIED_MAX + len(mine)
        assert len(cluster.memory.blocked) == 2000
        # What was told while it was being tried helps as well.
        unpaid.wait(cluster, mine, PendingReason(ReasonCode.INSUFFICIENT_CREDIT), float("inf"), unpaid.heard - 1)
        await unpaid.review(db, cluster)
        assert len(cluster.memory.blocked) == 2000
        # What is blocked no more for another reason is left, in turn.
        cluster.memory.blocked.clear()
        for _ in range(2000 // TIDIED_MAX + 1):
            await unpaid.review(db, cluster)
        assert not unpaid.tell(str(number)), "nobody waits any more"
        unpaid.wait(cluster, others, PendingReason(ReasonCode.INSUFFICIENT_CREDIT), float("inf"), unpaid.heard)
        unpaid.tell(ALL)
        await unpaid.review(db, cluster)
    assert not cluster.memory.blocked
