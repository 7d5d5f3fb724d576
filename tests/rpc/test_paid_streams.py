"""Heartbeats pay for running work: each extends the leases of its node together, and the answer has the paid time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from bursar.commands.credit.credit import PutAccount
from bursar.core.credit.lease import FROZEN
from bursar.core.credit.lease_expiry import ExpiryWatch
from bursar.core.credit.shortfall import OUT_OF_CREDIT
from bursar.core.values.instant import timestamp
from bursar.core.values.money import MICROS, nanocredits
from bursar.loops.lease_expiry import end_lapsed
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.api.site import eventually
from support.credit.ledgers import LAB, assert_books_balance, funded, pass_time, priced, receipt, stop_clock
from support.credit.paying import WINDOW, account, assert_all_is_paid, leases, machine, prepaid
from support.credit.paying import ended as ended_leases
from support.nodes.agent_streams import Agent, Served, acknowledged, ended, joined, placed, running, shown, stopped
from support.runtime.runtime import change

SECOND = nanocredits("0.01")  # what a GPU costs


@pytest.fixture
async def lab(app: Served) -> Served:
    """A prepaid tenant with a node of H100s at 0.01 credits a second, and a clock that stands still."""
    await stop_clock(app.runtime)
    await prepaid(app.runtime)
    await priced(app.runtime)
    await machine(app.runtime, "n1")
    return app


def grants(answer: pb.HeartbeatResponse) -> list[tuple[str, int, bool, str, int]]:
    return [(one.allocation_id, one.seconds, one.final, one.reason, one.freeze_seconds) for one in answer.leases]


async def begun(lab: Served, agent: Agent, name: str = "train") -> str:
    """One GPU that runs; its uid."""
    uid = await placed(lab.runtime, name, "n1", gpu=1)
    await agent.directive()
    await agent.heartbeat(running(uid))
    return uid


async def passed(runtime: Runtime, seconds: float) -> None:
    await pass_time(runtime, round(seconds * MICROS))


async def amend(runtime: Runtime, **changes: object) -> None:
    receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=LAB, changes=changes)))


async def test_what_is_paid_for_is_told_so_granted_its_window_and_extended_heartbeat_by_heartbeat(
    lab: Served,
) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await placed(lab.runtime, "train", "n1", gpu=1)
    order = await agent.directive()
    assert (order.paid, order.leased) == (True, False)
    answer = await agent.heartbeat()
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    (lease,) = await leases(lab.runtime)
    assert lease["started_at"] == 0, "nothing is spent before it runs"
    await agent.heartbeat(running(uid))
    await passed(lab.runtime, 5)
    answer = await agent.heartbeat()
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    held = await account(lab.runtime)
    assert (held["posted"], held["held"]) == (nanocredits("1") - 5 * SECOND, WINDOW * SECOND)
    await assert_all_is_paid(lab.runtime)
    await assert_books_balance(lab.runtime)


async def test_work_that_nobody_pays_for_asks_for_nothing(app: Served) -> None:
    agent = await joined(app)
    uid = await placed(app.runtime, "free", "n1")
    assert not (await agent.directive()).paid
    answer = await agent.heartbeat(running(uid))
    assert not answer.leases
    async with app.runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM entry") == 0


async def test_an_end_is_settled_by_what_the_node_measured(lab: Served) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 7)
    answer = await agent.heartbeat(ended(uid, usage=pb.AllocationUsage(seconds=6.25)))
    assert (acknowledged(answer), grants(answer)) == ([(uid, 1)], [])
    (lease,) = await ended_leases(lab.runtime)
    assert (lease["state"], lease["posted"]) == ("closed", 6.25 * SECOND)
    assert (await account(lab.runtime))["posted"] == nanocredits("1") - 6.25 * SECOND
    await assert_books_balance(lab.runtime)


async def test_without_credit_the_rest_of_the_window_is_the_last_unless_somebody_tops_up(lab: Served) -> None:
    await funded(lab.runtime, "0.2")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    await agent.heartbeat()
    await passed(lab.runtime, 5)
    answer = await agent.heartbeat()
    assert grants(answer) == [(uid, 10, True, "insufficient_credit", 0)]
    await passed(lab.runtime, 4)
    assert grants(await agent.heartbeat()) == [(uid, 6, True, "insufficient_credit", 0)]
    await funded(lab.runtime, "1")
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    await assert_books_balance(lab.runtime)


async def test_what_ended_for_want_of_credit_has_failed_and_says_so(lab: Served) -> None:
    await funded(lab.runtime, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 15)
    await agent.heartbeat()
    usage = pb.AllocationUsage(seconds=15.0)
    answer = await agent.heartbeat(stopped(uid, exit_code=143, reason="CreditExhausted", message="over", usage=usage))
    assert acknowledged(answer) == [(uid, 1)]
    told = (await shown(lab.runtime, "train"))["status"]
    assert (told["phase"], told["reason"]) == ("Failed", "CreditExhausted")
    held = await account(lab.runtime)
    assert (held["posted"], held["held"], held["gpus"]) == (0, 0, 0)
    await assert_books_balance(lab.runtime)


async def test_what_spends_too_fast_is_to_be_frozen_and_goes_on_when_there_is_more(lab: Served) -> None:
    await change(lab.runtime, "Settings", "", "system", credits={"throttleSecondsMax": 77})
    await funded(lab.runtime, "10")
    await amend(lab.runtime, spend_rate_max=SECOND // 10, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    answer = await agent.heartbeat()
    assert grants(answer) == [(uid, 10, True, "spend_rate_exceeded", 77)]
    await passed(lab.runtime, 30)
    assert grants(await agent.heartbeat()) == [(uid, 0, True, "spend_rate_exceeded", 77)]
    await passed(lab.runtime, 150)
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    # Nobody pays for the time in which it was frozen.
    assert (await account(lab.runtime))["posted"] == nanocredits("10") - WINDOW * SECOND
    await assert_books_balance(lab.runtime)


async def status_of(runtime: Runtime, name: str = "train") -> dict[str, Any]:
    return dict((await shown(runtime, name))["status"])


async def test_work_that_is_paid_no_further_says_when_it_ends_until_somebody_tops_up(lab: Served) -> None:
    await funded(lab.runtime, "0.2")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    await agent.heartbeat()
    before = await status_of(lab.runtime)
    await passed(lab.runtime, 5)
    assert grants(await agent.heartbeat()) == [(uid, 10, True, "insufficient_credit", 0)]

    async def noted() -> bool:
        return (await status_of(lab.runtime)).get("reason") == OUT_OF_CREDIT

    await eventually(noted)
    told = await status_of(lab.runtime)
    (lease,) = await leases(lab.runtime)
    until = timestamp(datetime.fromtimestamp(lease["paid_until"] // MICROS, UTC))
    assert (told["phase"], told["message"]) == ("Running", f"out of credit: ends at {until} unless topped up")
    assert (told["nodes"][0]["unpaid"], told["nodes"][0]["paidUntil"]) == ("insufficient_credit", until)
    (condition,) = [one for one in told["conditions"] if one["type"] == OUT_OF_CREDIT]
    assert (condition["status"], condition["message"]) == ("True", told["message"])

    async with lab.runtime.database.reader() as db:
        revision = await db.fetchval("SELECT value FROM revision")
    await passed(lab.runtime, 4)
    for _ in range(2):  # a second answer comes after whatever the first heartbeat had to note
        assert grants(await agent.heartbeat()) == [(uid, 6, True, "insufficient_credit", 0)]
    async with lab.runtime.database.reader() as db:
        assert await db.fetchval("SELECT value FROM revision") == revision, "a beat without news is no change"

    await funded(lab.runtime, "1")
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]

    async def as_before() -> bool:
        return await status_of(lab.runtime) == before

    await eventually(as_before)


async def test_a_top_up_while_nobody_listened_is_noted_by_the_next_stream(lab: Served) -> None:
    await funded(lab.runtime, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    await agent.heartbeat()
    await eventually(lambda: is_short(lab.runtime))
    again = lab.agent("n1")
    await again.heartbeat(running(uid), inventory=True)
    await again.heartbeat(running(uid))
    assert await is_short(lab.runtime), "it is as before"
    await funded(lab.runtime, "1")
    await passed(lab.runtime, 1)
    third = lab.agent("n1")
    await third.heartbeat(running(uid), inventory=True)
    await eventually(lambda: is_paid(lab.runtime))


async def test_of_several_nodes_the_one_that_ends_first_is_told(lab: Served) -> None:
    await machine(lab.runtime, "n2")
    await funded(lab.runtime, "0.3")
    first, second = await joined(lab), await joined(lab, "n2")
    uid = await placed(lab.runtime, "wide", "n1", "n2", spec={"nodes": 2}, gpu=1)
    for agent in (first, second):
        await agent.directive()
        await agent.heartbeat(running(uid))
    await passed(lab.runtime, 5)
    await first.heartbeat()
    await passed(lab.runtime, 2)

    def ends(count: int) -> Callable[[], Awaitable[bool]]:
        async def are() -> bool:
            return sum("unpaid" in one for one in (await status_of(lab.runtime, "wide"))["nodes"]) == count

        return are

    await eventually(ends(1))
    await second.heartbeat()
    await eventually(ends(2))
    told = await status_of(lab.runtime, "wide")
    assert (
        told["message"] == f"out of credit: ends at {min(each['paidUntil'] for each in told['nodes'])} unless topped up"
    )
    await first.heartbeat(ended(uid))
    told = await status_of(lab.runtime, "wide")
    assert ["unpaid" in each for each in told["nodes"]] == [False, True]
    assert told["reason"] == OUT_OF_CREDIT
    await second.heartbeat(ended(uid))
    assert "reason" not in await status_of(lab.runtime, "wide")


async def is_short(runtime: Runtime) -> bool:
    return (await status_of(runtime)).get("reason") == OUT_OF_CREDIT


async def is_paid(runtime: Runtime) -> bool:
    return "reason" not in await status_of(runtime)


async def test_work_that_ends_before_its_paid_time_does_says_nothing_of_credit(lab: Served) -> None:
    await funded(lab.runtime, "0.15")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    await agent.heartbeat()
    await eventually(lambda: is_short(lab.runtime))
    await agent.heartbeat(ended(uid))
    told = await status_of(lab.runtime)
    assert told["phase"] == "Succeeded"
    assert not {"reason", "message"} & told.keys()
    assert OUT_OF_CREDIT not in {one["type"] for one in told["conditions"]}
    assert not {"unpaid", "paidUntil"} & told["nodes"][0].keys()


async def test_work_that_spends_too_fast_is_not_out_of_credit(lab: Served) -> None:
    await funded(lab.runtime, "10")
    await amend(lab.runtime, spend_rate_max=SECOND // 10, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    uid = await begun(lab, agent)
    before = await status_of(lab.runtime)
    await passed(lab.runtime, 5)
    for _ in range(2):  # a second answer comes after whatever the first heartbeat had to note
        (grant,) = grants(await agent.heartbeat())
        assert grant[:4] == (uid, 10, True, "spend_rate_exceeded")
    assert await status_of(lab.runtime) == before


async def test_what_stands_still_says_so_until_it_goes_on(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    before = (await shown(lab.runtime, "train"))["status"]
    await agent.heartbeat(running(uid, reason=FROZEN, message="its account spends too fast"))
    told = (await shown(lab.runtime, "train"))["status"]
    assert (told["phase"], told["reason"], told["nodes"][0]["frozen"]) == ("Running", FROZEN, True)
    assert told["message"] == (
        "its account spends too fast: it is frozen on n1, and resumes once the account may spend more"
    )
    (condition,) = [one for one in told["conditions"] if one["type"] == FROZEN]
    assert (condition["status"], condition["reason"]) == ("True", FROZEN)
    async with lab.runtime.database.reader() as db:
        revision = await db.fetchval("SELECT value FROM revision")
    await agent.heartbeat(running(uid, reason=FROZEN))
    async with lab.runtime.database.reader() as db:
        assert await db.fetchval("SELECT value FROM revision") == revision, "what was said before is no change"
    await agent.heartbeat(running(uid))
    assert (await shown(lab.runtime, "train"))["status"] == before


async def test_what_went_on_while_nobody_listened_is_told_so_by_the_next_stream(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await agent.heartbeat(running(uid, reason=FROZEN))
    other = lab.agent("n1")
    await other.heartbeat(running(uid, reason=FROZEN), inventory=True)
    assert (await shown(lab.runtime, "train"))["status"]["reason"] == FROZEN
    third = lab.agent("n1")
    await third.heartbeat(running(uid), inventory=True)
    assert "reason" not in (await shown(lab.runtime, "train"))["status"]


async def test_what_ends_while_it_stands_still_stands_still_no_more(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await agent.heartbeat(running(uid, reason=FROZEN))
    await agent.heartbeat(stopped(uid, exit_code=143, reason="CreditExhausted", message="over"))
    told = (await shown(lab.runtime, "train"))["status"]
    assert (told["phase"], told["reason"]) == ("Failed", "CreditExhausted")
    assert FROZEN not in {one["type"] for one in told["conditions"]}
    assert "frozen" not in told["nodes"][0]


async def test_what_stands_still_on_one_of_its_nodes_says_where(lab: Served) -> None:
    await machine(lab.runtime, "n2")
    await funded(lab.runtime, "10")
    first, second = await joined(lab), await joined(lab, "n2")
    uid = await placed(lab.runtime, "wide", "n1", "n2", spec={"nodes": 2}, gpu=1)
    for agent in (first, second):
        await agent.directive()
        await agent.heartbeat(running(uid))
    for agent in (first, second):
        await agent.heartbeat(running(uid, reason=FROZEN))
    assert "is frozen on 2 of its nodes" in (await shown(lab.runtime, "wide"))["status"]["message"]
    await first.heartbeat(running(uid))
    assert "is frozen on n2" in (await shown(lab.runtime, "wide"))["status"]["message"]
    await second.heartbeat(ended(uid))
    assert "reason" not in (await shown(lab.runtime, "wide"))["status"]


async def test_a_closed_lease_stops_what_it_paid_for_at_once(lab: Served) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    (lease,) = await leases(lab.runtime)
    assert await credit.lapse(lab.runtime, {lease["id"]: lease["paid_until"]}) == {lease["id"]: True}
    assert grants(await agent.heartbeat()) == [(uid, 0, True, "fenced", 0)]


async def test_another_stream_goes_on_where_the_first_was_and_is_never_behind_it(lab: Served) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    for _ in range(5):
        await agent.heartbeat()
    await passed(lab.runtime, 5)
    again = lab.agent("n1")
    answer = await again.heartbeat(running(uid), inventory=True)
    assert answer.complete
    assert [one.paid for one in answer.directives] == [True]
    assert grants(answer) == [(uid, WINDOW, False, "", 0)]
    held = await account(lab.runtime)
    assert held["posted"] == nanocredits("1") - 5 * SECOND
    await assert_books_balance(lab.runtime)


async def test_numbers_catch_up_when_the_databases_clock_went_back(lab: Served) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 5)
    again = await joined(lab)
    await again.heartbeat(running(uid))
    await passed(lab.runtime, -5)
    third = lab.agent("n1")
    assert grants(await third.heartbeat(running(uid), inventory=True)) == [], "somebody has beaten after this"
    await passed(lab.runtime, 6)
    assert grants(await third.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    await assert_books_balance(lab.runtime)


async def test_all_leases_of_a_node_are_paid_in_one_answer(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uids = [await begun(lab, agent, f"train-{index}") for index in range(4)]
    await passed(lab.runtime, 5)
    assert sorted(grants(await agent.heartbeat())) == sorted((uid, WINDOW, False, "", 0) for uid in uids)
    assert (await account(lab.runtime))["posted"] == nanocredits("10") - 4 * 5 * SECOND


async def test_where_not_all_can_be_extended_at_once_those_that_are_are_told(
    lab: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uids = {await begun(lab, agent, f"train-{index}") for index in range(5)}
    for lane in lab.runtime.extending.lanes:
        monkeypatch.setattr(lane, "_capacity", 1)
    await passed(lab.runtime, 5)
    told = {one[0] for one in grants(await agent.heartbeat())}
    assert told < uids
    assert len(told) in (1, 2), "one for each lane that has leases"
    there = await leases(lab.runtime)
    paid = [one["paid_until"] for one in there if one["uid"] in told]
    unpaid = [one["paid_until"] for one in there if one["uid"] not in told]
    assert min(paid) > max(unpaid), "who was told was extended, and nobody else was"
    await assert_books_balance(lab.runtime)


async def test_work_that_needs_both_leases_is_told_both(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    await placed(lab.runtime, "moves", "n1", spec={"onNodeLost": "requeue"}, gpu=1)
    order = await agent.directive()
    assert (order.paid, order.leased) == (True, True)


async def test_what_lost_its_lease_because_we_were_away_waits_again_and_pays_for_what_it_ran(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 100)
    usage = pb.AllocationUsage(seconds=15.5)
    answer = await agent.heartbeat(stopped(uid, exit_code=143, reason="LeaseExpired", usage=usage))
    assert acknowledged(answer) == [(uid, 1)]
    assert (await shown(lab.runtime, "train"))["status"]["phase"] == "Pending"
    assert (await account(lab.runtime))["posted"] == nanocredits("10") - 15.5 * SECOND
    await assert_books_balance(lab.runtime)


# Leases that nobody extends.


async def test_a_lease_that_nobody_extends_is_ended_when_its_work_must_be_dead(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    await begun(lab, agent)
    watch = ExpiryWatch()
    await passed(lab.runtime, WINDOW - 1)
    assert await end_lapsed(lab.runtime, watch, 1000.0) == []
    await passed(lab.runtime, 60)
    assert await end_lapsed(lab.runtime, watch, 1005.0) == [], "by our own clock it is not overdue for long enough"
    assert await end_lapsed(lab.runtime, watch, 1039.0) == []
    assert len(await end_lapsed(lab.runtime, watch, 1040.0)) == 1
    (lease,) = await ended_leases(lab.runtime)
    assert (lease["state"], lease["posted"]) == ("lapsed", WINDOW * SECOND)
    held = await account(lab.runtime)
    assert (held["held"], held["gpus"]) == (0, 0)
    await assert_books_balance(lab.runtime)


async def test_a_heartbeat_after_a_jump_of_the_clock_loses_nothing(lab: Served) -> None:
    await funded(lab.runtime, "10")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    watch = ExpiryWatch()
    await passed(lab.runtime, 3600)
    await end_lapsed(lab.runtime, watch, 1000.0)
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    await passed(lab.runtime, 3600)
    assert await end_lapsed(lab.runtime, watch, 2000.0) == []
    (number, paid_until), *_ = watch.since
    await agent.heartbeat()
    assert await credit.lapse(lab.runtime, {number: paid_until}) == {number: False}, "it was extended meanwhile"


async def test_what_is_frozen_is_not_overdue_until_it_may_be_no_longer(lab: Served) -> None:
    await funded(lab.runtime, "10")
    await amend(lab.runtime, spend_rate_max=1, spend_burst=WINDOW * SECOND)
    agent = await joined(lab)
    await begun(lab, agent)
    await passed(lab.runtime, 5)
    await agent.heartbeat()
    watch = ExpiryWatch()
    await passed(lab.runtime, 300)
    await end_lapsed(lab.runtime, watch, 1000.0)
    assert not watch.since
    await passed(lab.runtime, 11)
    await end_lapsed(lab.runtime, watch, 2000.0)
    assert len(watch.since) == 1


async def test_a_lease_that_never_began_ends_with_its_placement(lab: Served) -> None:
    await funded(lab.runtime, "10")
    await joined(lab)
    await placed(lab.runtime, "train", "n1", gpu=1)
    watch = ExpiryWatch()
    await passed(lab.runtime, 3600)
    await end_lapsed(lab.runtime, watch, 1000.0)
    assert not watch.since, "it may still begin"
    async with lab.runtime.database.reader() as db:
        await db.execute("DELETE FROM placement")
    await passed(lab.runtime, 31)
    await end_lapsed(lab.runtime, watch, 1031.0)
    assert len(await end_lapsed(lab.runtime, watch, 2000.0)) == 1
    held = await account(lab.runtime)
    assert (held["posted"], held["held"]) == (nanocredits("10"), 0)
    await assert_books_balance(lab.runtime)


async def test_a_lease_that_was_paid_by_a_clock_that_ran_ahead_ends_without_heartbeats(lab: Served) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    await begun(lab, agent)
    await passed(lab.runtime, 10**8)
    await agent.heartbeat()
    await passed(lab.runtime, -(10**8))
    watch = ExpiryWatch()
    assert await end_lapsed(lab.runtime, watch, 0) == [], "whoever is alive beats meanwhile"
    assert len(await end_lapsed(lab.runtime, watch, 10**6)) == 1
    assert await leases(lab.runtime) == []
    held = await account(lab.runtime)
    assert (held["held"], held["gpus"]) == (0, 0)
    await assert_books_balance(lab.runtime)


async def test_a_lease_that_was_paid_by_a_clock_that_ran_ahead_is_put_right_by_its_next_heartbeat(
    lab: Served,
) -> None:
    await funded(lab.runtime, "1")
    agent = await joined(lab)
    uid = await begun(lab, agent)
    await passed(lab.runtime, 10**8)
    await agent.heartbeat()
    await passed(lab.runtime, -(10**8))
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    before = (await account(lab.runtime))["posted"]
    await passed(lab.runtime, 5)
    assert grants(await agent.heartbeat()) == [(uid, WINDOW, False, "", 0)]
    assert (await account(lab.runtime))["posted"] == before - 5 * SECOND
    watch = ExpiryWatch()
    await end_lapsed(lab.runtime, watch, 0)
    assert await end_lapsed(lab.runtime, watch, 10**6) == []
    await assert_books_balance(lab.runtime)
