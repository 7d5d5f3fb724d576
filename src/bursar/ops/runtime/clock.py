"""The clock and the id generator of verbs: the time now, and uids that sort by time."""

from __future__ import annotations

import os
import time
import uuid
from datetime import UTC, datetime


def now() -> datetime:
    return datetime.now(UTC)


def new_uid(prefix: str) -> str:
    """A UUID of version 7, which begins with the time. Creation timestamps have whole seconds; submissions within one
    second keep their order, because equal times are ordered by uid."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    chance = int.from_bytes(os.urandom(8), "big") >> 2
    number = milliseconds << 80 | 7 << 76 | (rest * 4096 // 1_000_000) << 64 | 2 << 62 | chance
    return f"{prefix}-{uuid.UUID(int=number)}"
