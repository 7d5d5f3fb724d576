"""What /metrics tells of tenants' budgets of hours, and of entering hours, as the database tells it."""

from __future__ import annotations

from bursar.api.http import metrics
from bursar.core.usage.budget import used_fraction
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import load_budgeted, load_budgets
from bursar.store.db.database import AWAY
from bursar.store.usage import budget as budget_store
from bursar.store.usage import usage_levels as usage_store


async def show_budgets(runtime: Runtime) -> None:
    """Of those that have one. What is no longer so is not told."""
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
