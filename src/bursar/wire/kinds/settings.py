"""Settings: system-wide limits, and settings of the scheduler, node liveness, credit and usage records.

There is one object, named `system`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.nodes.liveness import Patience
from bursar.core.nodes.node import WHOLE
from bursar.core.objects.approval import PENDING_REQUESTS
from bursar.core.objects.object import Key
from bursar.core.quota.tenant_tree import PermitPolicy
from bursar.core.quota.units import WARN_AT, QuotaPolicy
from bursar.core.values.access import AccessGroup, KindAccess
from bursar.core.values.duration import SECONDS_MAX
from bursar.core.values.money import MoneyError, nanocredits
from bursar.core.values.quantity import is_bytes
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.node import REFUSED, TRUSTED
from bursar.wire.kinds.priorityclass import priority_faults
from bursar.wire.shared.kind import Column, Kind
from bursar.wire.shared.limits import (
    amounts,
    amounts_faults,
    dimension_name,
    show_amounts,
    warn_at_faults,
    warn_at_of,
)
from bursar.wire.shared.meta import ObjectMeta, Quantity, Text, Wire

SYSTEM = "system"
SETTINGS_KEY: Final = Key("Settings", "", SYSTEM)

BUDGET_PERIOD_DAYS: Final = 90
BUDGET_PERIOD_DAYS_MAX: Final = 366
RECORD_DAYS: Final = 800
RECORD_DAYS_MAX: Final = 3_650
RESERVED_MAX: Final = 64
ZERO: Final = "zero"
DEFAULT_LIMITS: Final = ("unlimited", ZERO)

_RESERVED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,251}[A-Za-z0-9])?([./]\*)?")


class SchedulingSettings(Wire):
    """Settings of the scheduler; a field that is left out has its default."""

    min_runtime_seconds: int | UnsetType = UNSET  # younger runs are not preempted
    grace_period_seconds: int | UnsetType = UNSET  # time that preempted work has to stop
    quota_backoff_seconds: int | UnsetType = UNSET
    budget_period_days: int | UnsetType = UNSET  # the window of hours budgets, which ends now
    preemption: bool | UnsetType = UNSET
    backfill: bool | UnsetType = UNSET
    energy_price: float | UnsetType = UNSET  # the present price, from 0 (the cheapest) to 1 (the dearest)
    user_priority_max: int | UnsetType = UNSET  # default for tenants
    reserved_taints: list[str] | UnsetType = UNSET  # keys of taints that only granted tolerations tolerate
    gpu_fraction_min: int | float | UnsetType = UNSET  # the smallest fraction of a device that may be requested
    gpu_fractions: Text = UNSET  # Trusted (the default) or Refused; default for nodes


class NodeSettings(Wire):
    """Settings of node liveness and run-leases; a field that is left out has its default."""

    heartbeat_seconds: int | UnsetType = UNSET  # interval of heartbeats
    not_ready_seconds: int | UnsetType = UNSET  # silence after which a node takes no new work
    lost_seconds: int | UnsetType = UNSET  # silence after which a node is lost
    run_lease_seconds: int | UnsetType = UNSET  # the duration of a run-lease
    kill_grace_seconds: int | UnsetType = UNSET  # time that stopped work has to end
    clock_skew_seconds: int | UnsetType = UNSET  # the largest difference of clocks


class CreditSettings(Wire):
    """Settings of credit and the ledger; a field that is left out has its default."""

    lease_seconds: int | UnsetType = UNSET  # time that each heartbeat pays ahead
    reserve_seconds: int | UnsetType = UNSET  # the same, in mode reserve
    extend_seconds_max: int | UnsetType = UNSET  # the longest extension by a request
    throttle_seconds_max: int | UnsetType = UNSET  # the longest freeze of work above the spend rate before it ends
    drift_credits: str | int | UnsetType = UNSET  # larger adjustments trigger an alert
    drift_account_credits: str | int | UnsetType = UNSET  # larger sums of an account trigger an alert
    drift_account_hours: int | UnsetType = UNSET  # the period of these sums
    reconcile_seconds: int | UnsetType = UNSET  # delay of reconciliation after the end of a lease
    seal_seconds: int | UnsetType = UNSET  # interval of sealing
    entry_days: int | UnsetType = UNSET  # retention of single entries
    credit_value: Text = UNSET  # the price of one credit in money
    key_days: int | UnsetType = UNSET  # lifetime of the key that signs lease tokens


class UsageSettings(Wire):
    """Settings of usage records; a field that is left out has its default."""

    record_days: int | UnsetType = UNSET  # retention of usage records; earlier windows have whole days


class QuotaSettings(Wire):
    """Settings of quotas; a field that is left out has its default."""

    default_limit: Text = UNSET  # of tenants without a limit of their own or their tier's: unlimited or zero
    dimensions: list[str] | UnsetType = UNSET  # the dimensions that `zero` covers
    units: dict[str, dict[str, Quantity]] | UnsetType = UNSET  # unit → the amounts that one stands for
    baremetal_hosts: bool | UnsetType = UNSET  # whether exclusive allocations charge their nodes as baremetal-hosts
    warn_at: dict[str, list[int]] | UnsetType = UNSET  # dimension, or * → percentages of a limit


class SettingsSpec(Wire):
    # Hard limits on the whole system, dimension by dimension.
    limits: dict[str, Quantity] | UnsetType = UNSET
    scheduling: SchedulingSettings | UnsetType = UNSET
    nodes: NodeSettings | UnsetType = UNSET
    credits: CreditSettings | UnsetType = UNSET
    usage: UsageSettings | UnsetType = UNSET
    quotas: QuotaSettings | UnsetType = UNSET


class Settings(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: SettingsSpec | UnsetType = UNSET


def to_tree(settings: Settings) -> dict[str, int]:
    return amounts(settings.spec.limits) if isinstance(settings.spec, SettingsSpec) else {}


def permit_policy_of(settings: Settings) -> PermitPolicy:
    """The default permits of tenants' work, by the stored settings."""
    said = settings.spec.scheduling if isinstance(settings.spec, SettingsSpec) else UNSET
    if not isinstance(said, SchedulingSettings):
        return PermitPolicy()
    policy = PermitPolicy()
    most, keys, least = said.user_priority_max, said.reserved_taints, said.gpu_fraction_min
    return PermitPolicy(
        policy.user_priority_max if isinstance(most, UnsetType) else most,
        policy.reserved if isinstance(keys, UnsetType) else tuple(keys),
        policy.fraction_min if isinstance(least, UnsetType) else round(least * WHOLE),
        said.gpu_fractions == REFUSED,
    )


