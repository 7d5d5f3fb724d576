"""Settings: system-wide limits and defaults, one object named `system`."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.refusal import Cause, field_fault
from bursar.wire.kind import Column, Kind
from bursar.wire.limits import amounts, amounts_faults, show_amounts
from bursar.wire.meta import ObjectMeta, Quantity, Text, Wire

SYSTEM = "system"


class SettingsSpec(Wire):
    # Hard limits on the whole system, dimension by dimension.
    limits: dict[str, Quantity] | UnsetType = UNSET


class Settings(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: SettingsSpec | UnsetType = UNSET


def to_tree(settings: Settings) -> dict[str, int]:
    return amounts(settings.spec.limits) if isinstance(settings.spec, SettingsSpec) else {}


def _check(settings: Settings) -> list[Cause]:
    faults: list[Cause] = []
    if settings.metadata.name != SYSTEM:
        faults.append(field_fault("metadata.name", f"there is one object of this kind, named {SYSTEM}"))
    if isinstance(settings.spec, SettingsSpec):
        faults += amounts_faults("spec.limits", settings.spec.limits)
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
