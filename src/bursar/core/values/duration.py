"""Durations as users write them (`1h30m`, `7d`, `7200s`, `90`) and ages as kubectl shows them.

Leases, TTLs and deadlines need whole seconds only. The bound keeps every sum of an instant and a duration within the
range of dates.
"""

import re
from datetime import datetime
from typing import Final

from bursar.core.values.names import quoted
from bursar.core.values.wording import counted

SECONDS_MAX: Final = 10 * 365 * 86_400

# Largest unit first and each at most once, so that a duration can be read in one way only.
_SHAPE: Final = re.compile(r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_PLAIN: Final = re.compile(r"[0-9]{1,9}")
_UNIT_SECONDS: Final = (86_400, 3_600, 60, 1)


class DurationError(ValueError):
    """A text that is not a duration, or is longer than ten years; the message quotes it."""


def parse_seconds(text: object) -> int:
    """Parse a JSON value as whole seconds; a number without a unit is seconds."""
    seconds = _written_seconds(text)
    if seconds < 0:
        raise DurationError("duration must not be negative")
    if seconds > SECONDS_MAX:
        raise DurationError(f"duration is too long: at most {SECONDS_MAX} seconds (10 years of 365 days) are allowed")
    return seconds


def format_age(seconds: int) -> str:
    """Format an age in one or two units, with the thresholds of kubectl."""
    if seconds < -1:
        return "<invalid>"
    if seconds < 120:
        # One second ahead is clock skew.
        return f"{max(seconds, 0)}s"
    minutes, hours, days = seconds // 60, seconds // 3_600, seconds // 86_400
    if minutes < 180:
        return _two_units(minutes, "m", seconds % 60 if minutes < 10 else 0, "s")
    if hours < 48:
        return _two_units(hours, "h", minutes % 60 if hours < 8 else 0, "m")
    if days < 2 * 365:
        return _two_units(days, "d", hours % 24 if days < 8 else 0, "h")
    years = days // 365
    return _two_units(years, "y", days % 365 if years < 8 else 0, "d")


def format_due(seconds: float) -> str:
    """Format the distance to a moment: `in about 10 min`, `12m ago`."""
    if seconds < -1:
        return f"{format_age(int(-seconds))} ago"
    if seconds < 1:
        return "now"
    if seconds < 90:
        return f"in about {round(seconds)} s"
    if seconds < 90 * 60:
        return f"in about {round(seconds / 60)} min"
    if seconds < 36 * 3_600:
        return f"in about {round(seconds / 3_600)} h"
    return f"in about {counted(round(seconds / 86_400), 'day')}"


def format_clock(at: datetime, now: datetime) -> str:
    """Format a time of day, `12:38 UTC`, with the date unless it is today. Both arguments are in UTC."""
    return f"{at:%H:%M} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M} UTC"


def _written_seconds(text: object) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if not isinstance(text, str):
        raise DurationError("duration must be a string such as 1h30m, or an integer of seconds")
    if _PLAIN.fullmatch(text):
        return int(text)
    shape = _SHAPE.fullmatch(text)
    # Every unit is optional, so the pattern matches the empty text too.
    if shape is None or not text:
        raise DurationError(f"duration {quoted(text)} must be like 7d, 1h30m, 5m or 7200s, or a number of seconds")
    return sum(int(count) * unit for count, unit in zip(shape.groups("0"), _UNIT_SECONDS, strict=True))


def _two_units(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large}{large_unit}{small}{small_unit}" if small else f"{large}{large_unit}"
