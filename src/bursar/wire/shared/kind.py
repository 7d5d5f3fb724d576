"""`Kind` describes a kind of object to the generic code, which asks its hooks and never its name.

A new kind is one file in `wire/kinds/` that ends in a `Kind`; the registry finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.objects.object import Stored
from bursar.core.values.access import SYSTEM_ONLY, AccessGroup, KindAccess
from bursar.core.values.refusal import Cause
from bursar.wire.shared.meta import Wire

Object = Any  # a Struct with api_version, kind, metadata, spec and status
Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the server-side table; `wide` ones show only with `-o wide`."""

    name: str
    value: Callable[[dict[str, Any]], str]
    type: str = "string"
    wide: bool = False
    description: str = ""


def _no_fields(_: Object) -> Fields:
    return {}


def _no_faults(_: Object) -> list[Cause]:
    return []


def _no_charge(_: Object) -> Charge:
    return NOTHING


def _leave(_: Object) -> None:
    return None


def _no_status(_: Object, __: str) -> dict[str, Any]:
    return {}


def _no_owner(_: Object) -> str:
    return ""


def _adopt_nothing(_: Object, __: str) -> None:
    return None


def _keep_nothing(_: Stored, __: Object) -> None:
    return None


def _may_go(_: Stored, __: Collection[str]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class AllocationDemand:
    """Allocations of one spec that have to run at the same time for an object to run at all."""

    spec: Any  # an AllocationSpec
    members: int = 1
    path: str = "spec"  # the path of the spec in the object


@dataclass(frozen=True, slots=True)
class TenantGrant:
    """The list in which an object that every tenant may read names tenants; readers see the names they may know."""

    path: str  # spec.tenants
    figures: tuple[str, ...] = ()  # fields of the status that are for the named tenants alone
    own: bool = False  # whether the node of the object's name reads it unchanged


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    plural: str
    type: type[Wire]
    namespaced: bool
    description: str
    short_names: tuple[str, ...] = ()
    uid_prefix: str = ""
    # The verbs that each role may use on it; system administrators only, by default.
    access: KindAccess = SYSTEM_ONLY
    # Faults of a well-typed object, by field.
    check: Callable[[Object], list[Cause]] = _no_faults
    # What fieldSelector may ask for, beside metadata.name and metadata.namespace.
    selectable: tuple[str, ...] = ()
    fields: Callable[[Object], Fields] = _no_fields
    # The amounts that count from the moment it is accepted, in bytes or thousandths: `quantity.amount`.
    charge: Callable[[Object], Charge] = _no_charge
    # The status a new object starts with, given the time.
    first_status: Callable[[Object, str], dict[str, Any]] = _no_status
    columns: tuple[Column, ...] = ()
    # Strategic merge patch: dotted field path → the key that identifies an element of that list.
    merge_keys: Mapping[str, str] = field(default_factory=dict)
    # Whether its spec may change after creation; labels and annotations always may.
    mutable_spec: bool = True
    # Puts a checked object into the form in which it is stored.
    normalise: Callable[[Object], None] = _leave
    # Whether its existence or spec is part of the tree, which every charge holds still, or changes only with it.
    in_tree: bool = False
    # Names of objects that cannot be deleted: whatever has no owner falls to them.
    built_in: frozenset[str] = frozenset()
    # Whether its status is written at a path of its own.
    has_status: bool = False
    # Whether `kubectl get all` lists it, as all that tenants run.
    in_all: bool = False
    # Whether an exceeded quota is answered with 403, as Kubernetes does for pods, instead of 409.
    forbidden_by_quota: bool = False
    # The tenant that an object without a namespace belongs to.
    owner: Callable[[Object], str] = _no_owner
    # Completes a new object by its creator's tenant, before the owner is asked.
    adopt: Callable[[Object, str], None] = _adopt_nothing
    # Copies the fields that a new version keeps from the stored one, whatever the client sent.
    keep: Callable[[Stored, Object], None] = _keep_nothing
    # Whether an object that is being deleted is removed with the last of these finalizers.
    may_go: Callable[[Stored, Collection[str]], bool] = _may_go
    # The queue that it waits in; None for kinds that never wait.
    queue: Callable[[Object], str] | None = None
    # The demand that must fit onto the nodes for it ever to run; None for kinds that need no node.
    demand: Callable[[Object], AllocationDemand] | None = None
    # Whether it is bound to nodes, whose agents see it then.
    placed: bool = False
    # Whether it offers resources, so that a change of it changes what can ever be placed.
    offers_resources: bool = False
    # Whether others only refer to it by name, so that a check of its existence may be a second old.
    only_named: bool = False
    # Verbs whose events only the tenant of the actor sees.
    private_verbs: frozenset[str] = frozenset()
    # The path at which it names tenants that not every reader may know of.
    names_tenants: TenantGrant | None = None
    # For the documentation: descriptions by `Schema.field`, and the body of an object.
    words: Mapping[str, str] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def visible_to_all(self) -> bool:
        """Whether its objects belong to no tenant and are visible to all."""
        return self.access.group is AccessGroup.CATALOGUE

    @property
    def singular(self) -> str:
        return self.name.lower()


# The submitter.
USER_FIELD = "status.user"


def user_field(user: str) -> Fields:
    """The field of the submitter. Without one there is no field; a selector takes both for empty."""
    return {USER_FIELD: user} if user else {}


def read(document: Mapping[str, Any], path: str, default: Any = "") -> Any:
    """The value at a dotted path of a plain document."""
    value: Any = document
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            return default
        value = value[step]
    return value


def column(name: str, path: str, *, type: str = "string", wide: bool = False, default: str = "") -> Column:  # noqa: A002
    """A column that shows one field."""
    return Column(name, lambda document: str(read(document, path, default)), type, wide)
