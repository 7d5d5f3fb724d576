"""How the ledger stands, as gauges for Prometheus: what is sealed, and what was found wrong."""

from __future__ import annotations

from collections import Counter

from bursar.api.http import metrics
from bursar.core.credit.hash_chain import Check
from bursar.ops.credit.seal import load_standing
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY

UNKNOWN = float("nan")


async def show_sealing(runtime: Runtime) -> None:
    """As the database tells it; a ledger that nobody has verified yet has no findings, and an age that is not known."""
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
