"""Namespace: a container of objects, owned by exactly one tenant, which a label names."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from bursar.core.objects.object import Stored
from bursar.core.quota import tenant_tree
from bursar.core.values.access import AccessGroup, KindAccess, Role, RoleGrant
from bursar.core.values.names import dns_label
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Column, Kind, Object, column
from bursar.wire.shared.meta import Condition, ObjectMeta, Text, Wire, given

TENANT_LABEL = "bursar.io/tenant"
DEFAULT_TENANT = "default"


class NamespaceSpec(Wire):
    finalizers: list[str] | UnsetType = UNSET
    quota_required: bool | UnsetType = UNSET  # whether amounts that none of its ResourceQuotas limits are refused


class NamespaceStatus(Wire):
    phase: Text = UNSET
    conditions: list[Condition] | UnsetType = UNSET


class Namespace(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: NamespaceSpec | UnsetType = UNSET
    status: NamespaceStatus | UnsetType = UNSET


def tenant_of(one: Object) -> str:
    """The tenant that the label of an object names."""
    labels = one.metadata.labels
    return (labels.get(TENANT_LABEL) if isinstance(labels, dict) else None) or DEFAULT_TENANT


def to_tree(namespace: Namespace) -> tenant_tree.Namespace:
    return tenant_tree.Namespace(
        str(namespace.metadata.name), tenant_of(namespace), terminating=given(namespace.metadata.deletion_timestamp),
        quota_required=isinstance(namespace.spec, NamespaceSpec) and namespace.spec.quota_required is True,
    )  # fmt: skip


def _check(namespace: Namespace) -> list[Cause]:
    return [field_fault("metadata.name", fault) for fault in dns_label(str(namespace.metadata.name))]


def adopt_by_label(one: Object, tenant: str) -> None:
    """Assign an object without a tenant label to its creator's tenant."""
    _label(one, tenant or DEFAULT_TENANT)


def keep_label(before: Stored, one: Object) -> None:
    """Keep the tenant label when a client leaves it out."""
    _label(one, before.tenant)


def _label(one: Object, tenant: str) -> None:
    one.metadata.labels = {TENANT_LABEL: tenant, **(one.metadata.labels or {})}


def _first_status(_: Namespace, __: str) -> dict[str, Any]:
    return {"phase": "Active"}


NAMESPACE = Kind(
    name="Namespace",
    plural="namespaces",
    type=Namespace,
    namespaced=False,
    description="A container of objects that belong to one tenant.",
    short_names=("ns",),
    uid_prefix="ns",
    # A marketplace order creates the tenant's first namespace, and a portal labels those of its projects.
    access=KindAccess(AccessGroup.BOUNDS, (RoleGrant((Role.SERVICE,), ("create", "update", "patch")),)),
    check=_check,
    selectable=("status.phase",),
    fields=lambda one: {"status.phase": "Terminating" if given(one.metadata.deletion_timestamp) else "Active"},
    first_status=_first_status,
    columns=(
        column("Status", "status.phase"),
        Column("Tenant", lambda document: str((document["metadata"].get("labels") or {}).get(TENANT_LABEL, ""))),
    ),
    in_tree=True,
    built_in=frozenset({"default"}),
    has_status=True,
    owner=tenant_of,
    adopt=adopt_by_label,
    keep=keep_label,
    # Its objects are deleted first, and the loop that empties namespaces removes it.
    may_go=lambda _, __: False,
    words={
        "NamespaceSpec.quotaRequired": "Refuse work that uses a resource without a limit in a ResourceQuota.",
    },
)