def quota_policy_of(settings: Settings) -> QuotaPolicy:
    """The settings of quotas, with defaults."""
    said = settings.spec.quotas if isinstance(settings.spec, SettingsSpec) else UNSET
    if not isinstance(said, QuotaSettings):
        return QuotaPolicy()
    units = {name: amounts(parts) for name, parts in (said.units or {}).items()}
    named = [dimension_name(one) for one in said.dimensions or ()] if said.default_limit == ZERO else []
    return QuotaPolicy(
        frozenset(part for name in named for part in units.get(name, {name: 0})),
        units,
        said.baremetal_hosts is True,
        {**WARN_AT, **(warn_at_of(said.warn_at) or {})},
    )


# The names of the fields in the scheduler's policy.
_POLICY: Final = {
    "min_runtime_seconds": "min_runtime_seconds",
    "grace_period_seconds": "grace_seconds",
    "quota_backoff_seconds": "quota_backoff_seconds",
    "preemption": "preemption",
    "backfill": "backfill",
    "energy_price": "energy_price",
}
_MAY_BE_ZERO: Final = frozenset(
    {"kill_grace_seconds", "clock_skew_seconds", "throttle_seconds_max", "reconcile_seconds"}
)
# Upper bounds of settings that limit how much may be held for a lease.
_CREDIT_MOST: Final = {
    "lease_seconds": 86_400,
    "reserve_seconds": 7 * 86_400,
    "extend_seconds_max": 30 * 86_400,
    "throttle_seconds_max": 86_400,
    "drift_account_hours": 31 * 24,
    "reconcile_seconds": 30 * 86_400,
    "seal_seconds": 86_400,
    "entry_days": 3_650,
    "key_days": 3_650,
}
_CREDIT_AMOUNTS: Final = frozenset({"drift_credits", "drift_account_credits"})
_CREDIT_NAMES: Final = {one.name: one.encode_name for one in msgspec.structs.fields(CreditSettings)}
_decode = msgspec.json.Decoder(Settings).decode


def policy_of(doc: bytes) -> dict[str, Any]:
    """The stored scheduling settings, by the names of the policy's fields."""
    spec = _decode(doc).spec
    said = spec.scheduling if isinstance(spec, SettingsSpec) else UNSET
    if isinstance(said, UnsetType):
        return {}
    return {ours: value for name, ours in _POLICY.items() if (value := getattr(said, name)) is not UNSET}


@lru_cache(16)
def budget_period_days_of(doc: bytes) -> int:
    """The number of days before now that count for the budgets of tenants, by the stored settings."""
    spec = _decode(doc).spec
    said = spec.scheduling if isinstance(spec, SettingsSpec) else UNSET
    days = said.budget_period_days if isinstance(said, SchedulingSettings) else UNSET
    return days if isinstance(days, int) else BUDGET_PERIOD_DAYS


