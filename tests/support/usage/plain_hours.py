"""Hours added up from the beginning, the plain way: what levels and buckets must agree with, to the second."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bursar.core.usage.usage_levels import LevelStep


def part(last: int, steps: Iterable[LevelStep], begin: int, end: int) -> int:
    """What was used at the end of a bucket, from `begin` until `end`, up to when it is entered: its last level without
    what came only later."""
    return last * (end - begin) - sum(one.delta * (one.at - begin) for one in steps if begin < one.at < end)


class Interval(Struct, frozen=True):
    """So much, from a time on, until an end or until now."""

    amount: int
    begin: int
    end: int | None = None


def used(intervals: Sequence[Interval], begin: int, end: int) -> int:
    """What was used in a window, added up from the beginning: what buckets must agree with, to the second."""
    return sum(
        one.amount * max(0, min(end, end if one.end is None else one.end) - max(begin, one.begin)) for one in intervals
    )
