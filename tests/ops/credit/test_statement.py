"""Balances as of a time and statements, against a plain recomputation from all entries."""

import random
from typing import Any

import pytest

from bursar.commands.credit.credit import CloseLeaseCommand
from bursar.core.credit.account import QUARTER
from bursar.core.credit.hash_chain import micros_of
from bursar.core.credit.statement import BalanceAt, Forecast, Item, LeaseLine, PageEnd, Statement, TenantStatement
from bursar.core.values.money import MICROS, credits_of, nanocredits
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit import credit, ledger
from bursar.ops.credit.ledger import Extend
from bursar.ops.credit.seal import drop_lines, load_standing, seal
from bursar.ops.credit.statement import balance_at, forecast, statement, system_balances, tenant_statement
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import LAB, START, funded, leased, pass_time, priced, receipt, stop_clock
from support.credit.sealings import ANNA, found, history, open_accounts, small_partitions, some_day

DAY = 86_400 * MICROS


class Plain:
    """All entries, before any is dropped: whatever is asked is counted from the first one on."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = [dict(row) | {"at": micros_of(row["at"])} for row in rows]

    @classmethod
    async def read(cls, runtime: Runtime) -> "Plain":
        async with runtime.database.reader() as db:
            return cls(await db.fetch("SELECT * FROM entry ORDER BY number"))

    def moves(self, account: int, begin: int, end: int) -> list[tuple[dict[str, Any], int]]:
        return [
            (row, row["amount"] * ((row["credit"] == account) - (row["debit"] == account)))
            for row in self.rows
            if begin <= row["at"] < end and account in (row["credit"], row["debit"])
        ]

    def balance(self, account: int, at: int) -> int:
        return sum(amount for _, amount in self.moves(account, 0, at))

    def check(self, shown: Statement) -> None:
        moves = self.moves(shown.account, shown.begin, shown.end)
        assert shown.opening == self.balance(shown.account, shown.begin)
        assert shown.closing == self.balance(shown.account, shown.end)
        totals: dict[str, int] = {}
        for row, amount in moves:
            totals[row["type"]] = totals.get(row["type"], 0) + amount
        assert shown.totals == totals
        assert [(one.number, one.at, one.type, one.amount, one.actor, one.reason) for one in shown.items] == [
            (row["number"], row["at"], row["type"], amount, row["actor"], row["reason"])
            for row, amount in moves
            if not row["lease"]
        ]
        assert {one.lease: (one.amount, one.debited, one.refunded, one.micros, one.entries) for one in shown.lines} == {
            lease: (
                sum(amount for row, amount in moves if row["lease"] == lease),
                sum(amount for row, amount in moves if row["lease"] == lease and row["type"] == "debit"),
                sum(amount for row, amount in moves if row["lease"] == lease and row["type"] == "refund"),
                sum(
                    row["until"] - row["begin"] for row, _ in moves if row["lease"] == lease and row["type"] == "debit"
                ),
                sum(row["lease"] == lease for row, _ in moves),
            )
            for lease in {row["lease"] for row, _ in moves if row["lease"]}
        }


async def told(runtime: Runtime, account: int, begin: int, end: int) -> Statement:
    shown = await statement(runtime, account, begin, end)
    assert isinstance(shown, Statement), shown
    return shown


@pytest.mark.parametrize("seed", range(4))
async def test_any_history_is_told_exactly_at_any_time_however_much_of_it_is_sealed(
    runtime: Runtime, seed: int
) -> None:
    chance = random.Random(seed)
    await small_partitions(runtime, size=30, number=12)
    await stop_clock(runtime)
    await priced(runtime)
    await open_accounts(runtime)
    ids = [await funded(runtime, "300", owner) for owner in (LAB, ANNA)]
    open_leases: dict[int, int] = {}
    for _ in range(8):
        await some_day(runtime, chance, 12, open_leases)
        if chance.random() < 0.7:
            await seal(runtime, entries_max=chance.choice((3, 10, 1000)))
        plain = await Plain.read(runtime)
        times = sorted(
            {row["at"] + chance.choice((-1, 0, 1)) for row in chance.sample(plain.rows, min(8, len(plain.rows)))}
        )
        times += [times[0] // QUARTER * QUARTER, times[-1] + DAY]
        for account in ids:
            for at in times:
                shown = await balance_at(runtime, account, at)
                assert isinstance(shown, BalanceAt)
                assert shown.posted == plain.balance(account, at)
            for _ in range(3):
                begin, end = sorted(chance.sample(times, 2))
                plain.check(await told(runtime, account, begin, end))
    assert await found(runtime) == []

    # Years later the lines are gone; every quarter of an hour is still told as it was.
    await seal(runtime)
    plain = await Plain.read(runtime)
    await pass_time(runtime, 2 * QUARTER)
    await funded(runtime, "1")
    await seal(runtime)
    await pass_time(runtime, 400 * DAY)
    assert await drop_lines(runtime, days=30)
    floor = (await load_standing(runtime)).floor
    quarters = sorted({row["at"] // QUARTER * QUARTER for row in plain.rows})
    for account in ids:
        for _ in range(10):
            begin, end = sorted(chance.choices(quarters, k=2))
            plain.check(await told(runtime, account, begin, end))
    dropped = [row for row in plain.rows if row["number"] < floor and row["at"] % QUARTER]
    for row in dropped:
        refused = await balance_at(runtime, ids[0], row["at"])
        assert isinstance(refused, BalanceAt | Refusal)
        if isinstance(refused, BalanceAt):
            assert refused.posted == plain.balance(ids[0], row["at"])
    assert await found(runtime) == []


async def test_what_is_told_line_by_line_no_more_is_refused_and_not_guessed(runtime: Runtime) -> None:
    await small_partitions(runtime, size=8, number=6)
    ids = await history(runtime)
    await seal(runtime)
    plain = await Plain.read(runtime)
    await pass_time(runtime, 2 * DAY)
    await drop_lines(runtime, days=1)
    refused = await balance_at(runtime, ids["lab"], START + 6 * 60 * MICROS)
    assert isinstance(refused, Refusal)
    assert refused.code is Code.GONE
    assert refused.hint == "Ask for a full quarter of an hour: 2027-01-15T08:00:00Z or 2027-01-15T08:15:00Z."
    assert isinstance(await statement(runtime, ids["lab"], START, START + QUARTER + 1), Refusal)
    plain.check(await told(runtime, ids["lab"], START, START + QUARTER))
    # Within what is kept, and before everything, every moment is known.
    assert isinstance(await balance_at(runtime, ids["lab"], START + 3 * QUARTER + 1), BalanceAt)
    plain.check(await told(runtime, ids["lab"], 0, START + 3 * QUARTER + 1))


async def test_a_statement_has_the_lines_of_leases_and_everything_else_one_by_one(runtime: Runtime) -> None:
    ids = await history(runtime)
    shown = await told(runtime, ids["lab"], 0, START + DAY)
    assert (shown.name, shown.opening, credits_of(shown.closing)) == ("default", 0, "945.5")
    assert {name: credits_of(amount) for name, amount in shown.totals.items()} == {
        "topup": "1000", "debit": "-81", "refund": "26.5",
    }  # fmt: skip
    assert [(one.type, credits_of(one.amount), one.actor) for one in shown.items] == [("topup", "1000", "user:test")]
    first, second = shown.lines
    assert (first.lease, first.job, first.klass, first.gpus, first.state) == (1, "train", "h100", 1000, "closed")
    assert (credits_of(first.amount), credits_of(first.debited), credits_of(first.refunded)) == ("-1", "-27", "26")
    assert first.micros == 3 * QUARTER
    assert (first.begin, first.until) == (START, START + 3 * QUARTER)
    assert (second.lease, second.state, credits_of(second.amount)) == (2, "open", "-53.5")


async def test_long_statements_come_in_parts(runtime: Runtime) -> None:
    ids = await history(runtime)
    for _ in range(4):
        await funded(runtime, "1")
    whole = await told(runtime, ids["lab"], 0, START + DAY)
    assert whole.following is None
    lines: list[LeaseLine] = []
    items: list[Item] = []
    place: PageEnd | None = None
    for _ in range(20):
        part = await statement(runtime, ids["lab"], 0, START + DAY, limit=1, place=place)
        assert isinstance(part, Statement)
        assert (part.opening, part.closing, part.totals) == (whole.opening, whole.closing, whole.totals)
        lines, items = [*lines, *part.lines], [*items, *part.items]
        # What is written meanwhile is in none of the pages, and what is sealed is told as before.
        await funded(runtime, "1")
        await seal(runtime)
        place = part.following
        if place is None:
            break
    assert (tuple(lines), tuple(items)) == (whole.lines, whole.items)


async def test_the_statement_of_a_tenant_is_that_of_all_its_accounts(runtime: Runtime) -> None:
    ids = await history(runtime)
    shown = await tenant_statement(runtime, "default", START + QUARTER, START + DAY)
    assert isinstance(shown, TenantStatement)
    assert [(one.account, one.name) for one in shown.accounts] == [
        (ids["lab"], "default"),
        (ids["anna"], "default/anna"),
    ]
    own = [await told(runtime, ids[name], START + QUARTER, START + DAY) for name in ("lab", "anna")]
    assert shown.opening == sum(one.opening for one in own)
    assert shown.closing == sum(one.closing for one in own)
    assert sum(shown.totals.values()) == shown.closing - shown.opening
    nobody = await tenant_statement(runtime, "nobody", 0, START)
    assert isinstance(nobody, TenantStatement)
    assert nobody.accounts == ()


async def test_the_systems_own_accounts_are_the_other_side_of_everything(runtime: Runtime) -> None:
    ids = await history(runtime)
    for _ in range(2):
        others = await system_balances(runtime)
        assert {name: credits_of(amount) for name, amount in others.items()} == {
            "system/topups": "-1500", "system/revenue": "135.5", "system/write-off": "0", "system/adjustments": "0.25",
        }  # fmt: skip
        shown = await tenant_statement(runtime, "default", 0, START + DAY)
        assert isinstance(shown, TenantStatement)
        assert shown.closing + sum(others.values()) == 0
        await seal(runtime)
    assert set(ids) >= {"lab", "anna"}


async def test_refusals(runtime: Runtime) -> None:
    ids = await history(runtime)
    for refused, code in (
        (await balance_at(runtime, 999, START), Code.NOT_FOUND),
        (await balance_at(runtime, 2, START), Code.NOT_FOUND),
        (await statement(runtime, 999, 0, START), Code.NOT_FOUND),
        (await statement(runtime, ids["lab"], START, START - 1), Code.INVALID),
        (await tenant_statement(runtime, "default", START, START - 1), Code.INVALID),
        (await forecast(runtime, 999), Code.NOT_FOUND),
    ):
        assert isinstance(refused, Refusal)
        assert refused.code is code


async def test_how_long_an_account_lasts(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    account = await funded(runtime, "46.08")
    idle = await forecast(runtime, account)
    assert isinstance(idle, Forecast)
    assert (idle.rate, idle.micros, idle.runs_out_at, idle.leases) == (0, None, None, 0)
    number = await leased(runtime, 1, 600)
    other = await leased(runtime, 3, 600)
    now = await forecast(runtime, account)
    assert isinstance(now, Forecast)
    assert (now.rate, now.leases, credits_of(now.available)) == (nanocredits("0.04"), 2, "22.08")
    assert (now.micros, now.runs_out_at) == (1152 * MICROS, START + 1152 * MICROS), "what is held will be used as well"
    await pass_time(runtime, 100 * MICROS)
    later = await forecast(runtime, account)
    assert isinstance(later, Forecast)
    assert later.runs_out_at == now.runs_out_at, "whether it was posted yet or not"
    await ledger.extend(runtime, [Extend(number, 1), Extend(other, 1)])
    posted = await forecast(runtime, account)
    assert isinstance(posted, Forecast)
    assert (posted.runs_out_at, posted.left) == (now.runs_out_at, later.left)
    receipt(await credit.close_lease(runtime, CloseLeaseCommand(number=other)))
    slower = await forecast(runtime, account)
    assert isinstance(slower, Forecast)
    assert (slower.rate, slower.micros) == (nanocredits("0.01"), 4208 * MICROS)
