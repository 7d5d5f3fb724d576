"""Gauges that are read from the database when /metrics is scraped: approvals, budgets, reconciliation, the ledger."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from bursar.api.http import metrics
from bursar.core.credit.drift import first_hour
from bursar.core.credit.hash_chain import Check
from bursar.core.usage.budget import used_fraction
from bursar.core.values.money import MICROS, NANO
from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.credit.seal import load_standing
from bursar.ops.objects.webhook import list_webhooks
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import load_budgeted, load_budgets
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit import reconcile as reconcile_store
from bursar.store.db.database import AWAY
from bursar.store.objects import approval as approval_store
from bursar.store.usage import budget as budget_store
from bursar.store.usage import usage_levels as usage_store

UNKNOWN = float("nan")


async def show_budgets(runtime: Runtime) -> None:
    """Set the gauges of tenants with a budget; gauges of other tenants are removed."""
    try:
        async with runtime.database.reader() as db:
            tree = await runtime.trees.refresh(db)
            budgets, used = await load_budgeted(db), await load_budgets(db, tree, past=runtime.past_hours)
            sources = await budget_store.load_sources(db)
            metrics.USAGE_ROLLED_LAG.set(await usage_store.load_lag(db))
    except AWAY:
        return
    for gauge in (metrics.BUDGET_UTILIZATION, metrics.BUDGET_HOURS, metrics.BUDGET_HOURS_USED):
        gauge.clear()
    for one in sources:
        metrics.BUDGET_SOURCE_ANSWERS.labels(one.name).set(one.answers)
    for tenant, use in used.items():
        if (budget := budgets.get(tenant)) is None:
            continue
        fraction = used_fraction(use.gpu_hours, budget.gpu_hours_budget, use.node_hours, budget.node_hours_budget)
        metrics.BUDGET_UTILIZATION.labels(tenant, use.source).set(fraction)
        for what, hours, limit in (
            ("gpu", use.gpu_hours, budget.gpu_hours_budget),
            ("node", use.node_hours, budget.node_hours_budget),
        ):
            metrics.BUDGET_HOURS_USED.labels(tenant, what).set(hours)
            if limit is not None:
                metrics.BUDGET_HOURS.labels(tenant, what).set(limit)


async def show_approvals(runtime: Runtime) -> None:
    """Set the gauges of undecided requests; gates without any are removed."""
    try:
        async with runtime.database.reader() as db:
            gates = await approval_store.count_open(db)
    except AWAY:
        return
    for gauge in (metrics.APPROVALS_PENDING, metrics.APPROVALS_OLDEST, metrics.APPROVALS_UNANSWERED):
        gauge.clear()
    for one in gates:
        metrics.APPROVALS_PENDING.labels(one.gate).set(one.requests)
        metrics.APPROVALS_OLDEST.labels(one.gate).set(_age(one.oldest))
        metrics.APPROVALS_UNANSWERED.labels(one.gate).set(_age(one.oldest_unanswered) if one.oldest_unanswered else 0.0)


def _age(since: str) -> float:
    return max(0.0, (now() - datetime.fromisoformat(since)).total_seconds())


async def show_drift(runtime: Runtime) -> None:
    """Set the gauges of reconciliation, and of queued notifications."""
    try:
        policy = await load_credit_policy(runtime)
        async with runtime.database.reader() as db:
            totals = await reconcile_store.load_totals(db)
            first = first_hour(await ledger_store.load_now(db), policy.drift_account_hours)
            drifting = await reconcile_store.count_drifting(db, first, policy.drift_account_credits)
            late, _ = await reconcile_store.load_backlog(db, policy.reconcile_seconds * MICROS)
        webhooks = await list_webhooks(runtime)
    except AWAY:
        return
    metrics.UNRECONCILED.set(late)
    metrics.DRIFTING_ACCOUNTS.set(drifting)
    for outcome, (leases, amount) in totals.items():
        metrics.RECONCILED.labels(outcome).set(leases)
        metrics.RECONCILED_CREDITS.labels(outcome).set(amount / NANO)
    metrics.NOTICES_WAITING.clear()
    for one in webhooks:
        if one.direction == "out":
            metrics.NOTICES_WAITING.labels(one.name).set(one.waiting)


async def show_sealing(runtime: Runtime) -> None:
    """Set the gauges of sealing from the database; a ledger never verified has no findings, and an unknown age."""
    try:
        standing = await load_standing(runtime)
    except AWAY:
        metrics.LEDGER_ENTRIES.set(UNKNOWN)
        metrics.LEDGER_UNSEALED.set(UNKNOWN)
        metrics.LEDGER_VERIFIED_AGE.set(UNKNOWN)
        metrics.LEDGER_FINDINGS.clear()
        return
    metrics.LEDGER_ENTRIES.set(standing.last)
    metrics.LEDGER_UNSEALED.set(standing.unsealed)
    checked_at = standing.checked_at
    metrics.LEDGER_VERIFIED_AGE.set(max(0.0, (now() - checked_at).total_seconds()) if checked_at else UNKNOWN)
    found = Counter(one.check for one in standing.findings)
    for check in Check:
        metrics.LEDGER_FINDINGS.labels(check).set(found[check])
