"""LimitRange: default, least and greatest resources of the work in a namespace, as Kubernetes writes them.

Bursar stores it for clients that expect it, and enforces nothing of it: ResourceQuotas and tenants' limits bound work.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.values.access import WRITE, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Column, Kind
from bursar.wire.shared.limits import amounts_faults
from bursar.wire.shared.meta import ObjectMeta, Quantity, Text, Wire

LIMITS_MAX = 64


class LimitRangeItem(Wire):
    type: str
    default: dict[str, Quantity] | UnsetType = UNSET
    default_request: dict[str, Quantity] | UnsetType = UNSET
    min: dict[str, Quantity] | UnsetType = UNSET
    max: dict[str, Quantity] | UnsetType = UNSET
    max_limit_request_ratio: dict[str, Quantity] | UnsetType = UNSET


class LimitRangeSpec(Wire):
    limits: list[LimitRangeItem]


class LimitRange(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: LimitRangeSpec


def _check(one: LimitRange) -> list[Cause]:
    if len(one.spec.limits) > LIMITS_MAX:
        return [field_fault("spec.limits", f"may have at most {LIMITS_MAX} entries, got {len(one.spec.limits)}")]
    return [fault for index, item in enumerate(one.spec.limits) for fault in _faults(f"spec.limits[{index}]", item)]


def _faults(path: str, item: LimitRangeItem) -> list[Cause]:
    faults = [] if item.type else [field_fault(f"{path}.type", "is required, for example Container")]
    for name, given in (
        ("default", item.default),
        ("defaultRequest", item.default_request),
        ("min", item.min),
        ("max", item.max),
        ("maxLimitRequestRatio", item.max_limit_request_ratio),
    ):
        faults += amounts_faults(f"{path}.{name}", given)
    return faults


def _types(document: dict[str, Any]) -> str:
    return ", ".join(str(item.get("type", "")) for item in document["spec"].get("limits", ())) or "<none>"


LIMIT_RANGE = Kind(
    name="LimitRange",
    plural="limitranges",
    type=LimitRange,
    namespaced=True,
    description="Default, least and greatest resources of work in a namespace; stored, not enforced.",
    short_names=("limits",),
    uid_prefix="limits",
    access=KindAccess(AccessGroup.BOUNDS, (RoleGrant((Role.SERVICE,), WRITE),)),
    check=_check,
    columns=(Column("Types", _types),),
    words={
        "LimitRangeSpec.limits": "The bounds, one entry per type.",
        "LimitRangeItem.type": "The type of the bounded thing, for example Container.",
    },
    example={
        "metadata": {"name": "defaults", "namespace": "ml-team"},
        "spec": {"limits": [{"type": "Container", "default": {"cpu": "1", "memory": "4Gi"}}]},
    },
)
