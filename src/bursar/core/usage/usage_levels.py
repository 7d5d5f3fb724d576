"""Usage metering: the used amount as a step function of time, integrated into hourly and daily buckets.

The level steps up when work starts and down when it ends. Each step adds the time before it to the buckets of its hours
or days. So a job that runs for a year costs two steps, and a report reads buckets, however many jobs there were.

Times are whole seconds since 1970. Levels are amounts in their resource's unit (thousandths, or bytes), and usage is
amount times seconds, in exact integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from bursar.core.credit.price import PriceList
from bursar.core.nodes.node import EXCLUSIVE, WHOLE, NodeCapacity, Placement, dominant_fraction
from bursar.core.objects.charge import Amounts
from bursar.core.values.money import MICROS

HOUR: Final = 3600
DAY: Final = 24 * HOUR
EVERYBODY: Final = ""  # in place of a user: all users of the tenant together
NOBODY: Final = "-"  # in place of a user: work that no user submitted

NODES: Final = "nodes"
UNCOUNTED: Final = frozenset({"pods", EXCLUSIVE})
UNKNOWN_GPUS: Final = WHOLE  # of a node whose capacity is unknown


class Meter(Struct, frozen=True, order=True):
    """The key of a usage series: tenant, user, resource, and class of its devices."""

    tenant: str
    user: str
    resource: str
    klass: str = ""


class LevelStep(Struct, frozen=True):
    """A change of a meter's level at a time."""

    meter: Meter
    at: int
    delta: int


class Level(Struct, frozen=True):
    """The used amount of a meter. The time until `since` is already in buckets."""

    amount: int = 0
    since: int = 0


class Bucket(Struct):
    """The additions to an hour or a day of a meter."""

    total: int = 0  # amount times seconds
    cost: int = 0  # by a tariff, in the tariff's unit
    peak: int = 0  # the highest level
    rise: int = 0  # the increase of the level at the bucket's end


class UsageBegan(Struct, frozen=True):
    """The start of usage on a node: the amounts, the user and tenant that they count for, and the time."""

    uid: str
    node: str
    epoch: int
    tenant: str
    user: str
    namespace: str
    name: str
    amounts: Amounts
    klass: str
    at: int
    lease: int = 0


class UsageEnded(Struct, frozen=True):
    """The end of usage on a node: the time, the phase and the reason."""

    uid: str
    node: str
    at: int
    phase: str
    reason: str = ""


class Used(Struct, frozen=True):
    """The usage of a meter in a window: amount times seconds, cost, peak and present level."""

    total: int = 0
    cost: int = 0
    peak: int = 0
    current: int = 0


class Tariff(Struct, frozen=True):
    """The price of one unit per second as a step function of time. Before the first price it is 0."""

    begins: tuple[int, ...] = ()
    rates: tuple[int, ...] = ()

    def line(self, at: int) -> tuple[int, int]:
        """The accumulated cost of one unit as `rate × time + offset`, from `at` until the next price begins."""
        place = bisect_right(self.begins, at)
        if not place:
            return 0, 0
        rate = self.rates[place - 1]
        return rate, self.cost(self.begins[0], at) - rate * at

    def cost(self, begin: int, end: int) -> int:
        """The cost of one unit over a time."""
        spent = 0
        for place, (since, rate) in enumerate(zip(self.begins, self.rates, strict=True)):
            until = self.begins[place + 1] if place + 1 < len(self.begins) else end
            spent += rate * max(0, min(end, until) - max(begin, since))
        return spent


FREE: Final = Tariff()


