"""Usage hours: starts and ends are recorded with the work, rolled up into buckets later, and summed on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

import msgspec
from msgspec import Struct

from bursar.core.credit.price import PriceList
from bursar.core.usage.usage_levels import (
    DAY,
    EVERYBODY,
    HOUR,
    Bucket,
    Level,
    LevelStep,
    Meter,
    Tariff,
    UsageBegan,
    UsageEnded,
    Used,
    fold,
)
from bursar.core.usage.usage_levels import tariff_of as _tariff_of
from bursar.store.credit import price as price_store
from bursar.store.db.columns import documents, numbers, texts
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("usage/usage_levels")

MeteredHours = tuple[str, str]  # (resource, class)
Grain = Literal["hour", "day"]
FORGOTTEN_AT_ONCE = 50_000

_encode = msgspec.json.Encoder().encode


# Recording starts and ends.


async def save(
    db: Connection,
    begun: Sequence[UsageBegan],
    ended: Sequence[UsageEnded],
    spent: Sequence[tuple[UsageBegan, UsageEnded]] = (),
) -> None:
    """Record ends, then starts. `spent` are runs that both started and ended, in this order."""
    if ended:
        await _end(db, ended)
    for some in _apart(spent):
        await _begin(db, [began for began, _ in some])
        await _end(db, [end for _, end in some])
    if begun:
        await _begin(db, begun)


def _apart(spent: Iterable[tuple[UsageBegan, UsageEnded]]) -> list[list[tuple[UsageBegan, UsageEnded]]]:
    """Split a batch in which work ran twice on a node, so that each run is recorded in order."""
    rounds: list[list[tuple[UsageBegan, UsageEnded]]] = []
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for began, ended in spent:
        turn = seen[began.node, began.uid]
        seen[began.node, began.uid] += 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append((began, ended))
    return rounds


async def _begin(db: Connection, begun: Sequence[UsageBegan]) -> None:
    await db.execute(
        SQL.begin,
        texts([one.uid for one in begun]),
        texts([one.node for one in begun]),
        numbers([one.epoch for one in begun]),
        texts([one.tenant for one in begun]),
        texts([one.user for one in begun]),
        texts([one.namespace for one in begun]),
        texts([one.name for one in begun]),
        documents([_encode(one.amounts) for one in begun]),
        texts([one.klass for one in begun]),
        numbers([one.at for one in begun]),
        numbers([one.lease for one in begun]),
    )


async def _end(db: Connection, ended: Sequence[UsageEnded]) -> None:
    await db.execute(
        SQL.end,
        texts([one.uid for one in ended]),
        texts([one.node for one in ended]),
        numbers([one.at for one in ended]),
        texts([one.phase for one in ended]),
        texts([one.reason for one in ended]),
    )


# Rolling up into buckets.


async def lock_rolled(db: Connection) -> tuple[datetime, datetime] | None:
    """Lock the roll-up; return the time through which it is complete and the database's time. None if another process
    rolls up."""
    row = await db.fetchrow(SQL.lock_rolled)
    return None if row is None else (row["at"], row["now"])


async def save_rolled(db: Connection, at: datetime) -> None:
    await db.execute(SQL.set_rolled, at)


async def change_past(db: Connection) -> None:
    """Record that a past day was changed."""
    await db.execute(SQL.change_past)


async def load_past(db: Connection, before: datetime) -> tuple[int, bool]:
    """Return how often past days were changed, and whether steps before `before` still wait to be rolled up."""
    row = await db.fetchrow(SQL.past, before)
    return row["past"], row["is_open"]


async def load_lag(db: Connection) -> float:
    """Return by how many seconds the roll-up lags. A late step counts from its own time on."""
    return float(await db.fetchval(SQL.lag))


async def take_steps(db: Connection, until: datetime, limit: int) -> tuple[dict[Meter, list[LevelStep]], int]:
    """Remove steps that are in no bucket yet and return them with their number; the caller must enter them."""
    found: dict[Meter, list[LevelStep]] = defaultdict(list)
    count = 0
    for row in await db.fetch(SQL.take_steps, until, limit):
        meter = Meter(row["tenant"], row["username"], row["resource"], row["class"])
        found[meter].append(LevelStep(meter, row["at"], row["delta"]))
        count += row["count"]
    return found, count


async def load_levels(db: Connection, meters: Iterable[Meter]) -> dict[Meter, Level]:
    ordered = sorted(meters)
    return _levels(await db.fetch(SQL.levels, *_meter_columns(ordered))) if ordered else {}


async def load_levels_behind(db: Connection, until: datetime, limit: int) -> dict[Meter, Level]:
    """Load open usage that is not rolled up until then."""
    return _levels(await db.fetch(SQL.levels_behind, until, limit))


def _levels(rows: Iterable[Any]) -> dict[Meter, Level]:
    return {
        Meter(row["tenant"], row["username"], row["resource"], row["class"]): Level(row["amount"], row["since"])
        for row in rows
    }


def _meter_columns(meters: Sequence[Meter]) -> tuple[str, str, str, str]:
    return (
        texts([one.tenant for one in meters]),
        texts([one.user for one in meters]),
        texts([one.resource for one in meters]),
        texts([one.klass for one in meters]),
    )


async def save_levels(db: Connection, levels: Mapping[Meter, Level]) -> None:
    ordered = sorted(levels)
    await db.execute(
        SQL.put_levels,
        *_meter_columns(ordered),
        numbers([levels[one].amount for one in ordered]),
        numbers([levels[one].since for one in ordered]),
    )


Entered = Mapping[tuple[Meter, int], Bucket]  # by meter and the beginning of the bucket


async def add_hours(db: Connection, buckets: Entered) -> None:
    """Add to hourly buckets; only tenants have them."""
    ordered = sorted(buckets)
    tenants, _, resources, classes = _meter_columns([meter for meter, _ in ordered])
    await db.execute(SQL.add_hours, tenants, resources, classes, *_bucket_columns(buckets, ordered))


async def add_days(db: Connection, buckets: Entered) -> None:
    ordered = sorted(buckets)
    meters = _meter_columns([meter for meter, _ in ordered])
    await db.execute(SQL.add_days, *meters, *_bucket_columns(buckets, ordered))


def _bucket_columns(buckets: Entered, ordered: Sequence[tuple[Meter, int]]) -> tuple[str, ...]:
    found = [buckets[key] for key in ordered]
    return (
        numbers([at for _, at in ordered]),
        numbers([one.total for one in found]),
        numbers([one.cost for one in found]),
        numbers([one.peak for one in found]),
        numbers([one.rise for one in found]),
    )


async def forget_hours(db: Connection, before: datetime, at_once: int = FORGOTTEN_AT_ONCE) -> int:
    """Delete hourly buckets that end before a time, in chunks, so that no statement takes long; days are kept."""
    kept = await db.fetchval(SQL.keep_hours, before)
    forgotten = 0
    while count := affected(await db.execute(SQL.forget_hours, kept, at_once)):
        forgotten += count
    return forgotten


# Usage in a window.


class Tariffs:
    """Costs of resources over time, computed once per resource, and the times at which prices change."""

    def __init__(self, prices: PriceList) -> None:
        self._prices = prices
        self._known: dict[MeteredHours, Tariff] = {}
        self.begins: tuple[int, ...] = prices.all_begins()

    def of(self, resource: str, klass: str) -> Tariff:
        found = self._known.get((resource, klass))
        if found is None:
            found = self._known[resource, klass] = _tariff_of(self._prices, resource, klass)
        return found

    def cost(self, metered: MeteredHours, segment: int, weight: int, moment: int) -> int:
        """The cost of moments that lie between two changes of prices."""
        if not segment:
            return 0
        rate, offset = self.of(*metered).line(self.begins[segment - 1])
        return rate * moment + offset * weight


async def load_tariffs(db: Connection) -> Tariffs:
    return Tariffs(await price_store.load_all(db))


class _Sum(Struct):
    total: int = 0
    cost: int = 0
    peak: int = 0
    current: int = 0

    def used(self) -> Used:
        return Used(self.total, self.cost, max(self.peak, self.current), self.current)


Windows = dict[str, dict[MeteredHours, Used]]  # by tenant
HourTotals = dict[str, dict[str, int]]  # by tenant and resource, summed over classes
Steps = dict[str, dict[str, list[tuple[int, int]]]]  # the same, each as (at, delta)
UserWindows = dict[tuple[str, str], dict[MeteredHours, Used]]  # by (tenant, user)


async def load_window(
    db: Connection,
    tenants: Iterable[str],
    begin: datetime,
    end: datetime | None = None,
    *,
    now: datetime | None = None,
    tariffs: Tariffs | None = None,
) -> Windows:
    """Load the usage of tenants from `begin` until `end` (default: now), to the second, by resource and class.

    A window never begins before its tenant was created: earlier usage belongs to a deleted tenant of the same name. The
    peak is the highest from the hour or day in which the window begins until now, and the current level is the present
    one, even if the window ends earlier.
    """
    wanted = [(tenant, EVERYBODY) for tenant in dict.fromkeys(tenants)]
    found = await _load(db, wanted, begin, end, now, tariffs)
    return {tenant: found.get((tenant, EVERYBODY), {}) for tenant, _ in wanted}


async def load_days_window(db: Connection, tenants: Sequence[str], day: datetime, now: datetime) -> HourTotals:
    """Load the node and device usage since the beginning of a day, deleted tenants of the same name included. It costs
    a small part of `load_window`."""
    found: HourTotals = {tenant: {} for tenant in tenants}
    for row in await db.fetch(SQL.window_of_days, tenants, day, _whole(now)):
        found[row["tenant"]][row["resource"]] = int(row["total"])
    return found


async def load_steps_from(db: Connection, tenants: Sequence[str], begin: datetime, end: datetime) -> Steps:
    """Load the level of nodes and devices at a time, and the steps from then on until another time of the same hour.
    All steps of that day must be rolled up. Empty if its records were dropped: then a window begins with its day."""
    found: Steps = defaultdict(lambda: defaultdict(list))
    for row in await db.fetch(SQL.steps_from, tenants, begin, end):
        found[row["tenant"]][row["resource"]].append((row["at"], int(row["delta"])))
    return found


async def load_user_window(
    db: Connection,
    user: str | None,
    tenants: Iterable[str] | None,
    begin: datetime,
    end: datetime | None = None,
    *,
    now: datetime | None = None,
    tariffs: Tariffs | None = None,
) -> UserWindows:
    """Load windows by user: of one or of all users, in these tenants or in all. Users are called `tenant/name`; `-` is
    nobody."""
    among = None if tenants is None else list(dict.fromkeys(tenants))
    wanted = [(row["tenant"], row["username"]) for row in await db.fetch(SQL.users, user, among)]
    found = await _load(db, wanted, begin, end, now, tariffs)
    return {whose: used for whose, used in found.items() if any(one.total or one.current for one in used.values())}


async def _load(
    db: Connection,
    wanted: Sequence[tuple[str, str]],
    begin: datetime,
    end: datetime | None,
    now: datetime | None,
    tariffs: Tariffs | None,
) -> UserWindows:
    """Load usage until now, and subtract usage after the end."""
    if not wanted:
        return {}
    now = _whole(now or datetime.now(UTC))
    end = now if end is None else min(_whole(end), now)
    tariffs = tariffs or await load_tariffs(db)
    created = await load_created(db, {tenant for tenant, _ in wanted})
    asked = [(one, min(max(_whole(begin), created.get(one[0], begin)), end), 1) for one in wanted]
    if end < now:
        asked += [(one, end, -1) for one in wanted]
    rows = await db.fetch(
        SQL.window,
        [tenant for (tenant, _), _, _ in asked],
        [user for (_, user), _, _ in asked],
        [since for _, since, _ in asked],
        now,
        _instants(tariffs),
        [since == created.get(tenant) for (tenant, _), since, _ in asked],
    )
    sums: dict[tuple[str, str], dict[MeteredHours, _Sum]] = defaultdict(lambda: defaultdict(_Sum))
    for row in rows:
        whose, _, sign = asked[row["place"] - 1]
        metered = (row["resource"], row["class"])
        one, moment = sums[whose][metered], int(row["moment"])
        one.total += sign * (int(row["total"]) + moment)
        one.cost += sign * (int(row["cost"]) + tariffs.cost(metered, row["segment"], int(row["weight"]), moment))
        if sign > 0:
            one.peak, one.current = max(one.peak, int(row["peak"])), one.current + int(row["current"])
    return {
        whose: {metered: one.used() for metered, one in sorted(found.items()) if one.total or one.cost or one.current}
        for whose, found in sums.items()
    }


def _whole(at: datetime) -> datetime:
    return at.replace(microsecond=0)


def _instants(tariffs: Tariffs) -> list[datetime]:
    return [datetime.fromtimestamp(at, UTC) for at in tariffs.begins]


class _Metadata(Struct, rename="camel"):
    creation_timestamp: datetime | None = None


class _Document(Struct):
    metadata: _Metadata


_decode_document = msgspec.json.Decoder(_Document).decode


async def load_created(db: Connection, tenants: Iterable[str]) -> dict[str, datetime]:
    """Load the creation times of the existing tenants among these."""
    rows = await db.fetch(SQL.created, sorted(tenants))
    found = {row["name"]: _decode_document(row["doc"]).metadata.creation_timestamp for row in rows}
    return {name: at for name, at in found.items() if at is not None}


async def load_tenants(db: Connection) -> dict[str, bytes]:
    """Load the document of every tenant."""
    return {row["name"]: row["doc"] for row in await db.fetch(SQL.tenants)}


# Usage over time.


class SeriesRow(Struct, frozen=True):
    """The usage of one resource in one whole hour or day, which begins `at`."""

    at: datetime
    resource: str
    klass: str
    total: int
    cost: int
    peak: int


async def load_series(
    db: Connection,
    tenants: Sequence[str],
    begin: datetime,
    end: datetime,
    grain: Grain,
    *,
    user: str = EVERYBODY,
    now: datetime | None = None,
    tariffs: Tariffs | None = None,
) -> dict[str, list[SeriesRow]]:
    """Load the hours or days that begin in [start of the bucket of `begin`, `end`) up to now, by tenant, ordered by
    time, resource and class. Users have days only."""
    assert grain == "day" or user == EVERYBODY, "users have no hours"
    size = DAY if grain == "day" else HOUR
    first = datetime.fromtimestamp(int(begin.timestamp()) // size * size, UTC)
    tariffs = tariffs or await load_tariffs(db)
    now = now or datetime.now(UTC)
    several: dict[str, list[Any]] = {tenant: [] for tenant in tenants}
    for row in await db.fetch(SQL.series_days if grain == "day" else SQL.series_hours, tenants, first, end, user, now):
        several[row["tenant"]].append(row)
    times = (int(first.timestamp()), end.timestamp(), int(now.timestamp()))
    return {tenant: _series(rows, *times, size, tariffs) for tenant, rows in several.items()}


def _series(rows: Sequence[Any], first: int, end: float, now: int, size: int, tariffs: Tariffs) -> list[SeriesRow]:
    sums = {
        (row["at"], row["resource"], row["class"]): Bucket(int(row["total"]), int(row["cost"]), row["peak"])
        for row in rows
        if row["what"] == "bucket"
    }
    for metered, at, bucket in _ahead(rows, now, size, tariffs):
        if first <= at < end:
            known = sums.setdefault((at, *metered), Bucket())
            known.total += bucket.total
            known.cost += bucket.cost
            known.peak = max(known.peak, bucket.peak)
    return [
        SeriesRow(datetime.fromtimestamp(at, UTC), resource, klass, one.total, one.cost, one.peak)
        for (at, resource, klass), one in sorted(sums.items())
        if one.total or one.peak
    ]


def _ahead(rows: Iterable[Any], until: int, size: int, tariffs: Tariffs) -> Iterator[tuple[MeteredHours, int, Bucket]]:
    """Fold usage that is in no bucket yet into buckets, as the roll-up will do."""
    levels: dict[MeteredHours, Level] = defaultdict(Level)
    steps: dict[MeteredHours, list[LevelStep]] = defaultdict(list)
    for row in rows:
        metered = (row["resource"], row["class"])
        if row["what"] == "level":
            levels[metered] = Level(int(row["total"]), row["at"])
        elif row["what"] == "step":
            steps[metered].append(LevelStep(Meter("", "", *metered), row["at"], int(row["total"])))
    for metered in dict.fromkeys(chain(levels, steps)):
        _, buckets = fold(levels[metered], steps[metered], until, size, tariffs.of(*metered))
        yield from ((metered, at, bucket) for at, bucket in buckets.items())


async def recompute(
    db: Connection,
    tenant: str,
    begin: datetime,
    end: datetime,
    *,
    user: str = EVERYBODY,
    tariffs: Tariffs | None = None,
) -> dict[MeteredHours, Used]:
    """Recompute a window from all records, to verify the buckets. It has no peaks."""
    tariffs = tariffs or await load_tariffs(db)
    sums: dict[MeteredHours, _Sum] = defaultdict(_Sum)
    for row in await db.fetch(SQL.recompute, tenant, _whole(begin), _whole(end), user, _instants(tariffs)):
        metered, moment = (row["resource"], row["class"]), int(row["moment"])
        sums[metered].total += moment
        sums[metered].cost += tariffs.cost(metered, row["segment"], int(row["weight"]), moment)
    return {metered: used for metered, one in sorted(sums.items()) if (used := one.used()) != Used()}
