"""Tier: default limits for the tenants that name it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core import tree
from bursar.core.refusal import Cause
from bursar.wire.kind import Column, Kind
from bursar.wire.limits import amounts, amounts_faults, show_amounts
from bursar.wire.meta import ObjectMeta, Quantity, Text, Wire


class TierSpec(Wire):
    limits: dict[str, Quantity] | UnsetType = UNSET
    weight: int | float | UnsetType = UNSET
    description: Text = UNSET


class Tier(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: TierSpec | UnsetType = UNSET


def to_tree(tier: Tier) -> tree.Tier:
    spec = tier.spec if isinstance(tier.spec, TierSpec) else TierSpec()
    return tree.Tier(str(tier.metadata.name), amounts(spec.limits))


def _check(tier: Tier) -> list[Cause]:
    return amounts_faults("spec.limits", tier.spec.limits) if isinstance(tier.spec, TierSpec) else []


TIER = Kind(
    name="Tier",
    plural="tiers",
    type=Tier,
    namespaced=False,
    description="Default limits for the tenants that name it.",
    uid_prefix="tier",
    check=_check,
    columns=(Column("Limits", lambda document: show_amounts((document.get("spec") or {}).get("limits"))),),
    in_tree=True,
)
