"""The routes of credit: part of the one table in routes.py."""

from __future__ import annotations

from collections.abc import Iterator

from bursar.api.credit import account, lease, ledger, price, statement, usage_events
from bursar.api.credit.credit import ACCOUNT
from bursar.api.http.route import JSON, Param, Route
from bursar.wire.reports import credit as wire
from bursar.wire.reports import statement as statements
from bursar.wire.reports.usage_events import NewUsage, UsageTaken

MONEY = (403, 404, 409, 422)
PAGING = (Param("limit", "At most so many; the rest follows with continue.", "integer"),
          Param("continue", "From the page before."))  # fmt: skip


def credit_routes(root: str) -> Iterator[Route]:
    yield from _moving(root)
    yield from _accounts(root)
    yield from _leases(root)
    yield from _looking(root)


def _moving(root: str) -> Iterator[Route]:
    """What moves credit."""
    for path, handler, summary, body in (
        ("topups", account.top_up, "Put credit into an account.", wire.NewTopup),
        ("refunds", account.refund, "Give back what was spent.", wire.NewRefund),
        ("adjustments", account.adjust, "Put a balance right by hand.", wire.NewAdjustment),
    ):
        yield Route(
            "POST", f"{root}/{path}", handler, summary, "create", path, params=(ACCOUNT,), body=body,
            answer=wire.Moved, status=201, refusals=MONEY,
        )  # fmt: skip
    yield Route(
        "GET", f"{root}/prices", price.list_prices, "What a second of each resource costs.", "list", "prices",
        params=(Param("resource", "Of this one alone."), Param("at", "The prices at a time, and not now."),
                Param("history", "true: all versions, also those to come.", "boolean")), answer=wire.PriceList,
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/prices", price.set_price, "Set a price, from now or from a later time on.", "create", "prices",
        body=wire.NewPrice, answer=wire.PriceView, status=201, refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "DELETE", f"{root}/prices", price.drop_price, "Take back a price that has not begun.", "delete", "prices",
        params=(Param("resource", "Whose price."), Param("class", "Of which class; else that without one."),
                Param("effective_from", "When it begins.")), answer=wire.PriceView, refusals=(404, 409, 422),
    )  # fmt: skip


def _accounts(root: str) -> Iterator[Route]:
    yield Route(
        "GET", f"{root}/accounts", account.list_accounts, "List accounts.", "list", "accounts", params=PAGING,
        answer=wire.AccountList,
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/accounts", account.open_account, "Open an account.", "create", "accounts",
        body=wire.NewAccount, answer=wire.AccountView, status=201, refusals=MONEY,
    )  # fmt: skip
    yield Route(
        "PATCH", f"{root}/accounts", account.change_account, "Change an account's standing.", "patch", "accounts",
        params=(ACCOUNT,), body=wire.AccountChange, answer=wire.AccountView, refusals=MONEY,
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/limits", account.get_limits, "What an account may spend.", "get", "limits", params=(ACCOUNT,),
        answer=wire.Limits, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "PUT", f"{root}/limits", account.put_limits, "Replace the limits of an account.", "update", "limits",
        params=(ACCOUNT,), body=wire.NewLimits, answer=wire.Limits, refusals=MONEY,
    )  # fmt: skip
    for owner in ("{tenant}", "{tenant}/{user}"):
        yield Route(
            "GET", f"{root}/accounts/{owner}", account.get_account, "How an account stands.", "get", "accounts",
            answer=wire.AccountView,
        )  # fmt: skip
        yield Route(
            "PATCH", f"{root}/accounts/{owner}", account.change_account, "Change an account's standing.", "patch",
            "accounts", body=wire.AccountChange, answer=wire.AccountView, refusals=MONEY,
        )  # fmt: skip
        yield Route(
            "GET", f"{root}/limits/{owner}", account.get_limits, "What an account may spend.", "get", "limits",
            answer=wire.Limits,
        )  # fmt: skip
        yield Route(
            "PUT", f"{root}/limits/{owner}", account.put_limits, "Replace the limits of an account.", "update",
            "limits", body=wire.NewLimits, answer=wire.Limits, refusals=MONEY,
        )  # fmt: skip


def _leases(root: str) -> Iterator[Route]:
    item = f"{root}/leases/{{name}}"
    yield Route(
        "GET", f"{root}/leases", lease.list_leases, "List leases.", "list", "leases",
        params=(ACCOUNT, Param("state", "open, or ended: those of one account, the last one first."),
                Param("job_id", "Of this job alone."), *PAGING), answer=wire.LeaseList, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/leases", lease.open_lease, "Pay for a job's first window.", "create", "leases",
        params=(ACCOUNT,), body=wire.NewLease, answer=wire.OpenedLease, status=201, refusals=(*MONEY, 429),
    )  # fmt: skip
    yield Route("GET", item, lease.get_lease, "How a lease stands.", "get", "leases", answer=wire.LeaseView)
    yield Route(
        "POST", f"{item}/extend", lease.extend_lease, "Pay for more time.", "extend", "leases", body=wire.ExtendLease,
        answer=wire.ExtendedLease, refusals=(*MONEY, 429),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/close", lease.close_lease, "Settle a lease.", "close", "leases", body=wire.CloseLease,
        answer=wire.ClosedLease, refusals=MONEY,
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/usage", usage_events.report, "What was measured of jobs: one event, or several as `events`.",
        "create", "usage", body=NewUsage, answer=UsageTaken, status=202, refusals=(404, 422),
    )  # fmt: skip


def _looking(root: str) -> Iterator[Route]:
    yield Route(
        "GET", f"{root}/balance", statement.get_balance, "What an account has.", "get", "balance",
        params=(ACCOUNT, Param("at", "What it had before a time: its posted balance alone.")), answer=wire.Balance,
        refusals=(404, 410),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/forecast", statement.get_forecast, "How long an account lasts at the present rate.", "get",
        "forecast", params=(ACCOUNT,), answer=statements.ForecastView, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/statements", statement.get_statement, "What an account had, what came and went, what it has.",
        "get", "statements",
        params=(ACCOUNT, Param("tenant", "The sums of all accounts of this tenant instead."), *statement.PERIOD,
                Param("format", "json or csv; or ask for text/csv by Accept."), *statement.PAGING),
        answer=(statements.StatementView, statements.TenantStatementView), answer_media=(JSON, statement.CSV),
        refusals=(404, 410),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/ledger", ledger.show, "How far the ledger is sealed, and the system's own accounts.", "get",
        "ledger", answer=ledger.LedgerStanding,
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/ledger/verify", ledger.verify, "Whether the ledger is whole: its chain, sums and holds.", "get",
        "ledger", "verify", params=ledger.PARAMS, answer=ledger.Verdict, refusals=(503,),
    )  # fmt: skip
