"""Who pays, and how far ahead: what a tenant's or a tier's billing says, and what holds for all of them."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bursar.core.credit.lease import Mode
from bursar.core.values.money import MICROS, NANO


class Billing(StrEnum):
    NONE = "none"
    PREPAID = "prepaid"  # nothing runs that is not paid for


class BillingTerms(Struct, frozen=True):
    """A tenant's: its own where it says something, else its tier's."""

    billing: Billing = Billing.NONE
    mode: Mode = Mode.STRICT
    window_seconds: int | None = None  # how far each beat pays ahead; None: as the policy says for the mode
    discount: int = 0  # hundredths of a percent


class StatedTerms(Struct, frozen=True):
    """What one of them says itself; None where it says nothing."""

    billing: Billing | None = None
    mode: Mode | None = None
    window_seconds: int | None = None
    discount: int | None = None


NOTHING_SAID = StatedTerms()


def terms_of(own: StatedTerms, tier: StatedTerms) -> BillingTerms:
    """Each answer by itself: the tenant's, else its tier's, else the default."""
    given = {}
    for name in StatedTerms.__struct_fields__:
        value = getattr(own, name)
        if value is None:
            value = getattr(tier, name)
        if value is not None:
            given[name] = value
    return BillingTerms(**given)


class CreditPolicy(Struct, frozen=True):
    """The system's settings, `spec.credits`."""

    lease_seconds: int = 120
    reserve_seconds: int = 3600
    extend_seconds_max: int = 3600  # how far ahead anything may be paid by asking
    throttle_seconds_max: int = 300  # how long work that spends too fast is frozen before it is ended
    drift_credits: int = NANO  # adjustments beyond this are told
    drift_account_credits: int = 10 * NANO  # an account whose adjustments add up to more in the period gets an alert
    drift_account_hours: int = 24  # that period
    reconcile_seconds: int = 60  # how long after its end a lease is reconciled: late events have come by then
    seal_seconds: int = 60
    entry_days: int = 30  # how long entries are kept line by line
    credit_value: str = "1.00"
    key_days: int = 90  # how old the key gets that signs what is granted to nodes

    def window(self, terms: BillingTerms) -> int:
        """In microseconds."""
        default = self.reserve_seconds if terms.mode is Mode.RESERVE else self.lease_seconds
        return MICROS * (terms.window_seconds or default)
