"""What /metrics tells of the ledger."""

from prometheus_client import generate_latest

from bursar.api.site.gauges import show_sealing
from bursar.ops.credit.ledger_verify import review
from bursar.ops.credit.seal import seal
from bursar.ops.runtime.runtime import Runtime
from support.credit.sealings import history, unguarded


async def test_the_ledgers_standing_is_among_the_metrics(runtime: Runtime) -> None:
    await history(runtime)
    await show_sealing(runtime)
    scraped = generate_latest().decode()
    assert "bursar_ledger_entries 41.0" in scraped
    assert "bursar_ledger_unsealed_entries 3.0" in scraped
    assert "bursar_ledger_verified_age_seconds NaN" in scraped
    await seal(runtime)
    async with unguarded(runtime) as db:
        await db.execute("UPDATE account SET held = held + 1 WHERE id = 100")
    await review(runtime)
    await show_sealing(runtime)
    scraped = generate_latest().decode()
    assert "bursar_ledger_unsealed_entries 0.0" in scraped
    assert 'bursar_ledger_findings{check="held"} 1.0' in scraped
    assert 'bursar_ledger_findings{check="entry"} 0.0' in scraped
    assert "bursar_ledger_verified_age_seconds NaN" not in scraped
