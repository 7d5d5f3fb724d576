"""ResourceQuota: hard and soft limits on what a namespace may use, as Kubernetes writes them."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.quota import tenant_tree
from bursar.core.values.access import WRITE, AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Column, Kind
from bursar.wire.shared.limits import amounts, amounts_faults, canonical
from bursar.wire.shared.meta import ObjectMeta, Quantity, Text, Wire, given

SCOPES = ("Terminating", "NotTerminating", "BestEffort", "NotBestEffort", "PriorityClass")
OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


class ScopeRequirement(Wire):
    scope_name: str
    operator: str
    values: list[str] | UnsetType = UNSET


class ScopeSelector(Wire):
    match_expressions: list[ScopeRequirement] | UnsetType = UNSET


class ResourceQuotaSpec(Wire):
    hard: dict[str, Quantity] | UnsetType = UNSET
    soft: dict[str, Quantity] | UnsetType = UNSET
    scopes: list[str] | UnsetType = UNSET
    scope_selector: ScopeSelector | UnsetType = UNSET
    enforcement: Text = UNSET


class ResourceQuotaStatus(Wire):
    hard: dict[str, Quantity] | UnsetType = UNSET
    used: dict[str, Quantity] | UnsetType = UNSET
    soft: dict[str, Quantity] | UnsetType = UNSET
    bound: dict[str, Quantity] | UnsetType = UNSET
    utilization: dict[str, str] | UnsetType = UNSET
    trend: dict[str, str] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ResourceQuota(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: ResourceQuotaSpec | UnsetType = UNSET
    status: ResourceQuotaStatus | UnsetType = UNSET


def to_tree(quota: ResourceQuota) -> tenant_tree.ResourceQuota:
    spec = quota.spec if isinstance(quota.spec, ResourceQuotaSpec) else ResourceQuotaSpec()
    return tenant_tree.ResourceQuota(
        namespace=str(quota.metadata.namespace),
        name=str(quota.metadata.name),
        hard=amounts(spec.hard),
        soft=amounts(spec.soft),
        terms=_terms(spec),
        enforcement=tenant_tree.Enforcement(spec.enforcement or tenant_tree.Enforcement.REJECT),
    )


def _terms(spec: ResourceQuotaSpec) -> tuple[tenant_tree.ScopeTerm, ...]:
    terms = [tenant_tree.ScopeTerm(scope, "Exists") for scope in spec.scopes or ()]
    selector = spec.scope_selector
    expressions = (selector.match_expressions if isinstance(selector, ScopeSelector) else UNSET) or ()
    terms += [tenant_tree.ScopeTerm(one.scope_name, one.operator, frozenset(one.values or ())) for one in expressions]
    return tuple(terms)


def _check(quota: ResourceQuota) -> list[Cause]:
    if not isinstance(quota.spec, ResourceQuotaSpec):
        return [field_fault("spec", "is required, with at least one limit in hard or soft")]
    spec = quota.spec
    faults = amounts_faults("spec.hard", spec.hard) + amounts_faults("spec.soft", spec.soft)
    if not given(spec.hard) and not given(spec.soft):
        faults.append(field_fault("spec.hard", "name at least one limit in hard or soft"))
    if spec.enforcement is not UNSET and spec.enforcement not in tuple(tenant_tree.Enforcement):
        faults.append(field_fault("spec.enforcement", f"must be one of {', '.join(tenant_tree.Enforcement)}"))
    for index, scope in enumerate(spec.scopes or ()):
        if scope not in SCOPES:
            faults.append(
                field_fault(f"spec.scopes[{index}]", f"unknown scope {scope[:63]!r}; known: {', '.join(SCOPES)}")
            )
    faults += _contradictions(spec)
    selector = spec.scope_selector
    for index, one in enumerate((selector.match_expressions if isinstance(selector, ScopeSelector) else UNSET) or ()):
        faults += _requirement_faults(f"spec.scopeSelector.matchExpressions[{index}]", one)
    return faults


def _normalise(quota: ResourceQuota) -> None:
    """Write quantities in Kubernetes' canonical form."""
    if isinstance(quota.spec, ResourceQuotaSpec):
        if isinstance(quota.spec.hard, dict):
            quota.spec.hard = dict(canonical(quota.spec.hard))
        if isinstance(quota.spec.soft, dict):
            quota.spec.soft = dict(canonical(quota.spec.soft))


def _contradictions(spec: ResourceQuotaSpec) -> list[Cause]:
    scopes = set(spec.scopes or ())
    pairs = (("Terminating", "NotTerminating"), ("BestEffort", "NotBestEffort"))
    return [
        field_fault("spec.scopes", f"{one} and {other} can never hold together")
        for one, other in pairs
        if {one, other} <= scopes
    ]


def _requirement_faults(path: str, one: ScopeRequirement) -> list[Cause]:
    faults: list[Cause] = []
    if one.scope_name not in SCOPES:
        faults.append(
            field_fault(f"{path}.scopeName", f"unknown scope {one.scope_name[:63]!r}; known: {', '.join(SCOPES)}")
        )
    if one.operator not in OPERATORS:
        faults.append(field_fault(f"{path}.operator", f"must be one of {', '.join(OPERATORS)}"))
    elif one.scope_name != "PriorityClass" and one.operator != "Exists":
        faults.append(field_fault(f"{path}.operator", f"must be Exists for scope {one.scope_name}"))
    elif (one.operator in ("In", "NotIn")) != bool(one.values):
        faults.append(field_fault(f"{path}.values", "In and NotIn need values, Exists and DoesNotExist take none"))
    return faults


def _requests(document: dict[str, Any]) -> str:
    status = document.get("status") or {}
    used, hard = status.get("used") or {}, status.get("hard") or (document.get("spec") or {}).get("hard") or {}
    return ", ".join(f"{name}: {used.get(name, '0')}/{value}" for name, value in sorted(hard.items())) or "<none>"


RESOURCE_QUOTA = Kind(
    name="ResourceQuota",
    plural="resourcequotas",
    type=ResourceQuota,
    namespaced=True,
    description="Hard and soft limits on what a namespace may use.",
    short_names=("quota",),
    uid_prefix="quota",
    access=KindAccess(AccessGroup.BOUNDS, (RoleGrant((Role.SERVICE,), WRITE),)),
    check=_check,
    columns=(Column("Used/Hard", _requests),),
    normalise=_normalise,
    in_tree=True,
    has_status=True,
    words={
        "ResourceQuotaSpec.hard": "Hard limits of usage, by resource.",
        "ResourceQuotaSpec.soft": "Limits above which responses carry a warning, by resource.",
        "ResourceQuotaSpec.scopes": "Counts only objects in all of these scopes.",
        "ResourceQuotaSpec.scopeSelector": "Counts only objects that match.",
        "ResourceQuotaStatus.used": "Present usage, by resource.",
    },
    example={
        "metadata": {"name": "ml-team-quota", "namespace": "ml-team"},
        "spec": {
            "hard": {
                "cpu": "10000",
                "memory": "40Ti",
                "nvidia.com/gpu": "100",
                "pods": "5000",
                "persistentvolumeclaims": "200",
                "services": "100",
            },
            "soft": {"cpu": "8000", "memory": "32Ti", "nvidia.com/gpu": "80"},
            "scopes": ["NotTerminating"],
            "scopeSelector": {
                "matchExpressions": [
                    {"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority", "normal"]}
                ]
            },
        },
    },
)
