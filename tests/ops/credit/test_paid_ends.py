"""The end of paid work: the transaction that confirms that a placement is gone closes its lease."""

import asyncio
from typing import Any

import pytest

from bursar.commands.command import Command, Reply
from bursar.commands.nodes.liveness import EndLost
from bursar.commands.scheduling.bind import Bind
from bursar.commands.workloads.report import Report
from bursar.core.credit.lease import Grant
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.values.money import MICROS, nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import ledger as ledger_ops
from bursar.ops.credit.ledger import Extend
from bursar.ops.nodes.fence import Fenced, fence
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.write_path.batch import WriteBatch
from bursar.store.credit import ledger as ledger_store
from support.credit.ledgers import assert_books_balance, funded, pass_time, stop_clock
from support.credit.paying import account, assert_all_is_paid, ended, ends, leases, machine, paid_nodes, prepaid
from support.nodes.liveness import look, silence
from support.runtime.runtime import TEST, allocation, bind, code, delete, document, member, opened, tenant
from support.scheduling.evictions import status, stop

FIFTY = nanocredits("50")


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    """A prepaid tenant with 50 credits, and two nodes of H100s at 0.01 credits a second."""
    await stop_clock(runtime)
    await paid_nodes(runtime, "n1", "n2")
    await funded(runtime, "50")
    return runtime


async def placed(runtime: Runtime, name: str, *nodes: str, gpu: int = 1, **spec: Any) -> list[int]:
    """A bound allocation; the numbers of its leases, node by node."""
    await allocation(runtime, "default", name, spec=spec, gpu=gpu)
    assert code(await bind(runtime, "default", name, *nodes)) == "ok"
    return [one["id"] for one in await leases(runtime, name)]


async def heartbeat(runtime: Runtime, seq: int, *numbers: int) -> None:
    for granted in await ledger_ops.extend(runtime, [Extend(one, seq) for one in numbers]):
        assert isinstance(granted, Grant), granted


async def assert_settled(runtime: Runtime, *costs: str) -> None:
    """All leases are closed, each at its cost, and nothing is held any more."""
    assert await leases(runtime) == []
    assert [one["posted"] for one in await ended(runtime)] == [nanocredits(one) for one in costs]
    now = await account(runtime)
    assert (now["posted"], now["held"], now["gpus"]) == (FIFTY - sum(map(nanocredits, costs)), 0, 0)
    await assert_all_is_paid(runtime)
    await assert_books_balance(runtime)


