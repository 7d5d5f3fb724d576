"""A placement's deadline as it lies in its folder; `shim.py` says what it means. As there, nothing else is imported."""

from __future__ import annotations

# When it must end, and within how many seconds (None: as the run says); until when it may be frozen, and why it ends.
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
    assert len(data) == DEADLINE_BYTES, "a longer one would be taken for one that is half written"
    return data


def parse_deadline(data: bytes) -> Deadline | None:
    """None where it is not whole."""
    words = data.split()
    half = len(words) // 2
    if len(data) != DEADLINE_BYTES or len(words) not in (4, 8) or words[:half] != words[half:]:
        return None
    freeze_until, reason = (float(words[2]), _REASONS[words[3]]) if half == 4 else (0.0, LEASE_EXPIRED)
    return float(words[0]), None if words[1] == b"-" else float(words[1]), freeze_until, reason
