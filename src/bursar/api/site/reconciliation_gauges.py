"""What /metrics tells of reconciliation and of notices that wait, as it stands in the database."""

from __future__ import annotations

from bursar.api.http import metrics
from bursar.core.credit.drift import first_hour
from bursar.core.values.money import MICROS, NANO
from bursar.ops.credit.billing import load_credit_policy
from bursar.ops.objects.webhook import list_webhooks
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit import reconcile as store
from bursar.store.db.database import AWAY


async def show_drift(runtime: Runtime) -> None:
    try:
        policy = await load_credit_policy(runtime)
        async with runtime.database.reader() as db:
            totals = await store.load_totals(db)
            first = first_hour(await ledger_store.load_now(db), policy.drift_account_hours)
            drifting = await store.count_drifting(db, first, policy.drift_account_credits)
            late, _ = await store.load_backlog(db, policy.reconcile_seconds * MICROS)
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
