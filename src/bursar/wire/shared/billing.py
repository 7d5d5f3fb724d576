"""`spec.billing` of tenants and tiers: whether work is prepaid, and how far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Final

from msgspec import UNSET, UnsetType

from bursar.core.credit.billing_terms import NOTHING_SAID, StatedTerms
from bursar.core.credit.billing_terms import Billing as Pays
from bursar.core.credit.lease import Mode
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.meta import Text, Wire

MODES: Final = tuple(Pays)
LEASE_MODES: Final = tuple(Mode)
LEASE_SECONDS_MAX: Final = 7 * 86_400


class Billing(Wire):
    """Billing terms; a field that is left out comes from the tier, or is the default."""

    mode: Text = UNSET
    lease_mode: Text = UNSET
    lease_seconds: int | UnsetType = UNSET
    discount_percent: int | float | UnsetType = UNSET


def said_in(billing: Billing | UnsetType) -> StatedTerms:
    if isinstance(billing, UnsetType):
        return NOTHING_SAID
    return StatedTerms(
        billing=Pays(billing.mode) if isinstance(billing.mode, str) else None,
        mode=Mode(billing.lease_mode) if isinstance(billing.lease_mode, str) else None,
        window_seconds=billing.lease_seconds if isinstance(billing.lease_seconds, int) else None,
        discount=None if isinstance(billing.discount_percent, UnsetType) else _hundredths(billing.discount_percent),
    )


def billing_faults(path: str, billing: Billing | UnsetType) -> Iterator[Cause]:
    if isinstance(billing, UnsetType):
        return
    for name, value, known in (("mode", billing.mode, MODES), ("leaseMode", billing.lease_mode, LEASE_MODES)):
        if value is not UNSET and value not in known:
            yield field_fault(f"{path}.{name}", f"must be one of {', '.join(known)}")
    seconds = billing.lease_seconds
    if isinstance(seconds, int) and not 1 <= seconds <= LEASE_SECONDS_MAX:
        yield field_fault(f"{path}.leaseSeconds", f"must be between 1 and {LEASE_SECONDS_MAX}, got {seconds}")
    percent = billing.discount_percent
    if isinstance(percent, UnsetType):
        return
    if not 0 <= percent <= 100:
        yield field_fault(f"{path}.discountPercent", f"must be between 0 and 100, got {percent}")
    elif _hundredths(percent) is None:
        yield field_fault(f"{path}.discountPercent", f"has at most two decimals, got {percent}")


def _hundredths(percent: int | float) -> int | None:
    """Convert percent to hundredths of a percent exactly; None if that is no whole number."""
    exact = Decimal(repr(percent)) * 100
    return int(exact) if exact == exact.to_integral_value() else None