@lru_cache(16)
def record_days_of(doc: bytes) -> int:
    """The number of days for which records of work are kept, by the stored settings."""
    spec = _decode(doc).spec
    said = spec.usage if isinstance(spec, SettingsSpec) else UNSET
    days = said.record_days if isinstance(said, UsageSettings) else UNSET
    return days if isinstance(days, int) else RECORD_DAYS


@lru_cache(16)
def patience_of(doc: bytes) -> Patience:
    """The time limits for silent nodes, by the stored settings, with defaults."""
    spec = _decode(doc).spec
    said = spec.nodes if isinstance(spec, SettingsSpec) else UNSET
    return _patience(said) if isinstance(said, NodeSettings) else Patience()


def _patience(said: NodeSettings) -> Patience:
    given = {name: getattr(said, name) for name in said.__struct_fields__}
    return Patience(**{name: value for name, value in given.items() if value is not UNSET})


@lru_cache(16)
def credit_policy_of(doc: bytes) -> CreditPolicy:
    """The credit policy, by the stored settings, with defaults."""
    spec = _decode(doc).spec
    said = spec.credits if isinstance(spec, SettingsSpec) else UNSET
    return _credit_policy(said) if isinstance(said, CreditSettings) else CreditPolicy()


def _credit_policy(said: CreditSettings) -> CreditPolicy:
    given = {name: value for name in said.__struct_fields__ if (value := getattr(said, name)) is not UNSET}
    for name in _CREDIT_AMOUNTS & given.keys():
        given[name] = nanocredits(given[name])
    return CreditPolicy(**given)


def _credit_faults(path: str, said: CreditSettings) -> Iterator[Cause]:
    for name, most in _CREDIT_MOST.items():
        value, shown = getattr(said, name), _CREDIT_NAMES[name]
        least = 0 if name in _MAY_BE_ZERO else 1
        if isinstance(value, int) and not least <= value <= most:
            yield field_fault(f"{path}.{shown}", f"must be between {least} and {most}, got {value}")
    for name in (*sorted(_CREDIT_AMOUNTS), "credit_value"):
        value = getattr(said, name)
        try:
            if value is not UNSET and nanocredits(value) < 0:
                yield field_fault(f"{path}.{_CREDIT_NAMES[name]}", f"must not be negative, got {value}")
        except MoneyError as error:
            yield field_fault(f"{path}.{_CREDIT_NAMES[name]}", str(error))


def _node_faults(path: str, said: NodeSettings) -> Iterator[Cause]:
    for field in msgspec.structs.fields(NodeSettings):
        value, least = getattr(said, field.name), 0 if field.name in _MAY_BE_ZERO else 1
        if isinstance(value, int) and not least <= value <= SECONDS_MAX:
            yield field_fault(f"{path}.{field.encode_name}", f"must be between {least} and {SECONDS_MAX}, got {value}")
    meant = _patience(said)
    for name, value, other, above in (
        ("notReadySeconds", meant.not_ready_seconds, "heartbeatSeconds", meant.heartbeat_seconds),
        ("lostSeconds", meant.lost_seconds, "notReadySeconds", meant.not_ready_seconds),
        ("runLeaseSeconds", meant.run_lease_seconds, "heartbeatSeconds", meant.heartbeat_seconds),
    ):
        if value <= above:
            yield field_fault(f"{path}.{name}", f"must be above {other}, which is {above}, got {value}")


def _scheduling_faults(path: str, said: SchedulingSettings) -> Iterator[Cause]:
    for name, value in (
        ("minRuntimeSeconds", said.min_runtime_seconds),
        ("gracePeriodSeconds", said.grace_period_seconds),
        ("quotaBackoffSeconds", said.quota_backoff_seconds),
    ):
        if isinstance(value, int) and not 0 <= value <= SECONDS_MAX:
            yield field_fault(f"{path}.{name}", f"must be between 0 and {SECONDS_MAX}, got {value}")
    price = said.energy_price
    if isinstance(price, float | int) and not 0 <= price <= 1:
        yield field_fault(f"{path}.energyPrice", f"must be between 0 (the cheapest) and 1 (the dearest), got {price:g}")
    days = said.budget_period_days
    if isinstance(days, int) and not 1 <= days <= BUDGET_PERIOD_DAYS_MAX:
        yield field_fault(f"{path}.budgetPeriodDays", f"must be between 1 and {BUDGET_PERIOD_DAYS_MAX}, got {days}")
    if isinstance(said.user_priority_max, int):
        yield from priority_faults(f"{path}.userPriorityMax", said.user_priority_max)
    least = said.gpu_fraction_min
    if isinstance(least, float | int) and not 0 <= least <= 1:
        yield field_fault(
            f"{path}.gpuFractionMin", f"must be between 0 (any) and 1 (whole devices only), got {least:g}"
        )
    if said.gpu_fractions is not UNSET and said.gpu_fractions not in (TRUSTED, REFUSED):
        yield field_fault(f"{path}.gpuFractions", f"must be {TRUSTED} or {REFUSED}")
    keys = said.reserved_taints if isinstance(said.reserved_taints, list) else []
    if len(keys) > RESERVED_MAX:
        yield field_fault(f"{path}.reservedTaints", f"may have at most {RESERVED_MAX} entries, got {len(keys)}")
    for index, key in enumerate(keys[:RESERVED_MAX]):
        if not _RESERVED.fullmatch(key):
            yield field_fault(f"{path}.reservedTaints[{index}]", "must be a key, or begin one and end in .* or /*")


