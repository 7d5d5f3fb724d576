"""Times as text, as statuses and documents have them."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache


@lru_cache(64)
def timestamp(at: datetime) -> str:
    """RFC 3339, UTC, to the second, as Kubernetes writes times."""
    return f"{at.isoformat(timespec='seconds')[:19]}Z"
