"""`Kind`: the description of a kind of objects for generic code, which calls its hooks and never compares its name.

A new kind is one file in `wire/kinds/` that ends in a `Kind`; the registry finds it there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.core.objects.charge import NOTHING, Amounts, Charge
from bursar.core.objects.object import Stored
from bursar.core.values.access import SYSTEM_ONLY, AccessGroup, KindAccess
from bursar.core.values.names import dns_subdomain
from bursar.core.values.refusal import Cause
from bursar.core.values.replace import replace
from bursar.wire.shared.meta import API_VERSION, Wire

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


def _no_name(_: Object) -> str:
    return ""


def _adopt_nothing(_: Object, __: str) -> None:
    return None


def _keep_nothing(_: Stored, __: Object) -> None:
    return None


def _grant_nothing(_: Amounts) -> dict[str, Any]:
    return {}


def _end_nothing(_: str, __: str, ___: str) -> dict[str, Any]:
    return {}


def _may_go(_: Stored, __: Collection[str]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class AllocationDemand:
    """Allocations of one spec that must run at the same time for an object to run at all."""

    spec: Any  # an AllocationSpec
    members: int = 1
    path: str = "spec"  # the path of the spec in the object


@dataclass(frozen=True, slots=True)
class TenantGrant:
    """The list in which an object that all tenants may read names tenants; readers see only the names they may know."""

    path: str  # spec.tenants
    figures: tuple[str, ...] = ()  # status fields that only the named tenants see
    own: bool = False  # whether the node of this name reads it unfiltered


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    plural: str
    type: type[Wire]
    namespaced: bool
    description: str
    # The group and version of its API; the default is Bursar's own, with paths below /api/v1.
    api_version: str = API_VERSION
    short_names: tuple[str, ...] = ()
    uid_prefix: str = ""
    # The verbs that each role may use; by default, only system administrators.
    access: KindAccess = SYSTEM_ONLY
    # Faults of a well-typed object, by field.
    check: Callable[[Object], list[Cause]] = _no_faults
    # Fields of fieldSelector, besides metadata.name and metadata.namespace.
    selectable: tuple[str, ...] = ()
    fields: Callable[[Object], Fields] = _no_fields
    # The amounts charged from acceptance on, in bytes or thousandths: `quantity.amount`. Amounts of a kind that is not
    # `placed` count as bound from then on too: a tenant that enforces by queueing limits bound work only.
    charge: Callable[[Object], Charge] = _no_charge
    # The initial status of an object, given the time.
    first_status: Callable[[Object, str], dict[str, Any]] = _no_status
    columns: tuple[Column, ...] = ()
    # Strategic merge patch: dotted field path → the key that identifies an element of that list.
    merge_keys: Mapping[str, str] = field(default_factory=dict)
    # Whether its spec may change after creation; labels and annotations always may.
    mutable_spec: bool = True
    # Puts a checked object into its stored form.
    normalise: Callable[[Object], None] = _leave
    # Whether its existence or spec is part of the tree: then it changes only under the tree's exclusive lock.
    in_tree: bool = False
    # Names of objects that cannot be deleted: defaults that other objects fall back to.
    built_in: frozenset[str] = frozenset()
    # Whether its status has a path of its own.
    has_status: bool = False
    # Whether `kubectl get all` lists it, as it does everything that tenants run.
    in_all: bool = False
    # Whether an exceeded quota is answered with 403, as Kubernetes does for pods, instead of 409.
    forbidden_by_quota: bool = False
    # The tenant that owns an object without a namespace.
    owner: Callable[[Object], str] = _no_owner
    # The tenant above an object that is a tenant itself; None for other kinds.
    above: Callable[[Object], str] | None = None
    # The name that the spec determines; empty for kinds whose objects are named freely.
    derived_name: Callable[[Object], str] = _no_name
    # Faults of the name of a new object.
    name_faults: Callable[[str], list[str]] = dns_subdomain
    # Whether its objects are removed with the tenant that owns them.
    ends_with_tenant: bool = False
    # The selectable field of the user that an object makes a member of its tenant, by which the user is
    # authenticated; empty for other kinds.
    member_field: str = ""
    # Completes a new object from its creator's tenant, before `owner` is called.
    adopt: Callable[[Object, str], None] = _adopt_nothing
    # Copies fields that clients cannot change from the stored version to a new one.
    keep: Callable[[Stored, Object], None] = _keep_nothing
    # Whether an object that is being deleted is removed together with these last finalizers.
    may_go: Callable[[Stored, Collection[str]], bool] = _may_go
    # The queue of an object; None for kinds without one.
    queue: Callable[[Object], str] | None = None
    # The demand that must fit onto nodes for the object ever to run; None for kinds that need no node.
    demand: Callable[[Object], AllocationDemand] | None = None
    # Whether objects are bound to nodes, whose agents see them then.
    placed: bool = False
    # Whether objects offer resources, so that their changes affect which work can ever be placed.
    offers_resources: bool = False
    # Whether its status names the user who submitted it.
    submitted: bool = False
    # Whether others refer to it only by name, so that an existence check may use a cache of one second.
    only_named: bool = False
    # Whether new objects are requests that pass the approval gates of their tenant.
    requestable: bool = False
    # The amounts that approving a request charges, where its own charge does not say: it charges by others.
    requested: Callable[[Object], Amounts] | None = None
    # The gates of its requests where the tenant's policy names none. They charge nothing, so that the quota gate would
    # pass them all: it does not count.
    gates: tuple[str, ...] = ()
    # The part of the status that shows the amounts in force, which stay while growth is pending.
    granted: Callable[[Amounts], dict[str, Any]] = _grant_nothing
    # The part of the status after its request was denied or has expired, given the reason, a message and the time.
    refused: Callable[[str, str, str], dict[str, Any]] = _end_nothing
    # Whether its charge is kept until its finalizers are gone, because what it stands for exists until then; only
    # services and administrators change these.
    charged_until_gone: bool = False
    # Verbs whose events only the tenant of the actor sees.
    private_verbs: frozenset[str] = frozenset()
    # The path of a list of tenants that not every reader may know.
    names_tenants: TenantGrant | None = None
    # Documentation: descriptions by `Schema.field`, and of the request body.
    words: Mapping[str, str] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def visible_to_all(self) -> bool:
        """Whether its objects belong to no tenant and are visible to all."""
        return self.access.group is AccessGroup.CATALOGUE

    @property
    def root(self) -> str:
        """The path of its API."""
        return root_path(self.api_version)

    @property
    def singular(self) -> str:
        return self.name.lower()

    def charge_of(self, one: Object) -> Charge:
        """The charge of an object that is not bound to a node yet."""
        charge = self.charge(one)
        return charge if self.placed or not charge.accepted else replace(charge, bound=charge.accepted)


def root_path(api_version: str) -> str:
    """The path of an API: `/api/v1`, or that of a group and version."""
    return f"/{'apis' if '/' in api_version else 'api'}/{api_version}"


# The submitter.
USER_FIELD = "status.user"


def user_field(user: str) -> Fields:
    """The fields of the submitter. Without one there is no field; selectors treat both as empty."""
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
