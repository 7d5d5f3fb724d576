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
PAGING = (Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
          Param("continue", "The continue token of the previous page."))  # fmt: skip


def credit_routes(root: str) -> Iterator[Route]:
    yield from _moving(root)
    yield from _accounts(root)
    yield from _leases(root)
    yield from _looking(root)


def _moving(root: str) -> Iterator[Route]:
    """Routes that move credit."""
    for path, handler, summary, body in (
        ("topups", account.top_up, "Add credit to an account.", wire.NewTopup),
        ("refunds", account.refund, "Refund a charge.", wire.NewRefund),
        ("adjustments", account.adjust, "Adjust a balance manually.", wire.NewAdjustment),
    ):
        yield Route(
            "POST", f"{root}/{path}", handler, summary, "create", path, params=(ACCOUNT,), body=body,
            answer=wire.Moved, status=201, refusals=MONEY,
        )  # fmt: skip
    yield Route(
        "GET", f"{root}/prices", price.list_prices, "List the prices per resource-second.", "list", "prices",
        params=(Param("resource", "Only prices of this resource."), Param("at", "Prices at this time, not now."),
                Param("history", "true: all versions, including future ones.", "boolean")), answer=wire.PriceList,
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/prices", price.set_price, "Set a price, effective now or from a later time.", "create",
        "prices", body=wire.NewPrice, answer=wire.PriceView, status=201, refusals=(409, 422),
    )  # fmt: skip
    yield Route(
        "DELETE", f"{root}/prices", price.drop_price, "Withdraw a price that is not yet in effect.", "delete", "prices",
        params=(Param("resource", "The resource of the price."),
                Param("class", "The class of the price; by default, the price without a class."),
                Param("effective_from", "The time at which the price takes effect.")),
        answer=wire.PriceView, refusals=(404, 409, 422),
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
        "PATCH", f"{root}/accounts", account.change_account, "Change the status or the bounds of an account.", "patch",
        "accounts", params=(ACCOUNT,), body=wire.AccountChange, answer=wire.AccountView, refusals=MONEY,
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/limits", account.get_limits, "Read the spending limits of an account.", "get", "limits",
        params=(ACCOUNT,), answer=wire.Limits, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "PUT", f"{root}/limits", account.put_limits, "Replace the limits of an account.", "update", "limits",
        params=(ACCOUNT,), body=wire.NewLimits, answer=wire.Limits, refusals=MONEY,
    )  # fmt: skip
    for owner in ("{tenant}", "{tenant}/{user}"):
        yield Route(
            "GET", f"{root}/accounts/{owner}", account.get_account, "Read an account.", "get", "accounts",
            answer=wire.AccountView,
        )  # fmt: skip
        yield Route(
            "PATCH", f"{root}/accounts/{owner}", account.change_account,
            "Change the status or the bounds of an account.", "patch", "accounts", body=wire.AccountChange,
            answer=wire.AccountView, refusals=MONEY,
        )  # fmt: skip
        yield Route(
            "GET", f"{root}/limits/{owner}", account.get_limits, "Read the spending limits of an account.", "get",
            "limits", answer=wire.Limits,
        )  # fmt: skip
        yield Route(
            "PUT", f"{root}/limits/{owner}", account.put_limits, "Replace the limits of an account.", "update",
            "limits", body=wire.NewLimits, answer=wire.Limits, refusals=MONEY,
        )  # fmt: skip


def _leases(root: str) -> Iterator[Route]:
    item = f"{root}/leases/{{name}}"
    yield Route(
        "GET", f"{root}/leases", lease.list_leases, "List leases.", "list", "leases",
        params=(ACCOUNT, Param("state", "open, or ended: ended leases of one account, newest first."),
                Param("job_id", "Only leases of this job."), *PAGING), answer=wire.LeaseList, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/leases", lease.open_lease, "Open a lease: pay for a job's first window.", "create", "leases",
        params=(ACCOUNT,), body=wire.NewLease, answer=wire.OpenedLease, status=201, refusals=(*MONEY, 429),
    )  # fmt: skip
    yield Route("GET", item, lease.get_lease, "Read a lease.", "get", "leases", answer=wire.LeaseView)
    yield Route(
        "POST", f"{item}/extend", lease.extend_lease, "Extend a lease: pay for more time.", "extend", "leases",
        body=wire.ExtendLease, answer=wire.ExtendedLease, refusals=(*MONEY, 429),
    )  # fmt: skip
    yield Route(
        "POST", f"{item}/close", lease.close_lease, "Close and settle a lease.", "close", "leases",
        body=wire.CloseLease, answer=wire.ClosedLease, refusals=MONEY,
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/usage", usage_events.report, "Report usage events of jobs: one event, or several as `events`.",
        "create", "usage", body=NewUsage, answer=UsageTaken, status=202, refusals=(404, 422),
    )  # fmt: skip


def _looking(root: str) -> Iterator[Route]:
    yield Route(
        "GET", f"{root}/balance", statement.get_balance, "Read the balance of an account.", "get", "balance",
        params=(ACCOUNT, Param("at", "The posted balance before this time, instead of the current balance.")),
        answer=wire.Balance, refusals=(404, 410),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/forecast", statement.get_forecast, "Forecast when an account is used up at the current rate.",
        "get", "forecast", params=(ACCOUNT,), answer=statements.ForecastView, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/statements", statement.get_statement,
        "Read an account statement: opening balance, entries, closing balance.", "get", "statements",
        params=(ACCOUNT, Param("tenant", "Sum up all accounts of this tenant instead."), *statement.PERIOD,
                Param("format", "json or csv; or send Accept: text/csv."), *statement.PAGING),
        answer=(statements.StatementView, statements.TenantStatementView), answer_media=(JSON, statement.CSV),
        refusals=(404, 410),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/ledger", ledger.show, "Read how far the ledger is sealed, and the system accounts.", "get",
        "ledger", answer=ledger.LedgerStanding,
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/ledger/verify", ledger.verify, "Verify the ledger: its hash chain, sums and holds.", "get",
        "ledger", "verify", params=ledger.PARAMS, answer=ledger.LedgerVerdict, refusals=(503,),
    )  # fmt: skip
