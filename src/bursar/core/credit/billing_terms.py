"""Billing terms: whether a tenant's work is prepaid, its lease mode, window and discount, and the system's policy."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from bursar.core.credit.lease import Mode
from bursar.core.values.money import MICROS, NANO


class Billing(StrEnum):
    """Whether a tenant pays for its work in advance."""

    NONE = "none"  # usage is metered, and not charged to an account
    PREPAID = "prepaid"  # work runs only on leases that its account has paid


class BillingTerms(Struct, frozen=True):
    """The effective billing terms of a tenant: its own values, else those of its tier, else the defaults."""

    billing: Billing = Billing.NONE
    mode: Mode = Mode.STRICT
    window_seconds: int | None = None  # how far each heartbeat pays ahead; None: the policy's value for the mode
    discount: int = 0  # hundredths of a percent


class StatedTerms(Struct, frozen=True):
    """The billing terms that a tenant or a tier sets itself; None for values that it does not set."""

    billing: Billing | None = None
    mode: Mode | None = None
    window_seconds: int | None = None
    discount: int | None = None


NOTHING_SAID = StatedTerms()


def terms_of(own: StatedTerms, tier: StatedTerms) -> BillingTerms:
    """Resolve each value: the tenant's, else its tier's, else the default."""
    given = {}
    for name in StatedTerms.__struct_fields__:
        value = getattr(own, name)
        if value is None:
            value = getattr(tier, name)
        if value is not None:
            given[name] = value
    return BillingTerms(**given)


class CreditPolicy(Struct, frozen=True):
    """The system's settings for credit, `spec.credits` of settings system."""

    lease_seconds: int = 120
    reserve_seconds: int = 3600
    extend_seconds_max: int = 3600  # how far ahead an extension on request may pay
    throttle_seconds_max: int = 300  # how long work above its spend rate is frozen before it is ended
    drift_credits: int = NANO  # larger adjustments of one lease send a notification
    drift_account_credits: int = 10 * NANO  # a larger sum of adjustments of an account in the period sends an alert
    drift_account_hours: int = 24  # that period
    reconcile_seconds: int = 60  # the delay between the end of a lease and its reconciliation, for late events
    seal_seconds: int = 60
    entry_days: int = 30  # how long single entries are kept
    credit_value: str = "1.00"
    key_days: int = 90  # the rotation period of the key that signs lease tokens

    def window(self, terms: BillingTerms) -> int:
        """The lease window in microseconds."""
        default = self.reserve_seconds if terms.mode is Mode.RESERVE else self.lease_seconds
        return MICROS * (terms.window_seconds or default)
