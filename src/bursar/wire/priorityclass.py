"""PriorityClass: a name for a priority."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.refusal import Cause, field_fault
from bursar.wire.kind import Kind, column
from bursar.wire.meta import ObjectMeta, Text, Wire

PRIORITY_MAX = 1_000_000_000


class PriorityClass(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    value: int
    global_default: bool | UnsetType = UNSET
    preemption_policy: Text = UNSET
    description: Text = UNSET


def _check(one: PriorityClass) -> list[Cause]:
    faults = priority_faults("value", one.value)
    if one.preemption_policy not in (UNSET, "PreemptLowerPriority", "Never"):
        faults.append(field_fault("preemptionPolicy", "must be PreemptLowerPriority or Never"))
    return faults


def priority_faults(field: str, value: int) -> list[Cause]:
    if not -PRIORITY_MAX <= value <= PRIORITY_MAX:
        return [field_fault(field, f"must be between -{PRIORITY_MAX} and {PRIORITY_MAX}, got {value}")]
    return []


PRIORITY_CLASS = Kind(
    name="PriorityClass",
    plural="priorityclasses",
    type=PriorityClass,
    namespaced=False,
    description="A name for a priority.",
    short_names=("pc",),
    uid_prefix="pc",
    check=_check,
    columns=(column("Value", "value", type="integer"), column("Global-Default", "globalDefault", default="False")),
)
