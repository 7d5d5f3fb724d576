"""Prometheus metrics of the verbs. Names and labels are part of the interface: docs/metrics.md lists them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

LANE_BATCH = Histogram("bursar_lane_batch_size", "Commands per batch.", ["lane"], buckets=_SIZES)
LANE_WAIT = Histogram(
    "bursar_lane_wait_seconds",
    "Queueing time of the oldest command of a batch.",
    ["lane"],
    buckets=_SECONDS,
)
LANE_SECONDS = Histogram(
    "bursar_lane_batch_seconds", "Time from the start of a batch to its answers.", ["lane"], buckets=_SECONDS
)
LANE_SHED = Counter("bursar_lane_shed_total", "Commands refused with 503 because the lane was full.", ["lane"])
COMMIT_SECONDS = Histogram("bursar_commit_seconds", "Duration of COMMIT.", ["lane"], buckets=_SECONDS)
TRANSACTION_RETRIES = Counter("bursar_transaction_retries_total", "Retried transactions, by cause.", ["lane", "cause"])
QUOTA_REJECTIONS = Counter(
    "bursar_quota_rejections_total", "Requests refused for quota, by endpoint and dimension.", ["endpoint", "dimension"]
)
FEED_LAG = Histogram(
    "bursar_feed_lag_seconds", "Time from a commit to its delivery to this process's watchers.", buckets=_SECONDS
)
USAGE_EVENTS = Counter("bursar_usage_events_total", "Received usage events, by outcome.", ["outcome"])
NODE_RISES = Counter(
    "bursar_node_capacity_rises_total",
    "Heartbeats in which a node reported more capacity than before, or than its spec.",
)
AGENT_STREAMS = Gauge("bursar_agent_streams", "Open gRPC streams of node agents at this process.")
AGENT_DIRECTIVES = Counter(
    "bursar_agent_directives_total", "Directives pushed to node agents between their heartbeats."
)
APPROVAL_DECISIONS = Counter(
    "bursar_approval_decisions_total",
    "Decisions on requests, by gate and outcome: approved, denied, noted, or no_headroom.",
    ["gate", "outcome"],
)
APPROVAL_SECONDS = Histogram(
    "bursar_approval_decision_seconds",
    "Time from the arrival of a request at a gate to its approval or denial there, by gate.",
    ["gate"],
    buckets=(1, 2, 5, 10, 30, 60, 300, 1800, 3600, 14400, 43200, 86400, 259200, 604800, 2592000),
)
LEDGER_BLOCKS = Counter("bursar_ledger_blocks_total", "Ledger blocks that this process sealed.")
