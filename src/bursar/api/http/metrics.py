"""Metrics of the HTTP server."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from bursar.api.http.route import Route
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.metrics import QUOTA_REJECTIONS

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

REQUESTS = Counter("bursar_requests_total", "Requests by route, method and status.", ["route", "method", "status"])
SECONDS = Histogram(
    "bursar_request_seconds", "Request duration, by route and method.", ["route", "method"], buckets=_SECONDS
)
CONNECTIONS = Gauge("bursar_connections", "Open HTTP connections.")
CONNECTIONS_REFUSED = Counter(
    "bursar_connections_refused_total",
    "HTTP connections refused or closed, by the limit that was exceeded.",
    ["bound"],
)
SPOOLED = Gauge("bursar_spooled_bytes", "Bytes of long responses spooled to disk for slow clients.")
WATCHERS = Gauge("bursar_watchers", "Open watches.")
WATCHERS_LET_GO = Counter("bursar_watchers_let_go_total", "Watches closed because the client was too slow.")
USAGE = Gauge(
    "bursar_usage", "Resources charged to each tenant, by dimension and state.", ["tenant", "dimension", "state"]
)
LIMIT = Gauge("bursar_limit", "Hard quota limit of each tenant, by dimension.", ["tenant", "dimension"])
LANE_DEPTH = Gauge("bursar_lane_depth", "Queued commands.", ["lane"])
FEED_REVISION = Gauge("bursar_revision", "Newest revision of the change feed.")
FEED_BEHIND = Gauge("bursar_watch_lag_revisions", "Revisions by which this process's feed lags behind the newest one.")

# Read from the leader when /metrics is scraped.
WAITING = Gauge("bursar_waiting_allocations", "Pending allocations, by reason.", ["reason"])
QUEUE_DEPTH = Gauge("bursar_queue_depth", "Pending allocations, by queue.", ["queue"])
QUEUE_AGE = Gauge("bursar_queue_oldest_seconds", "Age of the oldest pending allocation, by queue.", ["queue"])
TIME_TO_SCHEDULE = Gauge(
    "bursar_time_to_schedule_seconds",
    "Time from submission to placement in the last hour, by queue and quantile.",
    ["queue", "quantile"],
)
SCHEDULED_PER_SECOND = Gauge(
    "bursar_scheduled_per_second", "Allocations placed per second, averaged over the last minute."
)
PREEMPTIONS = Gauge("bursar_preemptions_last_hour", "Allocations preempted in the last hour.")

# Read from the database when /metrics is scraped.
NODES = Gauge("bursar_nodes", "Nodes, by phase.", ["phase"])
NODES_CLAIMED = Gauge(
    "bursar_nodes_claimed", "Nodes claimed for sensitive work or not yet wiped after it, by state.", ["state"]
)
NODES_CLAIMABLE = Gauge("bursar_nodes_claimed_max", "Size of the sensitive pool: nodes that may be claimed at once.")
NODES_SILENT = Gauge(
    "bursar_nodes_silent_fraction",
    "Fraction of nodes without recent heartbeats, of all that ever sent one and are not lost.",
)
NODES_ALARM = Gauge(
    "bursar_nodes_alarm", "1 while too many nodes are silent at once, so that no node's work is declared lost; else 0."
)

BUDGET_UTILIZATION = Gauge(
    "bursar_budget_utilization",
    "Used fraction of each tenant's hours budget, the larger of GPU-hours and node-hours, by source of the figures.",
    ["tenant", "source"],
)
BUDGET_HOURS_USED = Gauge(
    "bursar_budget_hours_used",
    "Hours used in the budget's window by each tenant with a budget, including its child tenants.",
    ["tenant", "of"],
)
BUDGET_HOURS = Gauge("bursar_budget_hours", "Hours budget of each tenant.", ["tenant", "of"])
BUDGET_SOURCE_ANSWERS = Gauge(
    "bursar_budget_source_answers",
    "1 if the external budget source responds; 0 while local figures are used instead.",
    ["source"],
)
USAGE_ROLLED_LAG = Gauge(
    "bursar_usage_rolled_lag_seconds",
    "Age of the oldest usage that is not rolled up into hours and days. Reports stay correct, but are slower.",
)

APPROVALS_PENDING = Gauge("bursar_approval_requests", "Undecided requests, by the gate that is decided next.", ["gate"])
APPROVALS_OLDEST = Gauge(
    "bursar_approval_oldest_seconds", "Longest time that an undecided request has been at its gate, by gate.", ["gate"]
)
APPROVALS_UNANSWERED = Gauge(
    "bursar_approval_unanswered_seconds",
    "Longest time that a request has been at its gate with neither a decision nor a reason noted there, by gate.",
    ["gate"],
)

RECONCILED = Gauge(
    "bursar_reconciled_leases", "Reconciled leases, by outcome, including leases without usage events.", ["outcome"]
)
RECONCILED_CREDITS = Gauge("bursar_reconciled_credits", "Credits adjusted by reconciliation, by outcome.", ["outcome"])
UNRECONCILED = Gauge("bursar_unreconciled_leases", "Ended leases that are due for reconciliation.")
DRIFTING_ACCOUNTS = Gauge(
    "bursar_drifting_accounts",
    "Accounts whose adjustments by reconciliation exceed spec.credits.driftAccountCredits in the period.",
)
NOTICES_WAITING = Gauge("bursar_notices_waiting", "Notifications queued for delivery, by webhook.", ["webhook"])

LEDGER_ENTRIES = Gauge("bursar_ledger_entries", "Ledger entries.")
LEDGER_UNSEALED = Gauge("bursar_ledger_unsealed_entries", "Ledger entries that are not yet in a sealed block.")
LEDGER_FINDINGS = Gauge("bursar_ledger_findings", "Inconsistencies found in the ledger, by check.", ["check"])
LEDGER_VERIFIED_AGE = Gauge("bursar_ledger_verified_age_seconds", "Seconds since the last verification of the ledger.")

# Children are kept: looking a label up costs more than counting.
_children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}


def observe(route: Route | None, method: str, status: int, seconds: float) -> None:
    path = route.path if route else "(none)"
    children = _children.get((path, method, status))
    if children is None:
        children = (REQUESTS.labels(path, method, status), SECONDS.labels(path, method))
        _children[path, method, status] = children
    children[0].inc()
    children[1].observe(seconds)


def count_refusal(refusal: Refusal, method: str, resource: str) -> None:
    if refusal.code is Code.QUOTA_EXCEEDED:
        for cause in refusal.causes:
            QUOTA_REJECTIONS.labels(f"{method} {resource}", cause.dimension).inc()
