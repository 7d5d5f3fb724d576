"""Account statements: balances as of a time, statements, forecasts.

Everything is read in one snapshot, so sealing, rolling up and dropping may go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from bursar.core.credit.account import QUARTER, SYSTEM_ACCOUNTS, account_name
from bursar.core.credit.hash_chain import time_of
from bursar.core.credit.statement import (
    BalanceAt,
    Forecast,
    Item,
    LeaseLine,
    PageEnd,
    Statement,
    TenantStatement,
    total,
)
from bursar.core.credit.statement import forecast as forecast_of
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import account_statement as store
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit.account_statement import StatementCut, Sums
from bursar.store.db.database import Connection, snapshot

LINES_MAX = 1000
LEASES_MAX = 1_000_000


async def balance_at(runtime: Runtime, account: int, at: int) -> BalanceAt | Refusal:
    """The balance of an account before a time, in microseconds."""
    async with snapshot(runtime.database) as db:
        if not (found := await store.load_names(db, [account])):
            return _nobody(account)
        cut = await store.load_cut(db, at)
        if cut is None:
            return _dropped(at)
        (posted,) = (await store.load_posted(db, list(found), cut)).values()
        return BalanceAt(account, at, posted, cut.number)


async def statement(
    runtime: Runtime, account: int, begin: int, end: int, *, limit: int = LINES_MAX, place: PageEnd | None = None
) -> Statement | Refusal:
    """The statement of one account from `begin` up to, but not including, `end`, in microseconds. It has at most
    `limit` lines and items; if there are more, `following` is the `place` of the next page, of the same entries."""
    if begin > end:
        return _backwards()
    async with snapshot(runtime.database) as db:
        names = await store.load_names(db, [account])
        if not names:
            return _nobody(account)
        first = await _first(db, account, begin, end) if place is None else place
        if isinstance(first, Refusal):
            return first
        span = await store.load_span(db, first.since, first.through)
        if place is not None and not await store.is_kept(db, span):
            return _dropped(place.begin)
        lines = await store.load_lines(db, account, span, first.lease, first.last_lease, limit + 1)
        items = await store.load_items(db, account, first.item, first.through, limit + 1)
    return Statement(
        account, account_name(*names[account]), first.begin, first.end, first.opening, first.closing, first.totals,
        tuple(items[:limit]), tuple(lines[:limit]), first.through, _following(first, items, lines, limit),
    )  # fmt: skip


async def _first(db: Connection, account: int, begin: int, end: int) -> PageEnd | Refusal:
    """The position before the first line. The sums of the whole period are computed here, once."""
    cuts = await _cuts(db, begin, end)
    if isinstance(cuts, Refusal):
        return cuts
    before, after = cuts
    opening, closing = (
        (await store.load_posted(db, [account], before))[account],
        (await store.load_posted(db, [account], after))[account],
    )
    sums = (await _moved(db, [account], cuts)).get(account, Sums({}, 0, 0))
    assert opening + sum(sums.totals.values()) == closing, f"account {account} does not add up"
    return PageEnd(
        max(0, sums.first_lease - 1), sums.last_lease, before.number, before.number, after.number, begin, end, opening,
        closing, sums.totals,
    )  # fmt: skip


def _following(first: PageEnd, items: Sequence[Item], lines: Sequence[LeaseLine], limit: int) -> PageEnd | None:
    """The position of the next page. A list without more lines stays at its end."""
    if len(items) <= limit and len(lines) <= limit:
        return None
    return replace(
        first,
        lease=lines[limit - 1].lease if len(lines) > limit else first.last_lease,
        item=items[limit - 1].number if len(items) > limit else first.through,
    )


async def _moved(db: Connection, accounts: Sequence[int], cuts: tuple[StatementCut, StatementCut]) -> dict[int, Sums]:
    return await store.load_sums(db, accounts, await store.load_span(db, cuts[0].number, cuts[1].number))


async def tenant_statement(runtime: Runtime, tenant: str, begin: int, end: int) -> TenantStatement | Refusal:
    """The statement of a tenant: all of its accounts, each with its sums."""
    if begin > end:
        return _backwards()
    async with snapshot(runtime.database) as db:
        cuts = await _cuts(db, begin, end)
        if isinstance(cuts, Refusal):
            return cuts
        summed = await _sums(db, await store.load_tenant(db, tenant), begin, end, cuts)
    return TenantStatement(
        tenant,
        begin,
        end,
        sum(one.opening for one in summed),
        sum(one.closing for one in summed),
        total(summed),
        tuple(summed),
        cuts[1].number,
    )


async def forecast(runtime: Runtime, account: int) -> Forecast | Refusal:
    """The forecast of an account: how long its credit lasts at its current rate of spending."""
    async with snapshot(runtime.database) as db:
        found = await ledger_store.load_accounts(db, [account])
        if not found:
            return _nobody(account)
        leases = await ledger_store.list_leases(db, [account], limit=LEASES_MAX)
        return forecast_of(found[account], leases, await ledger_store.load_now(db))


async def system_balances(runtime: Runtime) -> dict[str, int]:
    """The balances of the system's accounts, by name: top-ups are negative, earnings positive."""
    async with snapshot(runtime.database) as db:
        posted = await store.load_posted(db, list(SYSTEM_ACCOUNTS), await store.load_newest(db))
    return {SYSTEM_ACCOUNTS[one]: amount for one, amount in posted.items()}


async def _cuts(db: Connection, begin: int, end: int) -> tuple[StatementCut, StatementCut] | Refusal:
    first, last = await store.load_cut(db, begin), await store.load_cut(db, end)
    if first is None or last is None:
        return _dropped(begin if first is None else end)
    return first, last


async def _sums(
    db: Connection, names: dict[int, tuple[str, str]], begin: int, end: int, cuts: tuple[StatementCut, StatementCut]
) -> list[Statement]:
    ids = list(names)
    opening, closing = await store.load_posted(db, ids, cuts[0]), await store.load_posted(db, ids, cuts[1])
    sums = await _moved(db, ids, cuts)
    summed = []
    for one, owner in names.items():
        moved = sums[one].totals if one in sums else {}
        assert opening[one] + sum(moved.values()) == closing[one], f"account {one} does not add up"
        summed.append(
            Statement(one, account_name(*owner), begin, end, opening[one], closing[one], moved, through=cuts[1].number)
        )
    return summed


def _nobody(account: int) -> Refusal:
    return Refusal(Code.NOT_FOUND, f"there is no account {account}")


def _backwards() -> Refusal:
    return Refusal(Code.INVALID, "a period must not end before it begins")


def _dropped(at: int) -> Refusal:
    """The refusal of a time whose entries were dropped: only the balances at full quarters of an hour are kept."""
    quarter = at // QUARTER * QUARTER
    near = " or ".join(f"{time_of(one):%Y-%m-%dT%H:%M:%SZ}" for one in (quarter, quarter + QUARTER))
    return Refusal(
        Code.GONE,
        f"the single entries of {time_of(at):%Y-%m-%dT%H:%M:%SZ} are no longer kept",
        f"Ask for a full quarter of an hour: {near}.",
    )
