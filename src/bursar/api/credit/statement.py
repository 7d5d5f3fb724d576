"""Handlers of balances, account statements as JSON and CSV, and forecasts."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import msgspec

from bursar.api.credit.credit import (
    find_account,
    instant_of,
    limit_of,
    named_owner,
    not_ours,
)
from bursar.api.http.route import Answer, Call, Outcome, Param
from bursar.core.credit.account import Owner, no_account
from bursar.core.credit.statement import Item, LeaseLine, PageEnd, Statement
from bursar.core.values.access import reach
from bursar.core.values.refusal import Code, Refusal, field_fault, invalid
from bursar.ops.credit import statement as ops
from bursar.store.credit import ledger as store
from bursar.wire.reports.credit import balance_of
from bursar.wire.reports.statement import (
    forecast_view,
    past_balance,
    statement_csv,
    statement_view,
    tenant_statement_view,
)
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import micros_of

CSV = "text/csv"
LINES_MAX = 1000
CSV_LINES_MAX = 100_000

PERIOD = (
    Param("from", "Begin of the period, a time or a date; default: begin of the month."),
    Param("to", "End of the period, exclusive; default: now."),
)
PAGING = (
    Param("limit", f"Maximum number of lines of each sort; default: {LINES_MAX}.", "integer"),
    Param("continue", "The continue token of the previous page."),
)

Period = tuple[int, int]


async def get_balance(call: Call) -> Outcome:
    """The posted, held and available credit of an account; or the posted credit at a time."""
    account, at = await find_account(call), instant_of(call, "at")
    if isinstance(account, Refusal):
        return account
    if isinstance(at, Refusal):
        return at
    if at is None:
        return Answer(200, encode(balance_of(account)))
    found = await ops.balance_at(call.context.runtime, account.id, at)
    return found if isinstance(found, Refusal) else Answer(200, encode(past_balance(account.name, found)))


async def get_forecast(call: Call) -> Outcome:
    account = await find_account(call)
    if isinstance(account, Refusal):
        return account
    found = await ops.forecast(call.context.runtime, account.id)
    return found if isinstance(found, Refusal) else Answer(200, encode(forecast_view(account.name, found)))


async def get_statement(call: Call) -> Outcome:
    """The statement of one account, or of all accounts of a tenant."""
    period = await _period(call)
    if isinstance(period, Refusal):
        return period
    if "tenant" in call.query:
        return await _tenant_statement(call, period)
    account = await find_account(call)
    if isinstance(account, Refusal):
        return account
    if wants_csv(call):
        return await _csv(call, account.id, period)
    return await _page(call, account.id, period)


def wants_csv(call: Call) -> bool:
    return call.query.get("format", "") == "csv" or CSV in call.headers.get("accept", "")


async def _period(call: Call) -> Period | Refusal:
    if call.query.get("format", "json") not in ("json", "csv"):
        return invalid("format must be json or csv", field_fault("format", "must be json or csv"))
    begin, end = instant_of(call, "from"), instant_of(call, "to")
    if isinstance(begin, Refusal):
        return begin
    if isinstance(end, Refusal):
        return end
    async with call.context.database.reader() as db:
        now = await store.load_now(db)
    return _month_of(now) if begin is None else begin, now if end is None else end


def _month_of(now: int) -> int:
    """The beginning of the month of a time, in microseconds."""
    return micros_of(f"{datetime.fromtimestamp(now // 10**6, UTC):%Y-%m}-01")


async def _tenant_statement(call: Call, period: Period) -> Outcome:
    tenant = call.query["tenant"]
    whose = reach(call.identity)
    # A caller who sees only its own account within the tenant gets no lines of the others.
    if not tenant or not (whose.everything or (whose.subtree and await call.context.sees(call.identity, tenant))):
        return no_account(Owner(tenant))
    if named_owner(call) is not None:
        return invalid("both a tenant and an account are named", hint="Name one.")
    if wants_csv(call):
        return Refusal(Code.NOT_ACCEPTABLE, "a tenant's statement is JSON", "Ask for each account as CSV.")
    found = await ops.tenant_statement(call.context.runtime, tenant, *period)
    return found if isinstance(found, Refusal) else Answer(200, encode(tenant_statement_view(found)))


async def _page(call: Call, account: int, period: Period) -> Outcome:
    limit, place = limit_of(call, LINES_MAX), await _place(call, account)
    if isinstance(limit, Refusal):
        return limit
    if isinstance(place, Refusal):
        return place
    found = await ops.statement(call.context.runtime, account, *period, limit=limit, place=place)
    if isinstance(found, Refusal):
        return found
    return Answer(200, encode(statement_view(found, await _token(call, account, found.following))))


async def _token(call: Call, account: int, place: PageEnd | None) -> str:
    """The continue token of the next page. It is sealed, because it carries sums that clients must not forge."""
    if place is None:
        return ""
    message = encode(
        (account, [str(one) for one in _numbers(place)], {key: str(one) for key, one in place.totals.items()})
    )
    seal = (await call.context.runtime.signing.ring()).seal(PURPOSE, message)
    return base64.urlsafe_b64encode(seal + message).decode()


async def _place(call: Call, account: int) -> PageEnd | Refusal | None:
    text = call.query.get("continue", "")
    if not text:
        return None
    try:
        raw = base64.urlsafe_b64decode(text.encode())
    except ValueError:
        return not_ours()
    seal, message = raw[:SEAL_BYTES], raw[SEAL_BYTES:]
    if not (await call.context.runtime.signing.ring()).is_sealed(PURPOSE, message, seal):
        return not_ours()
    whose, numbers, totals = msgspec.json.decode(message)
    if whose != account:
        return not_ours()
    lease, last_lease, item, since, through, begin, end, opening, closing = map(int, numbers)
    sums = {key: int(amount) for key, amount in totals.items()}
    return PageEnd(lease, last_lease, item, since, through, begin, end, opening, closing, sums)


def _numbers(place: PageEnd) -> tuple[int, ...]:
    """Sums as texts, which are exact: they may exceed the numbers of JSON."""
    return (
        place.lease, place.last_lease, place.item, place.since, place.through, place.begin, place.end, place.opening,
        place.closing,
    )  # fmt: skip


PURPOSE = "page of a statement"
SEAL_BYTES = 32


async def _csv(call: Call, account: int, period: Period) -> Outcome:
    """Stream the statement page by page over the same entries, without those committed meanwhile."""
    whole = await _whole(call, account, period)
    if isinstance(whole, Refusal):
        return whole
    name = f"statement-{whole.name.replace('/', '-')}.csv"
    disposition = f'attachment; filename="{name.encode("ascii", "replace").decode().replace(chr(34), "")}"'
    body = statement_csv(statement_view(whole)).encode()
    return Answer(200, body, f"{CSV}; charset=utf-8", {"Content-Disposition": disposition})


async def _whole(call: Call, account: int, period: Period) -> Statement | Refusal:
    """A statement with all of its lines."""
    items: list[Item] = []
    lines: list[LeaseLine] = []
    place: PageEnd | None = None
    while True:
        found = await ops.statement(call.context.runtime, account, *period, limit=LINES_MAX, place=place)
        if isinstance(found, Refusal):
            return found
        items += found.items
        lines += found.lines
        if len(items) + len(lines) > CSV_LINES_MAX:
            return invalid(
                f"the statement has more than {CSV_LINES_MAX} lines",
                hint="Ask for a shorter period, or for JSON by pages.",
            )
        place = found.following
        if place is None:
            return msgspec.structs.replace(found, items=tuple(items), lines=tuple(lines))
