"""What was used, written down as the nodes' reports would have: at times that tests choose."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from itertools import count

from bursar.core.credit.price import Price
from bursar.core.usage.usage_levels import UsageBegan, UsageEnded
from bursar.core.values.money import MICROS, nanocredits
from bursar.store.credit import price as price_store
from bursar.store.db.database import Database
from bursar.store.usage import usage_levels as usage_store

GPU = "nvidia.com/gpu"
_numbers = count(1)


async def spent(
    database: Database,
    tenant: str,
    user: str,
    amounts: Mapping[str, int],
    *,
    begin: datetime,
    hours: float | None = None,
    klass: str = "",
    node: str = "n1",
) -> None:
    """That so much of a node was used since then, for so long or until now."""
    uid = f"alloc-spent-{next(_numbers)}"
    began = UsageBegan(uid, node, 1, tenant, user, tenant, uid, dict(amounts), klass, _seconds(begin))
    ended = [] if hours is None else [UsageEnded(uid, node, began.at + int(hours * 3600), "Succeeded")]
    async with database.reader() as db, db.transaction():
        await usage_store.save(db, [began], [])
        if ended:
            await usage_store.save(db, [], ended)


async def aged(database: Database, tenant: str, days: float) -> None:
    """The tenant, as if it had been created so long ago."""
    at = f"{(datetime.now(UTC) - timedelta(days=days)).isoformat(timespec='seconds')[:19]}Z"
    async with database.reader() as db:
        await db.execute(
            "UPDATE object SET doc = regexp_replace(doc::text, '(\"creationTimestamp\":\")[^\"]*', '\\1' || $2)::json"
            " WHERE kind = 'Tenant' AND name = $1",
            tenant,
            at,
        )


async def priced(database: Database, per_second: Mapping[str, str], klass: str = "") -> None:
    """Prices that have always been there."""
    prices = [(Price(name, klass, nanocredits(value), 1 * MICROS), "test") for name, value in per_second.items()]
    async with database.reader() as db:
        await price_store.add(db, prices)


def ago(**time: float) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) - timedelta(**time)


def _seconds(at: datetime) -> int:
    return int(at.timestamp())