def _quota_faults(path: str, said: QuotaSettings) -> Iterator[Cause]:
    if said.default_limit is not UNSET and said.default_limit not in DEFAULT_LIMITS:
        yield field_fault(f"{path}.defaultLimit", f"must be one of {', '.join(DEFAULT_LIMITS)}")
    if said.default_limit == ZERO and not said.dimensions:
        yield field_fault(f"{path}.dimensions", "is required with defaultLimit zero: it covers these")
    yield from amounts_faults(f"{path}.dimensions", dict.fromkeys(said.dimensions or (), 0))
    units = said.units or {}
    yield from amounts_faults(f"{path}.units", dict.fromkeys(units, 0))
    for name, parts in units.items():
        yield from _unit_faults(f"{path}.units[{name[:63]}]", name, parts, units)
    yield from warn_at_faults(f"{path}.warnAt", said.warn_at)


def _unit_faults(path: str, name: str, parts: Mapping[str, Quantity], units: Collection[str]) -> Iterator[Cause]:
    if is_bytes(name) or name == PENDING_REQUESTS:
        yield field_fault(path, "is the name of a resource: units have names of their own")
    if not parts:
        yield field_fault(path, "stands for nothing: name at least one amount")
    faults = amounts_faults(path, parts)
    yield from faults
    if faults:
        return
    for part, amount in amounts(parts).items():
        if part in units:
            yield field_fault(f"{path}[{part}]", "is a unit itself: name amounts of dimensions")
        elif amount == 0:
            yield field_fault(f"{path}[{part}]", "must be more than 0")


def _usage_faults(path: str, spec: SettingsSpec) -> Iterator[Cause]:
    """Budgets are counted to the second, which needs the records of their whole window."""
    days = spec.usage.record_days if isinstance(spec.usage, UsageSettings) else UNSET
    if not isinstance(days, int):
        return
    said = spec.scheduling.budget_period_days if isinstance(spec.scheduling, SchedulingSettings) else UNSET
    period = said if isinstance(said, int) else BUDGET_PERIOD_DAYS
    if not 1 <= days <= RECORD_DAYS_MAX:
        yield field_fault(f"{path}.recordDays", f"must be between 1 and {RECORD_DAYS_MAX}, got {days}")
    elif days <= period:
        yield field_fault(f"{path}.recordDays", f"must be above budgetPeriodDays, which is {period}, got {days}")


def _check(settings: Settings) -> list[Cause]:
    faults: list[Cause] = []
    if settings.metadata.name != SYSTEM:
        faults.append(field_fault("metadata.name", f"there is one object of this kind, named {SYSTEM}"))
    if isinstance(settings.spec, SettingsSpec):
        faults += amounts_faults("spec.limits", settings.spec.limits)
        if isinstance(settings.spec.scheduling, SchedulingSettings):
            faults += _scheduling_faults("spec.scheduling", settings.spec.scheduling)
        if isinstance(settings.spec.nodes, NodeSettings):
            faults += _node_faults("spec.nodes", settings.spec.nodes)
        if isinstance(settings.spec.credits, CreditSettings):
            faults += _credit_faults("spec.credits", settings.spec.credits)
        faults += _usage_faults("spec.usage", settings.spec)
        if isinstance(settings.spec.quotas, QuotaSettings):
            faults += _quota_faults("spec.quotas", settings.spec.quotas)
    return faults


SETTINGS = Kind(
    name="Settings",
    plural="settings",
    type=Settings,
    namespaced=False,
    description="System-wide limits and defaults.",
    uid_prefix="settings",
    access=KindAccess(AccessGroup.SYSTEM),
    check=_check,
    columns=(Column("Limits", lambda document: show_amounts((document.get("spec") or {}).get("limits"))),),
    in_tree=True,
    built_in=frozenset({SYSTEM}),
)
