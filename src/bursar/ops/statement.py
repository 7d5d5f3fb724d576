"""Verbs of looking back and ahead: balances as of a time, statements, forecasts.

Everything is read in one snapshot: sealing, rolling up and dropping may go on meanwhile.
"""

from __future__ import annotations

from bursar.core.account import QUARTER, SYSTEM_ACCOUNTS, account_name
from bursar.core.refusal import Code, Refusal
from bursar.core.seal import time_of
from bursar.core.statement import BalanceAt, Forecast, Statement, TenantStatement, total
from bursar.core.statement import forecast as forecast_of
from bursar.ops.office import Office
from bursar.store import ledger as ledger_store
from bursar.store import statement as store
from bursar.store.database import Connection, snapshot
from bursar.store.statement import Cut

LINES_MAX = 1000
LEASES_MAX = 1_000_000


async def balance_at(office: Office, account: int, at: int) -> BalanceAt | Refusal:
    """What was posted to an account before a time, in microseconds."""
    async with snapshot(office.database) as db:
        if not (found := await store.load_names(db, [account])):
            return _nobody(account)
        cut = await store.load_cut(db, at)
        if cut is None:
            return _dropped(at)
        (posted,) = (await store.load_posted(db, list(found), cut)).values()
        return BalanceAt(account, at, posted, cut.number)


async def statement(
    office: Office,
    account: int,
    begin: int,
    end: int,
    *,
    limit: int = LINES_MAX,
    after_lease: int = 0,
    after_item: int = 0,
) -> Statement | Refusal:
    """Of one account, from `begin` up to and without `end`, in microseconds. At most `limit` lines and items: where
    there are more, `next_lease` and `next_item` are what `after_…` goes on with."""
    if begin > end:
        return _backwards()
    async with snapshot(office.database) as db:
        cuts = await _cuts(db, begin, end)
        if isinstance(cuts, Refusal):
            return cuts
        names = await store.load_names(db, [account])
        if not names:
            return _nobody(account)
        (summed,) = await _sums(db, names, begin, end, cuts)
        sealed = (await store.load_newest(db)).sealed
        lines = await store.load_lines(db, account, await store.load_span(db, *cuts), after_lease, limit + 1)
        items = await store.load_items(db, account, *cuts, sealed, after_item, limit + 1)
    return Statement(
        account,
        summed.name,
        begin,
        end,
        summed.opening,
        summed.closing,
        summed.totals,
        tuple(items[:limit]),
        tuple(lines[:limit]),
        summed.through,
        next_lease=lines[limit - 1].lease if len(lines) > limit else 0,
        next_item=items[limit - 1].number if len(items) > limit else 0,
    )


async def tenant_statement(office: Office, tenant: str, begin: int, end: int) -> TenantStatement | Refusal:
    """Of all accounts of a tenant, each with its sums."""
    if begin > end:
        return _backwards()
    async with snapshot(office.database) as db:
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


async def forecast(office: Office, account: int) -> Forecast | Refusal:
    """How long an account lasts at the rate at which it is spending now."""
    async with snapshot(office.database) as db:
        found = await ledger_store.load_accounts(db, [account])
        if not found:
            return _nobody(account)
        leases = await ledger_store.list_leases(db, [account], limit=LEASES_MAX)
        return forecast_of(found[account], leases, await ledger_store.load_now(db))


async def system_balances(office: Office) -> dict[str, int]:
    """The other side of everybody's entries, by name: what was topped up is negative, what was earned is positive."""
    async with snapshot(office.database) as db:
        posted = await store.load_posted(db, list(SYSTEM_ACCOUNTS), await store.load_newest(db))
    return {SYSTEM_ACCOUNTS[one]: amount for one, amount in posted.items()}


async def _cuts(db: Connection, begin: int, end: int) -> tuple[Cut, Cut] | Refusal:
    first, last = await store.load_cut(db, begin), await store.load_cut(db, end)
    if first is None or last is None:
        return _dropped(begin if first is None else end)
    return first, last


async def _sums(
    db: Connection, names: dict[int, tuple[str, str]], begin: int, end: int, cuts: tuple[Cut, Cut]
) -> list[Statement]:
    ids = list(names)
    opening, closing = await store.load_posted(db, ids, cuts[0]), await store.load_posted(db, ids, cuts[1])
    totals = await store.load_totals(db, ids, await store.load_span(db, *cuts))
    summed = []
    for one, owner in names.items():
        moved = totals.get(one, {})
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
    """Of old times only what every quarter of an hour came to is kept."""
    quarter = at // QUARTER * QUARTER
    near = " or ".join(f"{time_of(one):%Y-%m-%dT%H:%M:%SZ}" for one in (quarter, quarter + QUARTER))
    return Refusal(
        Code.GONE,
        f"entries of {time_of(at):%Y-%m-%dT%H:%M:%SZ} are no longer kept line by line",
        f"Ask for a full quarter of an hour: {near}.",
    )
