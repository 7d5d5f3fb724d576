"""Hours: what somebody uses over time, as a level that steps up when something starts and down when it ends.

Nothing is ever added up from the beginning. A step moves the level; the time up to then is entered in the bucket of its
hour or day. So a job that runs for a year costs two steps, and a report reads buckets, however many jobs there were.

Times are whole seconds since 1970. Levels are amounts in their resource's unit (thousandths, or bytes), and what is
used is amount times seconds: whole numbers, to which nothing is lost.
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
EVERYBODY: Final = ""  # in place of a user: all of the tenant's together
NOBODY: Final = "-"  # in place of a user: work that no user submitted

NODES: Final = "nodes"
UNCOUNTED: Final = frozenset({"pods", EXCLUSIVE})
UNKNOWN_GPUS: Final = WHOLE  # of a node of which nobody knows what it has


class Meter(Struct, frozen=True, order=True):
    """What is counted apart: whose, which resource, and of which class its devices are."""

    tenant: str
    user: str
    resource: str
    klass: str = ""


class LevelStep(Struct, frozen=True):
    """From `at` on there is so much more, or less."""

    meter: Meter
    at: int
    delta: int


class Level(Struct, frozen=True):
    """How much there is. What was used until `since` is in buckets."""

    amount: int = 0
    since: int = 0


class Bucket(Struct):
    """What is to be added to what is known of an hour or a day."""

    total: int = 0  # amount times seconds
    cost: int = 0  # what a tariff asks for that, in its own fraction
    peak: int = 0  # the highest level
    rise: int = 0  # by how much the level at the bucket's end is higher than was known


class UsageBegan(Struct, frozen=True):
    """That use of a node begins: of how much of it, for whom it counts, and since when."""

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
    """That it is over, since when and how."""

    uid: str
    node: str
    at: int
    phase: str
    reason: str = ""


class Used(Struct, frozen=True):
    """What was used in a window: amount times seconds, what a tariff asks for that, the highest level, the present."""

    total: int = 0
    cost: int = 0
    peak: int = 0
    current: int = 0


class Tariff(Struct, frozen=True):
    """What one unit costs a second, from a time on, in order. Before the first it costs nothing."""

    begins: tuple[int, ...] = ()
    rates: tuple[int, ...] = ()

    def line(self, at: int) -> tuple[int, int]:
        """What one unit has cost by a time, as `rate × time + offset`: from `at` on, until the next price begins."""
        place = bisect_right(self.begins, at)
        if not place:
            return 0, 0
        rate = self.rates[place - 1]
        return rate, self.cost(self.begins[0], at) - rate * at

    def cost(self, begin: int, end: int) -> int:
        """Of one unit over this time."""
        spent = 0
        for place, (since, rate) in enumerate(zip(self.begins, self.rates, strict=True)):
            until = self.begins[place + 1] if place + 1 < len(self.begins) else end
            spent += rate * max(0, min(end, until) - max(begin, since))
        return spent


FREE: Final = Tariff()


def tariff_of(prices: PriceList, resource: str, klass: str) -> Tariff:
    """What a resource costs: the price of its class, else its own. A price holds from the first whole second on."""
    begins = sorted({-(-at // MICROS) for at in prices.begins(resource, klass)})
    found = [prices.at(resource, klass, at * MICROS) for at in begins]
    return Tariff(tuple(begins), tuple(one.per_second if one is not None else 0 for one in found))


def hours(total: int) -> float:
    """Of what is counted in thousandths."""
    return total / WHOLE / HOUR


def amounts_on(capacity: NodeCapacity | None, part: Placement) -> dict[str, int]:
    """What a placement counts for: a whole node where it has that, else what it was given, and its part of the node."""
    if part.exclusive or capacity is None:
        return node_amounts(capacity.allocatable if capacity is not None else None)
    given = {name: amount for name, amount in part.resources.items() if amount and name not in UNCOUNTED}
    return {**given, NODES: dominant_fraction(capacity, given)}


def node_amounts(allocatable: Amounts | None) -> dict[str, int]:
    """What a whole node counts for: all it has, and one node. A node that nobody knows counts as one with one GPU."""
    if allocatable is None:
        return {NODES: WHOLE, "nvidia.com/gpu": UNKNOWN_GPUS}
    return {**{name: amount for name, amount in allocatable.items() if name not in UNCOUNTED}, NODES: WHOLE}


def fold(
    level: Level, steps: Iterable[LevelStep], until: int, size: int, tariff: Tariff = FREE
) -> tuple[Level, dict[int, Bucket]]:
    """Enter steps of one meter, and the time until then, in buckets of this size.

    A step may come late, for a time that was entered already: then what it changes there is added. So the sum is the
    same in whichever order steps come.
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
    """A level that stayed the same from `since` until then."""
    if not level.amount:
        return
    for begin, end in spans(level.since, until, size):
        bucket = buckets.setdefault(begin - begin % size, Bucket())
        bucket.total += level.amount * (end - begin)
        bucket.cost += level.amount * tariff.cost(begin, end)
        bucket.peak = max(bucket.peak, level.amount)
        if begin % size == 0:
            bucket.rise += level.amount  # It begins with what there was.


def _mark(buckets: dict[int, Bucket], level: Level, at: int, delta: int, size: int) -> None:
    """The level that a step has led to: it may be the highest, also if the next step ends it in the same second."""
    bucket = buckets.setdefault(at - at % size, Bucket())
    bucket.peak = max(bucket.peak, level.amount)
    if at % size:
        bucket.rise += delta  # What begins with a bucket is entered with its first second.


def _enter_late(buckets: dict[int, Bucket], step: LevelStep, level: Level, size: int, tariff: Tariff) -> None:
    """What a step changes in time that was entered already. What there was beside it at each moment is not known any
    more, so peaks stay as they are."""
    for begin, end in spans(step.at, level.since, size):
        bucket = buckets.setdefault(begin - begin % size, Bucket())
        bucket.total += step.delta * (end - begin)
        bucket.cost += step.delta * tariff.cost(begin, end)
        bucket.rise += step.delta


def used_by_steps(steps: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    """What steps, as (at, delta), come to between two times. One that came before counts from the beginning: so what
    there was then is a step as well."""
    return sum(delta * max(0, end - max(begin, at)) for at, delta in steps)


def spans(begin: int, end: int, size: int) -> Iterable[tuple[int, int]]:
    """A time, cut where buckets of this size begin."""
    while begin < end:
        cut = min(end, begin - begin % size + size)
        yield begin, cut
        begin = cut