def tariff_of(prices: PriceList, resource: str, klass: str) -> Tariff:
    """The tariff of a resource: the price of its class, else its own, each from its first whole second on."""
    begins = sorted({-(-at // MICROS) for at in prices.begins(resource, klass)})
    found = [prices.at(resource, klass, at * MICROS) for at in begins]
    return Tariff(tuple(begins), tuple(one.per_second if one is not None else 0 for one in found))


def hours(total: int) -> float:
    """Convert a total in thousandths to hours."""
    return total / WHOLE / HOUR


def amounts_on(capacity: NodeCapacity | None, part: Placement) -> dict[str, int]:
    """The metered amounts of a placement: of a whole node, or the allocated resources and its fraction of the node."""
    if part.exclusive or capacity is None:
        return node_amounts(capacity.allocatable if capacity is not None else None)
    given = {name: amount for name, amount in part.resources.items() if amount and name not in UNCOUNTED}
    return {**given, NODES: dominant_fraction(capacity, given)}


def node_amounts(allocatable: Amounts | None) -> dict[str, int]:
    """The metered amounts of a whole node; a node of unknown capacity counts as one node with one GPU."""
    if allocatable is None:
        return {NODES: WHOLE, "nvidia.com/gpu": UNKNOWN_GPUS}
    return {**{name: amount for name, amount in allocatable.items() if name not in UNCOUNTED}, NODES: WHOLE}


def fold(
    level: Level, steps: Iterable[LevelStep], until: int, size: int, tariff: Tariff = FREE
) -> tuple[Level, dict[int, Bucket]]:
    """Integrate steps of one meter into buckets of this size, up to a time.

    A late step, for a time that is in buckets already, corrects these. So the sum does not depend on the order of the
    steps.
    """
    buckets: dict[int, Bucket] = {}
    now = level
    for step in sorted(steps, key=lambda one: one.at):
        if step.at < now.since:
            _enter_late(buckets, step, now, size, tariff)
            now = Level(now.amount + step.delta, now.since)
        else:
            _enter(buckets, now, step.at, size, tariff)
            now = Level(now.amount + step.delta, step.at)
            _mark(buckets, now, step.at, step.delta, size)
    if until > now.since:
        _enter(buckets, now, until, size, tariff)
        now = Level(now.amount, until)
    return now, buckets


def _enter(buckets: dict[int, Bucket], level: Level, until: int, size: int, tariff: Tariff) -> None:
    """Add a constant level from `since` until then."""
    if not level.amount:
        return
    for begin, end in spans(level.since, until, size):
        bucket = buckets.setdefault(begin - begin % size, Bucket())
        bucket.total += level.amount * (end - begin)
        bucket.cost += level.amount * tariff.cost(begin, end)
        bucket.peak = max(bucket.peak, level.amount)
        if begin % size == 0:
            bucket.rise += level.amount  # The bucket begins with this level.


def _mark(buckets: dict[int, Bucket], level: Level, at: int, delta: int, size: int) -> None:
    """Record the level after a step: it may be the peak, even if the next step ends it in the same second."""
    bucket = buckets.setdefault(at - at % size, Bucket())
    bucket.peak = max(bucket.peak, level.amount)
    if at % size:
        bucket.rise += delta  # A step at the beginning of a bucket is added with its first second.


def _enter_late(buckets: dict[int, Bucket], step: LevelStep, level: Level, size: int, tariff: Tariff) -> None:
    """Correct buckets by a late step. Peaks stay as they are, because the other levels of that time are not stored."""
    for begin, end in spans(step.at, level.since, size):
        bucket = buckets.setdefault(begin - begin % size, Bucket())
        bucket.total += step.delta * (end - begin)
        bucket.cost += step.delta * tariff.cost(begin, end)
        bucket.rise += step.delta


def used_by_steps(steps: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """The usage by steps, as (at, delta), between two times. Earlier steps count from the beginning, so the initial
    level can be given as a step."""
    return sum(delta * max(0, end - max(begin, at)) for at, delta in steps)


def spans(begin: int, end: int, size: int) -> Iterable[tuple[int, int]]:
    """Cut a time at the boundaries of buckets of this size."""
    while begin < end:
        cut = min(end, begin - begin % size + size)
        yield begin, cut
        begin = cut
