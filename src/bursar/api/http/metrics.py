"""What the door measures, and what /metrics tells."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from bursar.api.http.route import Route
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.metrics import QUOTA_REJECTIONS

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

REQUESTS = Counter("bursar_requests_total", "Requests by route, method and status.", ["route", "method", "status"])
SECONDS = Histogram(
    "bursar_request_seconds", "Time to answer, by route and method.", ["route", "method"], buckets=_SECONDS
)
CONNECTIONS = Gauge("bursar_connections", "HTTP connections open now.")
CONNECTIONS_REFUSED = Counter(
    "bursar_connections_refused_total",
    "HTTP connections that were refused or ended, by the bound they ran into.",
    ["bound"],
)
SPOOLED = Gauge("bursar_spooled_bytes", "Long answers that wait in files to be read.")
WATCHERS = Gauge("bursar_watchers", "Watches open now.")
WATCHERS_LET_GO = Counter("bursar_watchers_let_go_total", "Watchers disconnected because they did not keep up.")
USAGE = Gauge("bursar_usage", "What each tenant uses, by dimension and state.", ["tenant", "dimension", "state"])
LIMIT = Gauge("bursar_limit", "What each tenant may use, by dimension.", ["tenant", "dimension"])
LANE_DEPTH = Gauge("bursar_lane_depth", "Commands waiting.", ["lane"])
FEED_REVISION = Gauge("bursar_revision", "The newest revision.")
FEED_BEHIND = Gauge("bursar_watch_lag_revisions", "How far this process's feed is behind the newest revision.")

# As the leader tells them when /metrics is read.
WAITING = Gauge("bursar_waiting_allocations", "Allocations that wait, by the reason why.", ["reason"])
QUEUE_DEPTH = Gauge("bursar_queue_depth", "Allocations that wait, by queue.", ["queue"])
QUEUE_AGE = Gauge("bursar_queue_oldest_seconds", "How long the oldest of each queue has waited.", ["queue"])
TIME_TO_SCHEDULE = Gauge(
    "bursar_time_to_schedule_seconds",
    "Time from being submitted to being placed, over the last hour, by queue and quantile.",
    ["queue", "quantile"],
)
SCHEDULED_PER_SECOND = Gauge("bursar_scheduled_per_second", "Allocations placed in a second, over the last minute.")
PREEMPTIONS = Gauge("bursar_preemptions_last_hour", "Allocations that were preempted in the last hour.")

# As the database tells them when /metrics is read.
NODES = Gauge("bursar_nodes", "Nodes, by phase.", ["phase"])
NODES_CLAIMED = Gauge(
    "bursar_nodes_claimed", "Nodes that are claimed for sensitive work, or are not wiped since, by state.", ["state"]
)
NODES_CLAIMABLE = Gauge("bursar_nodes_claimed_max", "How many nodes may be claimed at once: the sensitive pool.")
NODES_SILENT = Gauge(
    "bursar_nodes_silent_fraction", "What part of the nodes that were ever heard, and are not lost, is silent."
)
NODES_ALARM = Gauge(
    "bursar_nodes_alarm", "1 while so many nodes are silent at once that the work of none of them is given up."
)

BUDGET_UTILIZATION = Gauge(
    "bursar_budget_utilization",
    "What part of its budget of hours each tenant has used, of two the worse; and whose figures these are.",
    ["tenant", "source"],
)
BUDGET_HOURS_USED = Gauge(
    "bursar_budget_hours_used",
    "Hours that each tenant with a budget used in the budget's window, with those below it.",
    ["tenant", "of"],
)
BUDGET_HOURS = Gauge("bursar_budget_hours", "The budget of hours that each tenant has.", ["tenant", "of"])
BUDGET_SOURCE_ANSWERS = Gauge(
    "bursar_budget_source_answers",
    "Whether who keeps budgets elsewhere answers: 1, or 0 while hours count here.",
    ["source"],
)
USAGE_ROLLED_LAG = Gauge(
    "bursar_usage_rolled_lag_seconds",
    "For how long what was used has not been entered in hours and days. Reports are right all the same, and slower.",
)

RECONCILED = Gauge(
    "bursar_reconciled_leases", "Leases reconciled so far, by outcome; and events that never came.", ["outcome"]
)
RECONCILED_CREDITS = Gauge(
    "bursar_reconciled_credits", "Credits by which leases had cost other than was posted, by outcome.", ["outcome"]
)
UNRECONCILED = Gauge("bursar_unreconciled_leases", "Leases that ended long enough ago and wait to be reconciled.")
DRIFTING_ACCOUNTS = Gauge(
    "bursar_drifting_accounts",
    "Accounts whose adjustments by reconciliation add up to more than spec.credits.driftAccountCredits in the period.",
)
NOTICES_WAITING = Gauge("bursar_notices_waiting", "Notices that wait to be sent, by webhook.", ["webhook"])

LEDGER_ENTRIES = Gauge("bursar_ledger_entries", "Entries of the ledger.")
LEDGER_UNSEALED = Gauge("bursar_ledger_unsealed_entries", "Entries that are in no sealed block yet.")
LEDGER_FINDINGS = Gauge("bursar_ledger_findings", "What is wrong with the ledger, by what was verified.", ["check"])
LEDGER_VERIFIED_AGE = Gauge("bursar_ledger_verified_age_seconds", "How long ago the ledger was last verified.")

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
