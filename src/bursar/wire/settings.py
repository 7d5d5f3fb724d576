"""Settings: system-wide limits, and how the scheduler decides. One object, named `system`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from bursar.core.duration import SECONDS_MAX
from bursar.core.refusal import Cause, field_fault
from bursar.wire.kind import Column, Kind
from bursar.wire.limits import amounts, amounts_faults, show_amounts
from bursar.wire.meta import ObjectMeta, Quantity, Text, Wire

SYSTEM = "system"


class SchedulingSettings(Wire):
    """How the scheduler decides, where it is not to decide as it does by default."""

    min_runtime_seconds: int | UnsetType = UNSET  # what has not run so long is not preempted
    grace_period_seconds: int | UnsetType = UNSET  # how long the preempted may take to end
    quota_backoff_seconds: int | UnsetType = UNSET
    preemption: bool | UnsetType = UNSET
    backfill: bool | UnsetType = UNSET


class SettingsSpec(Wire):
    # Hard limits on the whole system, dimension by dimension.
    limits: dict[str, Quantity] | UnsetType = UNSET
    scheduling: SchedulingSettings | UnsetType = UNSET


class Settings(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: SettingsSpec | UnsetType = UNSET


def to_tree(settings: Settings) -> dict[str, int]:
    return amounts(settings.spec.limits) if isinstance(settings.spec, SettingsSpec) else {}


# As the scheduler's policy calls them.
_POLICY: Final = {
    "min_runtime_seconds": "min_runtime_seconds",
    "grace_period_seconds": "grace_seconds",
    "quota_backoff_seconds": "quota_backoff_seconds",
    "preemption": "preemption",
    "backfill": "backfill",
}
_decode = msgspec.json.Decoder(Settings).decode


def policy_of(doc: bytes) -> dict[str, Any]:
    """What the stored settings say about scheduling, by the names of the policy's fields."""
    spec = _decode(doc).spec
    said = spec.scheduling if isinstance(spec, SettingsSpec) else UNSET
    if isinstance(said, UnsetType):
        return {}
    return {ours: value for name, ours in _POLICY.items() if (value := getattr(said, name)) is not UNSET}


def _scheduling_faults(path: str, said: SchedulingSettings) -> Iterator[Cause]:
    for name, value in (
        ("minRuntimeSeconds", said.min_runtime_seconds),
        ("gracePeriodSeconds", said.grace_period_seconds),
        ("quotaBackoffSeconds", said.quota_backoff_seconds),
    ):
        if isinstance(value, int) and not 0 <= value <= SECONDS_MAX:
            yield field_fault(f"{path}.{name}", f"must be between 0 and {SECONDS_MAX}, got {value}")


def _check(settings: Settings) -> list[Cause]:
    faults: list[Cause] = []
    if settings.metadata.name != SYSTEM:
        faults.append(field_fault("metadata.name", f"there is one object of this kind, named {SYSTEM}"))
    if isinstance(settings.spec, SettingsSpec):
        faults += amounts_faults("spec.limits", settings.spec.limits)
        if isinstance(settings.spec.scheduling, SchedulingSettings):
            faults += _scheduling_faults("spec.scheduling", settings.spec.scheduling)
    return faults


SETTINGS = Kind(
    name="Settings",
    plural="settings",
    type=Settings,
    namespaced=False,
    description="System-wide limits and defaults.",
    uid_prefix="settings",
    check=_check,
    columns=(Column("Limits", lambda document: show_amounts((document.get("spec") or {}).get("limits"))),),
    in_tree=True,
)