async def test_eight_minutes_on_four_gpus_cost_19_2_credits_to_the_last_digit(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1", gpu=4)
    assert (await account(lab))["held"] == nanocredits("0.6")
    for seq in range(97):
        await heartbeat(lab, seq + 1, lease)
        if seq < 96:
            await pass_time(lab, 5 * MICROS)
    assert code(await ends(lab, "n1", "train", measured=480 * MICROS)) == "ok"
    await assert_settled(lab, "19.2")


async def test_what_was_measured_is_what_is_paid(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 10 * MICROS)
    await heartbeat(lab, 2, lease)
    await pass_time(lab, 4 * MICROS)
    await ends(lab, "n1", "train", measured=9_000_001)
    await assert_settled(lab, "0.09000001")


async def test_without_a_measure_our_own_clock_counts(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 7 * MICROS)
    await ends(lab, "n1", "train")
    await assert_settled(lab, "0.07")


async def test_what_never_started_costs_nothing(lab: Runtime) -> None:
    await placed(lab, "train", "n1")
    await pass_time(lab, 60 * MICROS)
    await ends(lab, "n1", "train", Phase.FAILED)
    await assert_settled(lab, "0")


async def test_what_ended_before_its_first_heartbeat_is_paid_by_its_measure(lab: Runtime) -> None:
    await placed(lab, "train", "n1")
    await pass_time(lab, 3 * MICROS)
    await ends(lab, "n1", "train", measured=2 * MICROS)
    await assert_settled(lab, "0.02")


async def test_a_node_whose_clock_jumped_cannot_charge_more_time_than_has_passed(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 5 * MICROS)
    await ends(lab, "n1", "train", measured=10**15)
    await assert_settled(lab, "0.05")


async def test_a_clock_of_ours_that_went_back_gives_no_time_away(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 10 * MICROS)
    await heartbeat(lab, 2, lease)
    await pass_time(lab, -3600 * MICROS)
    assert code(await ends(lab, "n1", "train", measured=10 * MICROS)) == "ok"
    await assert_settled(lab, "0.1")


async def test_each_node_settles_its_own_part(lab: Runtime) -> None:
    first, second = await placed(lab, "wide", "n1", "n2", nodes=2)
    await heartbeat(lab, 1, first, second)
    await pass_time(lab, 5 * MICROS)
    await ends(lab, "n1", "wide", measured=5 * MICROS)
    assert [one["id"] for one in await leases(lab)] == [second]
    await assert_all_is_paid(lab)
    await pass_time(lab, 5 * MICROS)
    await ends(lab, "n2", "wide", measured=10 * MICROS)
    await assert_settled(lab, "0.05", "0.1")


async def test_who_is_told_to_stop_pays_until_it_has(lab: Runtime) -> None:
    """Cancelling and evicting close nothing by themselves: it may run until its node has said otherwise."""
    deleted, evicted = [(await placed(lab, name, "n1"))[0] for name in ("deleted", "evicted")]
    await heartbeat(lab, 1, deleted, evicted)
    await delete(lab, "Allocation", "default", "deleted")
    await stop(lab, "evicted")
    assert len(await leases(lab)) == 2
    await assert_all_is_paid(lab)
    await pass_time(lab, 10 * MICROS)
    await ends(lab, "n1", "deleted", stopped=True, measured=8 * MICROS)
    await ends(lab, "n1", "evicted", measured=9 * MICROS, phase=Phase.FAILED)
    assert (await status(lab, "evicted"))["phase"] == "Pending"
    await assert_settled(lab, "0.08", "0.09")


async def test_what_waits_again_is_paid_anew_when_it_is_placed_again(lab: Runtime) -> None:
    (first,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, first)
    await stop(lab, "train")
    await ends(lab, "n1", "train", phase=Phase.FAILED)
    shown = document(await bind(lab, "default", "train", "n1"))["status"]
    (second,) = await leases(lab, "train")
    assert (second["epoch"], shown["nodes"][0]["lease"]) == (2, f"lease-{second['id']}")
    assert second["id"] != first
    await ends(lab, "n1", "train")
    await assert_settled(lab, "0", "0")


async def test_a_node_that_is_fenced_ends_the_leases_of_its_work(lab: Runtime) -> None:
    numbers = [(await placed(lab, name, "n1"))[0] for name in ("keep", "fail")]
    wide = await placed(lab, "wide", "n1", "n2", nodes=2)
    await heartbeat(lab, 1, *numbers, *wide)
    await pass_time(lab, 6 * MICROS)
    await silence(lab, "n1", seconds=70)
    await look(lab)
    assert isinstance(await fence(lab, "n1", TEST, "it is switched off"), Fenced)
    assert [one["node"] for one in await leases(lab)] == ["n2"], "what runs on another node is paid until it has ended"
    await assert_all_is_paid(lab)
    await ends(lab, "n2", "wide", phase=Phase.FAILED, measured=6 * MICROS)
    await assert_settled(lab, "0.06", "0.06", "0.06", "0.06")


async def test_work_that_is_given_up_with_its_node_is_settled_by_our_clock(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1", onNodeLost="requeue")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 100 * MICROS)
    found = await object_ops.get(lab, Key("Allocation", "default", "train"))
    assert isinstance(found, Stored)
    command = EndLost(key=found.key, origin=TEST, uid=found.uid, node="n1", epoch=1, confirmed=True)
    assert code(await lab.binding.submit(command, "default")) == "ok"
    assert (await status(lab, "train"))["phase"] == "Pending"
    await assert_settled(lab, "0.15")  # no longer than it was paid for


async def test_a_lease_that_had_run_out_before_is_left_as_it_is(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 60 * MICROS)
    async with lab.database.reader() as db, db.transaction():
        ledger = await ledger_ops.ledger_for(db, lab.prices, (), {lease})
        ledger.lapse(ledger.leases[lease])
        await ledger_store.save(db, ledger)
    assert code(await ends(lab, "n1", "train", measured=15 * MICROS)) == "ok"
    await assert_settled(lab, "0.15")


async def test_work_that_was_stopped_because_its_credit_ran_out_says_so(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 15 * MICROS)
    reply = await ends(
        lab, "n1", "train", Phase.FAILED, reason="CreditExhausted", message="out of credit", exit_code=143
    )
    shown = document(reply)["status"]
    assert (shown["phase"], shown["reason"], shown["exitCode"]) == ("Failed", "CreditExhausted", 143)
    await assert_settled(lab, "0.15")


async def test_a_report_that_is_repeated_or_late_closes_nothing_twice(lab: Runtime) -> None:
    (lease,) = await placed(lab, "train", "n1")
    await heartbeat(lab, 1, lease)
    await pass_time(lab, 5 * MICROS)
    await ends(lab, "n1", "train", measured=5 * MICROS, epoch=1)
    assert code(await ends(lab, "n1", "train", measured=1 * MICROS, epoch=1)) == "ok"
    assert code(await ends(lab, "n1", "train", Phase.FAILED, measured=1 * MICROS, epoch=0)) == "stale"
    await assert_settled(lab, "0.05")


async def test_a_report_of_an_earlier_placement_leaves_the_lease_of_the_present_one(lab: Runtime) -> None:
    await placed(lab, "train", "n1")
    await stop(lab, "train")
    await ends(lab, "n1", "train", phase=Phase.FAILED)
    await bind(lab, "default", "train", "n1")
    assert code(await ends(lab, "n1", "train", measured=5 * MICROS, epoch=1)) == "stale"
    assert len(await leases(lab)) == 1
    await assert_all_is_paid(lab)


async def test_what_is_placed_and_ends_in_one_batch_opens_and_closes_its_lease(lab: Runtime) -> None:
    await allocation(lab, "default", "train", gpu=1)
    one = await member(lab, "default", "train", "n1")
    assert not isinstance(one, Refusal)
    end = Report(key=one.key, origin=TEST, phase=Phase.FAILED, node="n1")
    async with lab.database.reader() as db, db.transaction():
        replies = await WriteBatch(lab.trees)(db, [Bind.unit([one], TEST), end])
    assert [code(reply) for reply in replies] == ["ok", "ok"]
    await assert_settled(lab, "0")


async def test_what_ends_makes_capacity_on_the_account_for_what_is_placed_in_the_same_batch(lab: Runtime) -> None:
    await placed(lab, "old", "n1")
    async with lab.database.reader() as db:
        await db.execute("UPDATE account SET gpus_max = 1000 WHERE tenant = 'default'")
    await allocation(lab, "default", "new", gpu=1)
    assert code(await bind(lab, "default", "new", "n1")) == "concurrency_exceeded"
    one = await member(lab, "default", "new", "n1")
    assert not isinstance(one, Refusal)
    end = Report(key=Key("Allocation", "default", "old"), origin=TEST, phase=Phase.SUCCEEDED, node="n1")
    async with lab.database.reader() as db, db.transaction():
        replies = await WriteBatch(lab.trees)(db, [end, Bind.unit([one], TEST)])
    assert [code(reply) for reply in replies] == ["ok", "ok"]
    await assert_all_is_paid(lab)
    await assert_books_balance(lab)


class _Asked:
    """What a connection was asked."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def __call__(self, record: Any) -> None:
        self.statements.append(record.query)


async def _asked(runtime: Runtime, *commands: Command) -> tuple[list[str], list[Reply]]:
    asked = _Asked()
    async with runtime.database.reader() as db, db.transaction():
        db.add_query_logger(asked)
        try:
            replies = await WriteBatch(runtime.trees)(db, commands)
        finally:
            db.remove_query_logger(asked)
    return asked.statements, list(replies)


async def test_a_batch_without_paid_work_asks_nothing_of_the_ledger(runtime: Runtime) -> None:
    """Also where others pay: only who does costs a statement."""
    await tenant(runtime, "payers")
    await prepaid(runtime, "payers")
    await machine(runtime, "n1")
    await allocation(runtime, "default", "free", gpu=1)
    one = await member(runtime, "default", "free", "n1")
    assert not isinstance(one, Refusal)
    asked, replies = await _asked(runtime, Bind.unit([one], TEST))
    end = Report(key=one.key, origin=TEST, phase=Phase.SUCCEEDED, node="n1")
    more, last = await _asked(runtime, end)
    assert [code(reply) for reply in [*replies, *last]] == ["ok", "ok"]
    assert [each for each in asked + more if "account" in each or "ledger" in each or "lease_" in each] == []


# Races.


async def test_two_controllers_that_end_the_same_work_close_its_lease_once(lab: Runtime, database_url: str) -> None:
    where = {f"w{index}": f"n{index % 2 + 1}" for index in range(12)}
    for name, on in where.items():
        (lease,) = await placed(lab, name, on)
        await heartbeat(lab, 1, lease)
    await pass_time(lab, 5 * MICROS)
    async with opened(database_url) as other:
        both = [(one, on, name) for name, on in where.items() for one in (lab, other)]
        await asyncio.gather(*(ends(one, on, name, measured=5 * MICROS) for one, on, name in both))
    await assert_settled(lab, *["0.05"] * len(where))
