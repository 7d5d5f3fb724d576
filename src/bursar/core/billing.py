"""Who pays, and how far ahead: what a tenant's or a tier's billing says, and what holds for all of them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bursar.core.lease import Mode
from bursar.core.money import MICROS, NANO


class Billing(StrEnum):
    NONE = "none"
    PREPAID = "prepaid"  # nothing runs that is not paid for


class Terms(Struct, frozen=True):
    """A tenant's: its own where it says something, else its tier's."""

    billing: Billing = Billing.NONE
    mode: Mode = Mode.STRICT
    window_seconds: int | None = None  # how far each beat pays ahead; None: as the policy says for the mode
    discount: int = 0  # hundredths of a percent


class CreditPolicy(Struct, frozen=True):
    """The system's settings, `spec.credits`."""

    lease_seconds: int = 120
    reserve_seconds: int = 3600
    extend_seconds_max: int = 3600  # how far ahead anything may be paid by asking
    throttle_seconds_max: int = 300  # how long work that spends too fast is frozen before it is ended
    drift_credits: int = NANO  # adjustments beyond this are told
    reconcile_seconds: int = 60  # how long after its end a lease is reconciled: late events have come by then
    seal_seconds: int = 60
    entry_days: int = 30  # how long entries are kept line by line
    credit_value: str = "1.00"

    def window(self, terms: Terms) -> int:
        """In microseconds."""
        default = self.reserve_seconds if terms.mode is Mode.RESERVE else self.lease_seconds
        return MICROS * (terms.window_seconds or default)
