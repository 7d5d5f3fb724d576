"""Beats pay for what runs: each extends the leases of its node, all at once, and the answer says for how long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from bursar.core.credit.lease import FROZEN
from bursar.core.credit.lease_expiry import Watch
from bursar.core.credit.shortfall import OUT_OF_CREDIT
from bursar.core.values.money import MICROS, nanocredits
from bursar.loops.lease_expiry import end_lapsed
from bursar.ops.credit import credit, lease_expiry
from bursar.ops.credit.credit import PutAccount
from bursar.ops.runtime.clock import timestamp
from bursar.ops.runtime.runtime import Office
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.api.site import eventually
from support.credit.ledgers import LAB, assert_books_balance, funded, pass_time, priced, receipt, stop_clock
from support.credit.paying import WINDOW, account, assert_all_is_paid, leases, machine, prepaid
from support.credit.paying import ended as ended_leases
from support.nodes.agent_streams import Agent, Door, acknowledged, ended, joined, placed, running, shown, stopped
from support.runtime.runtime import change

SECOND = nanocredits("0.01")  # what a GPU costs


@pytest.fixture
async def lab(door: Door) -> Door:
    """A prepaid tenant with a node of H100s at 0.01 credits a second, and a clock that stands still."""
    await stop_clock(door.office)
    await prepaid(door.office)
    await priced(door.office)
    await machine(door.office, "n1")
    return door


def grants(answer: pb.HeartbeatResponse) -> list[tuple[str, int, bool, str, int]]:
    return [(one.allocation_id, one.seconds, one.final, one.reason, one.freeze_seconds) for one in answer.leases]


async def begun(lab: Door, agent: Agent, name: str = "train") -> str:
    """One GPU that runs; its uid."""
    uid = await placed(lab.office, name, "n1", gpu=1)
    await agent.directive()
    await agent.beat(running(uid))
    return uid


async def passed(office: Office, seconds: float) -> None:
    await pass_time(office, round(seconds * MICROS))


async def amend(office: Office, **changes: object) -> None:
    receipt(await credit.put_account(office, PutAccount(actor="user:test", whose=LAB, changes=changes)))


async def test_what_is_paid_for_is_told_so_granted_its_window_and_extended_beat_by_beat(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await placed(lab.office, "train", "n1", gpu=1)
    order = await agent.directive()
    assert (order.paid, order.leased) == (True, False)
    answer = await agent.beat()
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    (lease,) = await leases(lab.office)
    assert lease["started_at"] == 0, "nothing is spent before it runs"
    await agent.beat(running(uid))
    await passed(lab.office, 5)
    answer = await agent.beat()
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    held = await account(lab.office)
    assert (held["posted"], held["held"]) == (nanocredits("1") - 5 * SECOND, WINDOW * SECOND)
    await assert_all_is_paid(lab.office)
    await assert_books_balance(lab.office)


async def test_work_that_nobody_pays_for_asks_for_nothing(door: Door) -> None:
    agent = await joined(door)
    uid = await placed(door.office, "free", "n1")
    assert not (await agent.directive()).paid
    answer = await agent.beat(running(uid))
    assert not answer.leases
    async with door.office.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM entry") == 0


async def test_an_end_is_settled_by_what_the_node_measured(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 7)
    answer = await agent.beat(ended(uid, usage=pb.AllocationUsage(seconds=6.25)))
    assert (acknowledged(answer), grants(answer)) == ([(uid, 1)], [])
    (lease,) = await ended_leases(lab.office)
    assert (lease["state"], lease["posted"]) == ("closed", 6.25 * SECOND)
    assert (await account(lab.office))["posted"] == nanocredits("1") - 6.25 * SECOND
    await assert_books_balance(lab.office)


async def test_without_credit_the_rest_of_the_window_is_the_last_unless_somebody_tops_up(lab: Door) -> None:
    await funded(lab.office, "0.2")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    await agent.beat()
    await passed(lab.office, 5)
    answer = await agent.beat()
    assert grants(answer) == [(uid, 10, True, "insufficient_credit", 0)]
    await passed(lab.office, 4)
    assert grants(await agent.beat()) == [(uid, 6, True, "insufficient_credit", 0)]
    await funded(lab.office, "1")
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]
    await assert_books_balance(lab.office)


async def test_what_ended_for_want_of_credit_has_failed_and_says_so(lab: Door) -> None:
    await funded(lab.office, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 15)
    await agent.beat()
    usage = pb.AllocationUsage(seconds=15.0)
    answer = await agent.beat(stopped(uid, exit_code=143, reason="CreditExhausted", message="over", usage=usage))
    assert acknowledged(answer) == [(uid, 1)]
    told = (await shown(lab.office, "train"))["status"]
    assert (told["phase"], told["reason"]) == ("Failed", "CreditExhausted")
    held = await account(lab.office)
    assert (held["posted"], held["held"], held["gpus"]) == (0, 0, 0)
    await assert_books_balance(lab.office)


async def test_what_spends_too_fast_is_to_be_frozen_and_goes_on_when_there_is_more(lab: Door) -> None:
    await change(lab.office, "Settings", "", "system", credits={"throttleSecondsMax": 77})
    await funded(lab.office, "10")
    await amend(lab.office, spend_rate_max=SECOND // 10, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    answer = await agent.beat()
    assert grants(answer) == [(uid, 10, True, "spend_rate_exceeded", 77)]
    await passed(lab.office, 30)
    assert grants(await agent.beat()) == [(uid, 0, True, "spend_rate_exceeded", 77)]
    await passed(lab.office, 150)
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]
    # Nobody pays for the time in which it was frozen.
    assert (await account(lab.office))["posted"] == nanocredits("10") - WINDOW * SECOND
    await assert_books_balance(lab.office)


async def status_of(office: Office, name: str = "train") -> dict[str, Any]:
    return dict((await shown(office, name))["status"])


async def test_work_that_is_paid_no_further_says_when_it_ends_until_somebody_tops_up(lab: Door) -> None:
    await funded(lab.office, "0.2")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    await agent.beat()
    before = await status_of(lab.office)
    await passed(lab.office, 5)
    assert grants(await agent.beat()) == [(uid, 10, True, "insufficient_credit", 0)]

    async def noted() -> bool:
        return (await status_of(lab.office)).get("reason") == OUT_OF_CREDIT

    await eventually(noted)
    told = await status_of(lab.office)
    (lease,) = await leases(lab.office)
    until = timestamp(datetime.fromtimestamp(lease["paid_until"] // MICROS, UTC))
    assert (told["phase"], told["message"]) == ("Running", f"out of credit: ends at {until} unless topped up")
    assert (told["nodes"][0]["unpaid"], told["nodes"][0]["paidUntil"]) == ("insufficient_credit", until)
    (condition,) = [one for one in told["conditions"] if one["type"] == OUT_OF_CREDIT]
    assert (condition["status"], condition["message"]) == ("True", told["message"])

    async with lab.office.database.reader() as db:
        revision = await db.fetchval("SELECT value FROM revision")
    await passed(lab.office, 4)
    for _ in range(2):  # a second answer comes after whatever the first beat had to note
        assert grants(await agent.beat()) == [(uid, 6, True, "insufficient_credit", 0)]
    async with lab.office.database.reader() as db:
        assert await db.fetchval("SELECT value FROM revision") == revision, "a beat without news is no change"

    await funded(lab.office, "1")
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]

    async def as_before() -> bool:
        return await status_of(lab.office) == before

    await eventually(as_before)


async def test_a_top_up_while_nobody_listened_is_noted_by_the_next_stream(lab: Door) -> None:
    await funded(lab.office, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    await agent.beat()
    await eventually(lambda: is_short(lab.office))
    again = lab.agent("n1")
    await again.beat(running(uid), inventory=True)
    await again.beat(running(uid))
    assert await is_short(lab.office), "it is as before"
    await funded(lab.office, "1")
    await passed(lab.office, 1)
    third = lab.agent("n1")
    await third.beat(running(uid), inventory=True)
    await eventually(lambda: is_paid(lab.office))


async def test_of_several_nodes_the_one_that_ends_first_is_told(lab: Door) -> None:
    await machine(lab.office, "n2")
    await funded(lab.office, "0.3")
    first, second = await joined(lab), await joined(lab, "n2")
    uid = await placed(lab.office, "wide", "n1", "n2", spec={"nodes": 2}, gpu=1)
    for agent in (first, second):
        await agent.directive()
        await agent.beat(running(uid))
    await passed(lab.office, 5)
    await first.beat()
    await passed(lab.office, 2)

    def ends(count: int) -> Callable[[], Awaitable[bool]]:
        async def are() -> bool:
            return sum("unpaid" in one for one in (await status_of(lab.office, "wide"))["nodes"]) == count

        return are

    await eventually(ends(1))
    await second.beat()
    await eventually(ends(2))
    told = await status_of(lab.office, "wide")
    assert (
        told["message"] == f"out of credit: ends at {min(each['paidUntil'] for each in told['nodes'])} unless topped up"
    )
    await first.beat(ended(uid))
    told = await status_of(lab.office, "wide")
    assert ["unpaid" in each for each in told["nodes"]] == [False, True]
    assert told["reason"] == OUT_OF_CREDIT
    await second.beat(ended(uid))
    assert "reason" not in await status_of(lab.office, "wide")


async def is_short(office: Office) -> bool:
    return (await status_of(office)).get("reason") == OUT_OF_CREDIT


async def is_paid(office: Office) -> bool:
    return "reason" not in await status_of(office)


async def test_work_that_ends_before_its_paid_time_does_says_nothing_of_credit(lab: Door) -> None:
    await funded(lab.office, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    await agent.beat()
    await eventually(lambda: is_short(lab.office))
    await agent.beat(ended(uid))
    told = await status_of(lab.office)
    assert told["phase"] == "Succeeded"
    assert not {"reason", "message"} & told.keys()
    assert OUT_OF_CREDIT not in {one["type"] for one in told["conditions"]}
    assert not {"unpaid", "paidUntil"} & told["nodes"][0].keys()


async def test_work_that_spends_too_fast_is_not_out_of_credit(lab: Door) -> None:
    await funded(lab.office, "10")
    await amend(lab.office, spend_rate_max=SECOND // 10, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    before = await status_of(lab.office)
    await passed(lab.office, 5)
    for _ in range(2):  # a second answer comes after whatever the first beat had to note
        (grant,) = grants(await agent.beat())
        assert grant[:4] == (uid, 10, True, "spend_rate_exceeded")
    assert await status_of(lab.office) == before


async def test_what_stands_still_says_so_until_it_goes_on(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    before = (await shown(lab.office, "train"))["status"]
    await agent.beat(running(uid, reason=FROZEN, message="its account spends too fast"))
    told = (await shown(lab.office, "train"))["status"]
    assert (told["phase"], told["reason"], told["nodes"][0]["frozen"]) == ("Running", FROZEN, True)
    assert told["message"] == ("its account spends too fast: it stands still on n1, and goes on once more may be spent")
    (condition,) = [one for one in told["conditions"] if one["type"] == FROZEN]
    assert (condition["status"], condition["reason"]) == ("True", FROZEN)
    async with lab.office.database.reader() as db:
        revision = await db.fetchval("SELECT value FROM revision")
    await agent.beat(running(uid, reason=FROZEN))
    async with lab.office.database.reader() as db:
        assert await db.fetchval("SELECT value FROM revision") == revision, "what was said before is no change"
    await agent.beat(running(uid))
    assert (await shown(lab.office, "train"))["status"] == before


async def test_what_went_on_while_nobody_listened_is_told_so_by_the_next_stream(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await agent.beat(running(uid, reason=FROZEN))
    other = lab.agent("n1")
    await other.beat(running(uid, reason=FROZEN), inventory=True)
    assert (await shown(lab.office, "train"))["status"]["reason"] == FROZEN
    third = lab.agent("n1")
    await third.beat(running(uid), inventory=True)
    assert "reason" not in (await shown(lab.office, "train"))["status"]


async def test_what_ends_while_it_stands_still_stands_still_no_more(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await agent.beat(running(uid, reason=FROZEN))
    await agent.beat(stopped(uid, exit_code=143, reason="CreditExhausted", message="over"))
    told = (await shown(lab.office, "train"))["status"]
    assert (told["phase"], told["reason"]) == ("Failed", "CreditExhausted")
    assert FROZEN not in {one["type"] for one in told["conditions"]}
    assert "frozen" not in told["nodes"][0]


async def test_what_stands_still_on_one_of_its_nodes_says_where(lab: Door) -> None:
    await machine(lab.office, "n2")
    await funded(lab.office, "10")
    first, second = await joined(lab), await joined(lab, "n2")
    uid = await placed(lab.office, "wide", "n1", "n2", spec={"nodes": 2}, gpu=1)
    for agent in (first, second):
        await agent.directive()
        await agent.beat(running(uid))
    for agent in (first, second):
        await agent.beat(running(uid, reason=FROZEN))
    assert "stands still on 2 of its nodes" in (await shown(lab.office, "wide"))["status"]["message"]
    await first.beat(running(uid))
    assert "stands still on n2" in (await shown(lab.office, "wide"))["status"]["message"]
    await second.beat(ended(uid))
    assert "reason" not in (await shown(lab.office, "wide"))["status"]


async def test_a_closed_lease_stops_what_it_paid_for_at_once(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    (lease,) = await leases(lab.office)
    assert await lease_expiry.lapse(lab.office, {lease["id"]: lease["paid_until"]}) == {lease["id"]: True}
    assert grants(await agent.beat()) == [(uid, 0, True, "fenced", 0)]


async def test_another_stream_goes_on_where_the_first_was_and_is_never_behind_it(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    for _ in range(5):
        await agent.beat()
    await passed(lab.office, 5)
    again = lab.agent("n1")
    answer = await again.beat(running(uid), inventory=True)
    assert answer.complete
    assert [one.paid for one in answer.directives] == [True]
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    held = await account(lab.office)
    assert held["posted"] == nanocredits("1") - 5 * SECOND
    await assert_books_balance(lab.office)


async def test_numbers_catch_up_when_the_databases_clock_went_back(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 5)
    again = await joined(lab)
    await again.beat(running(uid))
    await passed(lab.office, -5)
    third = lab.agent("n1")
    assert grants(await third.beat(running(uid), inventory=True)) == [], "somebody has beaten after this"
    await passed(lab.office, 6)
    assert grants(await third.beat()) == [(uid, WINDOW, False, "", 0)]
    await assert_books_balance(lab.office)


async def test_all_leases_of_a_node_are_paid_in_one_answer(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uids = [await begun(lab, agent, f"train-{index}") for index in range(4)]
    await passed(lab.office, 5)
    assert sorted(grants(await agent.beat())) == sorted((uid, WINDOW, False, "", 0) for uid in uids)
    assert (await account(lab.office))["posted"] == nanocredits("10") - 4 * 5 * SECOND


async def test_where_not_all_can_be_extended_at_once_those_that_are_are_told(
    lab: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uids = {await begun(lab, agent, f"train-{index}") for index in range(5)}
    for lane in lab.office.extending.lanes:
        monkeypatch.setattr(lane, "_capacity", 1)
    await passed(lab.office, 5)
    told = {one[0] for one in grants(await agent.beat())}
    assert told < uids
    assert len(told) in (1, 2), "one for each lane that has leases"
    there = await leases(lab.office)
    paid = [one["paid_until"] for one in there if one["uid"] in told]
    unpaid = [one["paid_until"] for one in there if one["uid"] not in told]
    assert min(paid) > max(unpaid), "who was told was extended, and nobody else was"
    await assert_books_balance(lab.office)


async def test_work_that_needs_both_leases_is_told_both(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    await placed(lab.office, "moves", "n1", spec={"onNodeLost": "requeue"}, gpu=1)
    order = await agent.directive()
    assert (order.paid, order.leased) == (True, True)


async def test_what_lost_its_lease_because_we_were_away_waits_again_and_pays_for_what_it_ran(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 100)
    usage = pb.AllocationUsage(seconds=15.5)
    answer = await agent.beat(stopped(uid, exit_code=143, reason="LeaseExpired", usage=usage))
    assert acknowledged(answer) == [(uid, 1)]
    assert (await shown(lab.office, "train"))["status"]["phase"] == "Pending"
    assert (await account(lab.office))["posted"] == nanocredits("10") - 15.5 * SECOND
    await assert_books_balance(lab.office)


# Leases that nobody extends.


async def test_a_lease_that_nobody_extends_is_ended_when_its_work_must_be_dead(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    await begun(lab, agent)
    watch = Watch()
    await passed(lab.office, WINDOW - 1)
    assert await end_lapsed(lab.office, watch, 1000.0) == []
    await passed(lab.office, 60)
    assert await end_lapsed(lab.office, watch, 1005.0) == [], "by our own clock it is not overdue for long enough"
    assert await end_lapsed(lab.office, watch, 1039.0) == []
    assert len(await end_lapsed(lab.office, watch, 1040.0)) == 1
    (lease,) = await ended_leases(lab.office)
    assert (lease["state"], lease["posted"]) == ("lapsed", WINDOW * SECOND)
    held = await account(lab.office)
    assert (held["held"], held["gpus"]) == (0, 0)
    await assert_books_balance(lab.office)


async def test_who_beats_after_a_jump_of_the_clock_loses_nothing(lab: Door) -> None:
    await funded(lab.office, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    watch = Watch()
    await passed(lab.office, 3600)
    await end_lapsed(lab.office, watch, 1000.0)
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]
    await passed(lab.office, 3600)
    assert await end_lapsed(lab.office, watch, 2000.0) == []
    (number, paid_until), *_ = watch.since
    await agent.beat()
    assert await lease_expiry.lapse(lab.office, {number: paid_until}) == {number: False}, "it was extended meanwhile"


async def test_what_is_frozen_is_not_overdue_until_it_may_be_no_longer(lab: Door) -> None:
    await funded(lab.office, "10")
    await amend(lab.office, spend_rate_max=1, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    await begun(lab, agent)
    await passed(lab.office, 5)
    await agent.beat()
    watch = Watch()
    await passed(lab.office, 300)
    await end_lapsed(lab.office, watch, 1000.0)
    assert not watch.since
    await passed(lab.office, 11)
    await end_lapsed(lab.office, watch, 2000.0)
    assert len(watch.since) == 1


async def test_a_lease_that_never_began_ends_with_its_placement(lab: Door) -> None:
    await funded(lab.office, "10")
    await joined(lab)
    await placed(lab.office, "train", "n1", gpu=1)
    watch = Watch()
    await passed(lab.office, 3600)
    await end_lapsed(lab.office, watch, 1000.0)
    assert not watch.since, "it may still begin"
    async with lab.office.database.reader() as db:
        await db.execute("DELETE FROM placement")
    await passed(lab.office, 31)
    await end_lapsed(lab.office, watch, 1031.0)
    assert len(await end_lapsed(lab.office, watch, 2000.0)) == 1
    held = await account(lab.office)
    assert (held["posted"], held["held"]) == (nanocredits("10"), 0)
    await assert_books_balance(lab.office)


async def test_a_lease_that_was_paid_by_a_clock_that_ran_ahead_ends_when_nobody_beats_for_it(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    await begun(lab, agent)
    await passed(lab.office, 10**8)
    await agent.beat()
    await passed(lab.office, -(10**8))
    watch = Watch()
    assert await end_lapsed(lab.office, watch, 0) == [], "whoever is alive beats meanwhile"
    assert len(await end_lapsed(lab.office, watch, 10**6)) == 1
    assert await leases(lab.office) == []
    held = await account(lab.office)
    assert (held["held"], held["gpus"]) == (0, 0)
    await assert_books_balance(lab.office)


async def test_a_lease_that_was_paid_by_a_clock_that_ran_ahead_is_put_right_by_its_next_beat(lab: Door) -> None:
    await funded(lab.office, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.office, 10**8)
    await agent.beat()
    await passed(lab.office, -(10**8))
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]
    before = (await account(lab.office))["posted"]
    await passed(lab.office, 5)
    assert grants(await agent.beat()) == [(uid, WINDOW, False, "", 0)]
    assert (await account(lab.office))["posted"] == before - 5 * SECOND
    watch = Watch()
    await end_lapsed(lab.office, watch, 0)
    assert await end_lapsed(lab.office, watch, 10**6) == []
    await assert_books_balance(lab.office)
