"""The state that Bursar should have for an allocation: one tenant per project, one namespace per allocation.

The namespace has one ResourceQuota with the allocation's amounts; the tenant's limits are the sums over the project's
allocations. Users of the allocation are members of the tenant; managers of the project administer it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from coldfront.core.allocation.models import Allocation
from coldfront.core.project.models import Project
from django.conf import settings

from bursar.core.values.quantity import amount, format_amount
from bursar_coldfront.mapping import Rule, load_rules, quantities

# "Active (Needs Renewal)" is a status of NERC's plugin.
ACTIVE = ("Active", "Renewal Requested", "Active (Needs Renewal)")
ENDED = ("Expired", "Revoked", "Denied")
MEMBER = ("Active",)
_NOT_IN_NAMES = re.compile(r"[^a-z0-9-]+")


class OnEnd(StrEnum):
    """The effect of the end of an allocation on its work."""

    KEEP = "keep"  # limits and work stay
    FREEZE = "freeze"  # limits become 0: nothing new starts, what runs goes on
    RELEASE = "release"  # the namespace is deleted: its work is stopped with its grace


@dataclass(frozen=True, slots=True)
class Wanted:
    """The wanted state of one allocation and of its project."""

    tenant: str
    namespace: str
    number: int
    project_number: int
    display_name: str
    quota: dict[str, str] | None  # None: the namespace is deleted
    limits: dict[str, str] = field(default_factory=dict)  # of the tenant
    members: dict[str, str] = field(default_factory=dict)  # role by user


def setting(name: str, default: Any = None) -> Any:
    return getattr(settings, f"BURSAR_{name}", default)


def is_governed(allocation: Allocation) -> bool:
    """Whether an allocation is for a resource that Bursar governs: one that BURSAR_RESOURCES names."""
    names = set(setting("RESOURCES", ()))
    return any(resource.name in names for resource in allocation.resources.all())


def rules() -> dict[str, Rule]:
    return load_rules(Path(setting("MAPPING")))


def tenant_name(project_pk: int) -> str:
    return f"{setting('PREFIX', 'cf')}-{project_pk}"


def namespace_name(project_pk: int, allocation_pk: int) -> str:
    return f"{tenant_name(project_pk)}-{allocation_pk}"


def wanted_of(allocation: Allocation, number: int, project_number: int) -> Wanted:
    """The wanted state for an allocation as it is now."""
    project = allocation.project
    known = rules()
    return Wanted(
        tenant_name(project.pk),
        namespace_name(project.pk, allocation.pk),
        number,
        project_number,
        project.title,
        quota_of(allocation, known),
        limits_of(project, known),
        members_of(project),
    )


def wanted_gone(project: Project | None, project_pk: int, allocation_pk: int, number: int, total: int) -> Wanted:
    """The wanted state for an allocation that was deleted."""
    known = rules()
    return Wanted(
        tenant_name(project_pk),
        namespace_name(project_pk, allocation_pk),
        number,
        total,
        project.title if project is not None else "",
        None,
        limits_of(project, known) if project is not None else {},
        members_of(project) if project is not None else {},
    )


def quota_of(allocation: Allocation, known: dict[str, Rule]) -> dict[str, str] | None:
    """The hard limits of the allocation's namespace: its amounts while active, and after its end as was chosen."""
    amounts = quantities(known, ((one.allocation_attribute_type.name, one.value) for one in attributes_of(allocation)))
    status = allocation.status.name
    if status in ACTIVE:
        return amounts
    choice = OnEnd(setting("ON_END", OnEnd.KEEP)) if status == "Expired" else OnEnd(setting("ON_REVOKE", OnEnd.FREEZE))
    if status not in ENDED:
        choice = OnEnd.FREEZE  # New, Pending, Payment Pending: not active yet.
    if choice is OnEnd.RELEASE:
        return None
    return amounts if choice is OnEnd.KEEP else dict.fromkeys((rule.dimension for rule in known.values()), "0")


def attributes_of(allocation: Allocation) -> Iterable[Any]:
    return allocation.allocationattribute_set.select_related("allocation_attribute_type").all()


def limits_of(project: Project, known: dict[str, Rule]) -> dict[str, str]:
    """The tenant's limits: the sums over the namespaces of the project's allocations."""
    sums: dict[str, int] = dict.fromkeys((rule.dimension for rule in known.values()), 0)
    for allocation in project.allocation_set.all():
        if is_governed(allocation):
            for dimension, quantity in (quota_of(allocation, known) or {}).items():
                sums[dimension] = sums.get(dimension, 0) + amount(dimension, quantity)
    return {dimension: format_amount(dimension, value) for dimension, value in sorted(sums.items())}


def members_of(project: Project) -> dict[str, str]:
    """The members of the tenant: users of an allocation of the project, and the project's managers."""
    users = {
        one.user.username: "user"
        for allocation in project.allocation_set.all()
        if is_governed(allocation) and allocation.status.name in ACTIVE
        for one in allocation.allocationuser_set.select_related("user", "status").all()
        if one.status.name in MEMBER
    }
    managers = {
        one.user.username: "tenant-admin"
        for one in project.projectuser_set.select_related("user", "role", "status").all()
        if one.role.name == "Manager" and one.status.name == "Active"
    }
    return users | managers | {project.pi.username: "tenant-admin"}
