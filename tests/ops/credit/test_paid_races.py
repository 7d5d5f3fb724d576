"""Paid work under races, cuts and chance: nobody is placed unpaid, nobody pays for what is not placed."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bursar.commands.command import Reply
from bursar.commands.credit.credit import PutAccount
from bursar.commands.scheduling.bind import Bind
from bursar.core.objects.allocation import Phase
from bursar.core.values.money import MICROS, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit, ledger
from bursar.ops.credit.ledger import Extend
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import bind
from support.credit.ledgers import LAB, assert_books_balance, funded, pass_time, receipt, stop_clock
from support.credit.paying import account, assert_all_is_paid, ends, leases, paid_nodes, state
from support.runtime.runtime import TEST, allocation, bind_unit, code, delete, member, opened
from support.scheduling.evictions import assert_books_balance as assert_rooms_balance
from support.scheduling.evictions import status, stop

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await stop_clock(runtime)
    await paid_nodes(runtime, *NODES)
    return runtime


@pytest.fixture
async def rival(lab: Runtime, database_url: str) -> AsyncIterator[Runtime]:
    """Another process on the same database."""
    async with opened(database_url) as other:
        yield other


async def assert_all_is_well(runtime: Runtime) -> None:
    await assert_all_is_paid(runtime)
    await assert_books_balance(runtime)
    await assert_rooms_balance(runtime)


async def bound_on(runtime: Runtime, name: str, node: str) -> Reply:
    one = await member(runtime, "default", name, node)
    assert not isinstance(one, Refusal), one
    (reply,) = await bind(runtime, [Bind.unit([one], TEST)])
    return reply


async def test_two_binders_place_no_more_than_can_be_paid_for(lab: Runtime, rival: Runtime) -> None:
    await funded(lab, "1.5")  # for ten of thirty
    names = [f"w{index}" for index in range(30)]
    for name in names:
        await allocation(lab, "default", name, gpu=1)
    both = [(one, name, NODES[place % 4]) for place, name in enumerate(names) for one in (lab, rival)]
    codes = [code(reply) for reply in await asyncio.gather(*(bound_on(*one) for one in both))]
    assert codes.count("ok") == 10
    assert set(codes) <= {"ok", "stale", "insufficient_credit"}
    assert (await account(lab))["held"] == nanocredits("1.5")
    assert len(await leases(lab)) == 10
    await assert_all_is_well(lab)


async def test_credit_that_comes_while_others_bind_is_used_to_the_last(lab: Runtime, rival: Runtime) -> None:
    await funded(lab, "0.3")
    names = [f"w{index}" for index in range(20)]
    for name in names:
        await allocation(lab, "default", name, gpu=1)

    async def keep_trying(runtime: Runtime, mine: list[str]) -> None:
        left = list(mine)
        while left:
            replies = [(name, await bound_on(runtime, name, NODES[int(name[1:]) % 4])) for name in left]
            left = [name for name, reply in replies if code(reply) == "insufficient_credit"]

    async def trickle() -> None:
        for _ in range(27):
            await funded(rival, "0.1")

    async with asyncio.timeout(60):
        await asyncio.gather(keep_trying(lab, names[::2]), keep_trying(rival, names[1::2]), trickle())
    now = await account(lab)
    assert (now["posted"], now["held"]) == (nanocredits("3"), nanocredits("3"))
    await assert_all_is_well(lab)


async def test_binding_heartbeats_ending_and_topping_up_at_once_never_deadlock(lab: Runtime, rival: Runtime) -> None:
    await funded(lab, "1000")
    names = [f"w{index}" for index in range(24)]
    for name in names:
        await allocation(lab, "default", name, gpu=1)

    async def live(runtime: Runtime, name: str, node: str) -> None:
        assert isinstance(await bound_on(runtime, name, node), tuple)
        (lease,) = await leases(runtime, name)
        for seq in (1, 2, 3):
            await ledger.extend(rival, [Extend(lease["id"], seq)])
        assert code(await ends(runtime, node, name, measured=0)) == "ok"

    async with asyncio.timeout(60):
        await asyncio.gather(
            *(live((lab, rival)[place % 2], name, NODES[place % 4]) for place, name in enumerate(names)),
            *(funded((lab, rival)[place % 2], "1") for place in range(12)),
        )
    assert await leases(lab) == []
    assert (await account(lab))["posted"] == nanocredits("1012")
    await assert_all_is_well(lab)


async def test_a_bind_whose_connection_is_cut_happens_once_or_not_at_all(lab: Runtime) -> None:
    await funded(lab, "50")
    await allocation(lab, "default", "train", gpu=1)
    db = await lab.database.connect()
    holder = await lab.database.connect()
    try:
        for _ in range(3):
            turn = holder.transaction()
            await turn.start()
            await holder.execute("SELECT FROM account WHERE tenant = 'default' FOR UPDATE")
            waiting = asyncio.create_task(bound_on(lab, "train", "n1"))
            cut = 0
            async with asyncio.timeout(20):
                while not cut:
                    cut = await db.fetchval(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    )
            await turn.rollback()
            assert isinstance(await waiting, tuple)
            assert len(await leases(lab)) == 1
            await assert_all_is_well(lab)
            await stop(lab, "train")
            await ends(lab, "n1", "train", Phase.FAILED)
    finally:
        await db.close()
        await holder.close()
    assert (await account(lab))["posted"] == nanocredits("50")


# By chance.


class Chance:
    """Everything that can happen to paid work, in an order that a seed decides."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime = runtime
        self.dice = random.Random(seed)
        self.seq = 0
        self.made = 0

    async def step(self) -> None:
        what = self.dice.choice(
            [self.submit, self.bind, self.bind, self.bind, self.heartbeat, self.end, self.end, self.stop, self.cancel,
             self.wait, self.top_up, self.amend]
        )  # fmt: skip
        before = await state(self.runtime)
        reply = await what()
        if isinstance(reply, Refusal):
            assert await state(self.runtime) == before, f"{what.__name__} was refused and left a trace: {reply}"
        await assert_all_is_well(self.runtime)

    async def submit(self) -> Reply:
        self.made += 1
        wide = self.dice.random() < 0.3
        gang = {"gangScheduling": {"groupId": f"g{self.made}", "minMembers": 2}}
        name, gpus = f"w{self.made}", self.dice.choice((1, 2, 4))
        if self.dice.random() < 0.2:
            await allocation(self.runtime, "default", f"{name}-b", spec=gang, gpu=gpus)
            return await allocation(self.runtime, "default", name, spec=gang, gpu=gpus)
        return await allocation(self.runtime, "default", name, spec={"nodes": 2} if wide else {}, gpu=gpus)

    async def work(self, *phases: str) -> list[tuple[str, dict[str, Any], str]]:
        async with self.runtime.database.reader() as db:
            rows = await db.fetch("SELECT name, coalesce(gang, '') AS gang FROM object WHERE kind = 'Allocation'")
        there = [(row["name"], await status(self.runtime, row["name"]), row["gang"]) for row in rows]
        return [one for one in there if one[1]["phase"] in phases]

    async def bind(self) -> Reply | None:
        waiting = await self.work("Pending")
        if not waiting:
            return None
        name, _, gang = self.dice.choice(waiting)
        unit = sorted(other for other, _, its in waiting if its == gang) if gang else [name]
        one = await member(self.runtime, "default", name, "n1")
        assert not isinstance(one, Refusal)
        return await bind_unit(
            self.runtime, "default", {each: tuple(self.dice.sample(NODES, one.request.nodes)) for each in unit}
        )

    async def heartbeat(self) -> None:
        self.seq += 1
        there = await leases(self.runtime)
        some = [one for one in there if self.dice.random() < 0.8]
        await ledger.extend(self.runtime, [Extend(one["id"], self.seq) for one in some])

    async def end(self) -> Reply | None:
        running = await self.work("Scheduled", "Running", "Terminating")
        if not running:
            return None
        name, told, _ = self.dice.choice(running)
        nodes = [one["name"] for one in told["nodes"] if "phase" not in one]
        measured = self.dice.choice((None, 0, 3 * MICROS, 20 * MICROS, 10**15))
        phase = self.dice.choice((Phase.SUCCEEDED, Phase.FAILED))
        return await ends(self.runtime, self.dice.choice(nodes), name, phase, measured=measured)

    async def stop(self) -> Reply | None:
        running = await self.work("Scheduled", "Running")
        return await stop(self.runtime, self.dice.choice(running)[0]) if running else None

    async def cancel(self) -> Reply | None:
        there = await self.work("Pending", "Scheduled")
        return await delete(self.runtime, "Allocation", "default", self.dice.choice(there)[0]) if there else None

    async def wait(self) -> None:
        await pass_time(self.runtime, self.dice.randrange(20 * MICROS))

    async def top_up(self) -> None:
        await funded(self.runtime, self.dice.choice(("0.000000001", "0.15", "1.23")))

    async def amend(self) -> None:
        changes: dict[str, Any] = self.dice.choice(
            [{"status": "suspended"}, {"status": "active"}, {"status": "active"}, {"gpus_max": 6000},
             {"gpus_max": None}, {"daily_cap": nanocredits("3")}, {"daily_cap": None}]
        )  # fmt: skip
        receipt(await credit.put_account(self.runtime, PutAccount(actor="user:test", whose=LAB, changes=changes)))


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_what_is_placed_is_paid_and_what_is_refused_left_no_trace(
    lab: Runtime, seed: int
) -> None:
    await funded(lab, "1")
    chance = Chance(lab, seed)
    for _ in range(60):
        await chance.step()
    for name, told, _ in await chance.work("Scheduled", "Running", "Terminating"):
        for one in told["nodes"]:
            if "phase" not in one:
                await ends(lab, one["name"], name, Phase.FAILED)
    assert await leases(lab) == []
    assert (await account(lab))["held"] == 0
    await assert_all_is_well(lab)
