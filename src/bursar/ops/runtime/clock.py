"""The clock and the ids of verbs: the time now, times as text, and uids that sort by time."""

from __future__ import annotations

import os
import time
import uuid
from datetime import UTC, datetime
from functools import lru_cache


def now() -> datetime:
    return datetime.now(UTC)


@lru_cache(64)
def timestamp(at: datetime) -> str:
    """RFC 3339, UTC, to the second, as Kubernetes writes times."""
    return f"{at.isoformat(timespec='seconds')[:19]}Z"


def new_uid(prefix: str) -> str:
    """A UUID of version 7: it begins with the time. Times of creation are told to the second; what was submitted within
    one is still served in its order, because uids decide between equals."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    chance = int.from_bytes(os.urandom(8), "big") >> 2
    number = milliseconds << 80 | 7 << 76 | (rest * 4096 // 1_000_000) << 64 | 2 << 62 | chance
    return f"{prefix}-{uuid.UUID(int=number)}"
