"""Hours kept by steps and buckets agree with hours added up from the beginning, for every history and window."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from bursar.core.batch.unit_of_work import UnitOfWork, begin_usage, end_usage
from bursar.core.credit.price import Price, PriceList
from bursar.core.nodes.node import NodeCapacity, Placement
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tree
from bursar.core.usage.usage_levels import (
    DAY,
    EVERYBODY,
    FREE,
    HOUR,
    Bucket,
    Level,
    LevelStep,
    Meter,
    Tariff,
    UsageEnded,
    amounts_on,
    fold,
    hours,
    node_amounts,
    tariff_of,
    used_by_steps,
)
from support.usage.plain_hours import Interval, part, used

ONE = Meter("physics", EVERYBODY, "nodes")


class Kept:
    """Buckets as a store keeps them: what comes is added."""

    def __init__(self, size: int) -> None:
        self.size, self.level = size, Level()
        self.buckets: dict[int, Bucket] = {}

    def roll(self, steps: list[LevelStep], until: int, tariff: Tariff = FREE) -> None:
        self.level, news = fold(self.level, steps, until, self.size, tariff)
        for at, new in news.items():
            bucket = self.buckets.setdefault(at, Bucket())
            bucket.total += new.total
            bucket.cost += new.cost
            bucket.peak = max(bucket.peak, new.peak)
            bucket.rise += new.rise

    def used(self, begin: int, end: int, steps: list[LevelStep]) -> int:
        """In a window that ends when everything is entered."""
        cut = min(begin - begin % self.size + self.size, end)
        whole = sum(one.total for at, one in self.buckets.items() if at >= cut)
        edge = self.buckets.get(begin - begin % self.size, Bucket())
        if begin % self.size == 0:
            return whole + edge.total
        return whole + part(edge.rise, steps, begin, cut)


intervals = st.lists(
    st.builds(
        lambda amount, begin, lasts: Interval(amount, begin, begin + lasts),
        st.integers(1, 8000), st.integers(0, 4 * DAY), st.integers(0, 2 * DAY),
    ),
    max_size=12,
)  # fmt: skip


def _steps(history: list[Interval]) -> list[LevelStep]:
    ups = [LevelStep(ONE, one.begin, one.amount) for one in history]
    return ups + [LevelStep(ONE, one.end, -one.amount) for one in history if one.end is not None]


@given(intervals, st.sampled_from((HOUR, DAY)), st.integers(0, 6 * DAY), st.randoms(), st.integers(1, 6))
def test_incremental_hours_equal_a_recomputation_from_records(history, size, begin, random, rolls):  # type: ignore[no-untyped-def]
    kept, steps, end = Kept(size), _steps(history), 6 * DAY + 7
    waiting = list(steps)
    random.shuffle(waiting)  # They come in any order, also long after their time.
    for roll in range(1, rolls):
        some, waiting = waiting[: len(waiting) // 2], waiting[len(waiting) // 2 :]
        kept.roll(some, roll * 6 * DAY // rolls)
    kept.roll(waiting, end)
    assert kept.level.since == end
    assert kept.used(begin, end, steps) == used(history, begin, end)
    assert sum(one.total for one in kept.buckets.values()) == used(history, 0, end)


@given(intervals, st.integers(0, 6 * DAY), st.integers(0, HOUR), st.integers(0, HOUR))
def test_what_there_was_and_what_stepped_since_say_what_was_used(
    history: list[Interval], at: int, since: int, end: int
) -> None:
    """For any part of the time for which steps are known."""
    before = sum(step.delta for step in _steps(history) if step.at <= at)
    steps = [(at, before), *((step.at, step.delta) for step in _steps(history) if at < step.at < at + HOUR)]
    assert used_by_steps(steps, at + since, at + end) == used(history, at + since, at + end)


@given(intervals, st.lists(st.tuples(st.integers(0, 6 * DAY), st.integers(0, 10**9)), max_size=4))
def test_what_hours_cost_is_the_same_in_any_order(history: list[Interval], prices: list[tuple[int, int]]) -> None:
    prices = sorted(dict(prices).items())
    tariff = Tariff(tuple(at for at, _ in prices), tuple(rate for _, rate in prices))
    early, late = Kept(HOUR), Kept(HOUR)
    early.roll(_steps(history), 6 * DAY, tariff)
    for step in _steps(history):
        late.roll([step], 6 * DAY, tariff)
    expected = sum(one.amount * tariff.cost(one.begin, one.end or 0) for one in history)
    assert sum(one.cost for one in early.buckets.values()) == expected
    assert sum(one.cost for one in late.buckets.values()) == expected


def test_the_peak_of_an_hour_is_its_highest_level() -> None:
    kept = Kept(HOUR)
    kept.roll([LevelStep(ONE, 10, 3000), LevelStep(ONE, 20, 4000), LevelStep(ONE, 30, -3000)], 2 * HOUR)
    assert [kept.buckets[at].peak for at in (0, HOUR)] == [7000, 4000]


def test_a_year_of_one_job_is_two_steps_whoever_asks() -> None:
    kept = Kept(DAY)
    kept.roll([LevelStep(ONE, 0, 1000)], 365 * DAY)
    kept.roll([LevelStep(ONE, 365 * DAY, -1000)], 366 * DAY)
    assert len(kept.buckets) == 366
    assert kept.used(0, 366 * DAY, []) == 365 * DAY * 1000


def test_a_whole_node_counts_all_its_gpus_and_an_unknown_one_counts_one() -> None:
    assert node_amounts({"cpu": 64000, "nvidia.com/gpu": 8000, "pods": 110000}) == {
        "cpu": 64000, "nvidia.com/gpu": 8000, "nodes": 1000,
    }  # fmt: skip
    assert node_amounts({"cpu": 64000}) == {"cpu": 64000, "nodes": 1000}
    assert node_amounts(None) == {"nodes": 1000, "nvidia.com/gpu": 1000}


def test_the_price_of_a_class_counts_once_there_is_one_and_from_the_next_whole_second_on() -> None:
    prices = PriceList.of([
        Price("nvidia.com/gpu", "", 10, 0),
        Price("nvidia.com/gpu", "h100", 30, 100_500_000),
        Price("nvidia.com/gpu", "", 20, 200_000_000),
        Price("cpu", "", 1, 0),
    ])  # fmt: skip
    assert tariff_of(prices, "nvidia.com/gpu", "h100") == Tariff((0, 101, 200), (10, 30, 30))
    assert tariff_of(prices, "nvidia.com/gpu", "a100") == Tariff((0, 200), (10, 20))
    assert tariff_of(prices, "memory", "") == Tariff()
    assert prices.all_begins() == (0, 101, 200)


@given(
    st.dictionaries(st.integers(0, 1000), st.integers(0, 50), max_size=5),
    st.integers(0, 1100), st.integers(0, 1100),
)  # fmt: skip
def test_a_line_says_what_was_spent_until_the_next_price(prices: dict[int, int], begin: int, end: int) -> None:
    tariff = Tariff(tuple(sorted(prices)), tuple(prices[at] for at in sorted(prices)))

    def spent(at: int) -> int:
        since = max((one for one in (0, *tariff.begins) if one <= at), default=0)
        rate, offset = tariff.line(since)
        return rate * at + offset

    if begin <= end:
        assert spent(end) - spent(begin) == tariff.cost(begin, end)


def test_what_is_counted_is_told_in_hours() -> None:
    assert hours(4000 * 90 * 60) == 6.0


def test_a_placement_counts_what_it_has_and_its_largest_part_of_the_node() -> None:
    capacity = NodeCapacity("a", 1, True, {"cpu": 64000, "nvidia.com/gpu": 8000, "pods": 110000})
    shared = Placement("a", "u", "ns", "x", "t", 1, False, {"cpu": 8000, "nvidia.com/gpu": 4000, "pods": 1000}, {})
    assert amounts_on(capacity, shared) == {"cpu": 8000, "nvidia.com/gpu": 4000, "nodes": 500}
    whole = Placement("a", "u", "ns", "x", "t", 1, True, {"cpu": 64000, "exclusive": 1000}, {})
    assert amounts_on(capacity, whole) == {"cpu": 64000, "nvidia.com/gpu": 8000, "nodes": 1000}
    assert amounts_on(None, shared) == {"nvidia.com/gpu": 1000, "nodes": 1000}


def test_what_begins_and_ends_in_one_batch_is_kept_apart_from_what_ran_before() -> None:
    now = datetime(2026, 3, 1, 10, 0, 7, 900_000, tzinfo=UTC)
    batch = UnitOfWork(now, Tree(), Counters(Tree(), {}), str)
    one = Placement("a", "u", "ns", "x", "t", 2, False, {"cpu": 1000}, {})
    end_usage(batch, "u", "a", "Pending", "Preempted")
    begin_usage(batch, one, "t/ada", seconds_ago=3)
    assert batch.begun["a", "u"].at == int(now.timestamp()) - 3
    end_usage(batch, "u", "a", "Failed")
    begin_usage(batch, one)
    second = int(now.timestamp())
    assert batch.ended == {("a", "u"): UsageEnded("u", "a", second, "Pending", "Preempted")}
    assert [(began.user, ended) for began, ended in batch.spent] == [("t/ada", UsageEnded("u", "a", second, "Failed"))]
    assert [(began.user, began.at) for began in batch.begun.values()] == [("-", second)]
