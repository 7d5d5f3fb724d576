"""The format of a placement's `deadline` file; `shim.py` describes its meaning. As there, nothing else is imported."""

from __future__ import annotations

# When it is stopped, the grace in seconds (None: that of the run), until when it is frozen instead, and the reason.
Deadline = tuple[float, float | None, float, str]

DEADLINE_BYTES = 128
LEASE_EXPIRED, CREDIT_EXHAUSTED = "LeaseExpired", "CreditExhausted"

_WORDS = {LEASE_EXPIRED: "lease", CREDIT_EXHAUSTED: "credit"}
_REASONS = {word.encode(): reason for reason, word in _WORDS.items()}


def format_deadline(
    at: float, grace_seconds: float | None, freeze_until: float = 0.0, reason: str = LEASE_EXPIRED
) -> bytes:
    said = f"{at!r} {'-' if grace_seconds is None else repr(float(grace_seconds))}"
    if freeze_until or reason != LEASE_EXPIRED:
        said += f" {freeze_until!r} {_WORDS[reason]}"
    data = f"{said} {said}".encode().ljust(DEADLINE_BYTES - 1) + b"\n"
    assert len(data) == DEADLINE_BYTES, "a longer one would be read as torn"
    return data


def parse_deadline(data: bytes) -> Deadline | None:
    """Parse a deadline; None if it is torn."""
    words = data.split()
    half = len(words) // 2
    if len(data) != DEADLINE_BYTES or len(words) not in (4, 8) or words[:half] != words[half:]:
        return None
    freeze_until, reason = (float(words[2]), _REASONS[words[3]]) if half == 4 else (0.0, LEASE_EXPIRED)
    return float(words[0]), None if words[1] == b"-" else float(words[1]), freeze_until, reason
