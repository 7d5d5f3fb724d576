"""Role-based access control (RBAC): the rules of each role, and the visibility of objects.

Every request passes two checks. `Policy.allows` decides whether the role may use the verb on this kind of resource; a
refusal is 403. `reach` decides whose objects the identity may see; an object outside of it is answered with 404, never
403, so that nobody learns the names of another tenant's objects. The second check needs the object, so the code that
loads the object makes it.

Deny by default: a request that no rule covers is refused, and a verb or resource that the policy does not know is
refused to every role, system administrators included. A kind of object brings its own access (`KindAccess`); the other
resources are listed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Final

from bursar.core.values.refusal import Code, Refusal


class Role(StrEnum):
    """A role of an identity: the key of the table of grants."""

    SYSTEM_ADMIN = "system-admin"
    TENANT_ADMIN = "tenant-admin"
    USER = "user"
    VIEWER = "viewer"
    NODE = "node"
    APPROVER = "approver"
    BILLING_ADMIN = "billing-admin"
    SERVICE = "service"


TenantName = tuple[str, str]  # a tenant's name and uid
EVERY: Final = "*"  # every tenant, or every gate


@dataclass(frozen=True, slots=True)
class Identity:
    """The authenticated caller of a request.

    `bootstrap` marks the single-use token with which a node joins; it allows nothing else.
    """

    user: str
    role: Role
    tenant: str = ""
    node: str = ""
    token_id: str = ""
    bootstrap: bool = False
    tenant_uid: str = ""  # distinguishes tenants of the same name: a deleted tenant's name can be reused
    tenants: tuple[TenantName, ...] = ()  # of an approver: the tenants whose requests it decides, with their subtrees
    gates: tuple[str, ...] = ()  # of an approver: the gates that it decides

    @property
    def actor(self) -> str:
        """The name that the audit log records."""
        if self.role is Role.NODE:
            return f"node:{self.node}"
        if self.role is Role.SERVICE:
            return f"service:{self.user}"
        # User names are unique within a tenant only.
        return f"user:{self.tenant}/{self.user}" if self.role in _OF_A_TENANT else f"user:{self.user}"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """A rule that allows some verbs on some resources.

    `jobs` is the kind without its subresources, `jobs/status` one subresource, `jobs/*` all of them, `*/approval` that
    subresource of every kind, and `*` everything.
    """

    verbs: tuple[str, ...]
    resources: tuple[str, ...]

    def covers(self, verb: str, resource: str, subresource: str) -> bool:
        return (verb in self.verbs or ANY in self.verbs) and self._names(resource, subresource)

    def _names(self, resource: str, subresource: str) -> bool:
        if ANY in self.resources:
            return True
        if not subresource:
            return resource in self.resources
        wanted = (f"{resource}/{subresource}", f"{resource}/{ANY}", f"{ANY}/{subresource}")
        return any(name in self.resources for name in wanted)


@dataclass(frozen=True, slots=True)
class Reach:
    """The objects that an identity may see: all, those of a tenant (and its subtree), or those bound to a node."""

    everything: bool = False
    tenant: str = ""
    subtree: bool = False
    node: str = ""
    tenant_uid: str = ""  # empty: any tenant of that name
    tenants: tuple[TenantName, ...] = ()  # with their subtrees

    def sees(self, lineage: Iterable[str]) -> bool:
        """Whether it covers an object. `lineage` is the object's tenant, the tenant's parent, and so on to the root."""
        if self.everything:
            return True
        if self.tenants:
            return not {name for name, _ in self.tenants}.isdisjoint(lineage)
        if not self.tenant:
            return False
        path = tuple(lineage)
        return self.tenant in (path if self.subtree else path[:1])

    def sees_account(self, lineage: Iterable[str], owner: str, user: str) -> bool:
        """Whether `user` sees the account of `owner` in a tenant: users see their own account, and the tenant's pool,
        which pays for users without an account."""
        return self.sees(lineage) and (self.everything or self.subtree or owner in ("", user))

    def sees_bound(self, nodes: Collection[str]) -> bool:
        """Whether it covers an object by the nodes that the object is bound to."""
        return self.everything or (bool(self.node) and self.node in nodes)


ANY = "*"
NAME_CHARS_MAX = 253
SUBRESOURCE_CHARS_MAX = 63
READ = ("get", "list", "watch")
WRITE = ("create", "update", "patch", "delete", "deletecollection")
OURS = (
    "approve", "bind", "boost", "cancel", "claim", "close", "cordon", "drain", "evict", "explain", "extend", "fence",
    "preempt", "refund", "release", "simulate", "topup", "wipe",
)  # fmt: skip
VERBS = frozenset((*READ, *WRITE, *OURS))


class AccessGroup(StrEnum):
    """The roles that read and write a kind as a matter of course."""

    CATALOGUE = "catalogue"  # describes the cluster and belongs to no tenant: every role reads it
    WORK = "work"  # made and run by tenants: their people read it, and their users write it
    BOUNDS = "bounds"  # holds or bounds work inside a tenant: its people read it, its administrators write it
    SYSTEM = "system"  # the system's administrators write it; approvers and services read it


@dataclass(frozen=True, slots=True)
class RoleGrant:
    """Verbs on a kind, or on parts of it, that some roles have beyond the kind's group."""

    roles: tuple[str, ...]
    verbs: tuple[str, ...]
    parts: tuple[str, ...] = ("",)  # the empty part is the kind itself, `*` is every part


@dataclass(frozen=True, slots=True)
class KindAccess:
    """Access to a kind of object: its group, and what single roles may do beyond that."""

    group: AccessGroup = AccessGroup.SYSTEM
    grants: tuple[RoleGrant, ...] = ()


SYSTEM_ONLY = KindAccess()


# Resources that are no kinds of objects.
REPORTS = ("approvals", "claims", "events", "gangs", "metrics", "pods", "quotas", "usage")
MONEY = (
    "accounts", "adjustments", "balance", "entries", "forecast", "leases", "limits", "prices", "refunds", "statements",
    "topups",
)  # fmt: skip
# The ledger belongs to no tenant: verifying it verifies every account.
SYSTEM = ("approvalpolicies", "certificates", "changes", "ledger", "preemptions", "tokens", "webhooks")
REVIEWS = ("selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews")
# Names reserved for kinds to come. A kind of this name brings its own access, and its name is dropped here.
RESERVED_WORK = (
    "resourceclaims", "apps", "deploys", "environments", "execsessions", "ipv4addresses", "logstreams", "releases",
    "restorejobs", "routes", "snapshots", "volumeattachments", "volumes", "workloads",
)  # fmt: skip

# A joining node uses its bootstrap token once; afterwards it authenticates with its certificate or its own token.
JOINING = "node (bootstrap token)"
# A service whose token names tenants, such as a portal: it manages the tenants below these.
DELEGATE = "service (of tenants)"
OF_TENANTS = (Role.TENANT_ADMIN, Role.USER, Role.VIEWER)
USING = (Role.TENANT_ADMIN, Role.USER)  # submit work, and spend credit
# Views of namespaces, identities and members in the words of another API, which portals speak.
_PORTALS = RoleGrant((Role.SERVICE, DELEGATE), WRITE)
VIEWS: Final[Mapping[str, KindAccess]] = {
    "projectrequests": KindAccess(AccessGroup.SYSTEM, (_PORTALS, RoleGrant((DELEGATE,), (*READ, "explain")))),
    "projects": KindAccess(AccessGroup.SYSTEM, (_PORTALS, RoleGrant((*OF_TENANTS, DELEGATE), (*READ, "explain")))),
    "rolebindings": KindAccess(AccessGroup.BOUNDS, (RoleGrant((Role.SERVICE,), WRITE),)),
    "useridentitymappings": KindAccess(AccessGroup.SYSTEM, (_PORTALS, RoleGrant((DELEGATE,), (*READ, "explain")))),
}


def lesser_role(one: Role, other: Role) -> Role:
    """The role that may do less, of two roles of a tenant."""
    return max(one, other, key=OF_TENANTS.index)


def _with_parts(resources: Iterable[str]) -> tuple[str, ...]:
    """The resources with all their subresources: status, quotas, usage, logs."""
    return tuple(name for resource in resources for name in (resource, f"{resource}/{ANY}"))


class Policy:
    """The access rules of all roles, for the resources listed here and the kinds of objects there are."""

    def __init__(self, kinds: Mapping[str, KindAccess], requestable: Collection[str] = ()) -> None:
        self.requestable = tuple(requestable)
        groups = {
            group: tuple(plural for plural, access in kinds.items() if access.group is group) for group in AccessGroup
        }
        self.catalogue = groups[AccessGroup.CATALOGUE]
        reserved = tuple(plural for plural in RESERVED_WORK if plural not in kinds)
        self.resources = frozenset((*kinds, *reserved, *REPORTS, *MONEY, *SYSTEM, *REVIEWS))
        work, bounds = (*groups[AccessGroup.WORK], *reserved), groups[AccessGroup.BOUNDS]
        self.everybody = (
            # No other subresource: a node's evictions show tenants' work.
            AccessRule(READ, (*self.catalogue, *(f"{plural}/status" for plural in self.catalogue))),
            AccessRule(("create",), REVIEWS),
        )
        own = _rules_of_roles(work, bounds, self.catalogue, self.resources, self.requestable)
        granted = {who: _merged(rules, who, kinds) for who, rules in own.items()}
        self.joining = granted.pop(JOINING)
        self.delegated = (*self.everybody, *granted.pop(DELEGATE))
        self.grants = {
            Role(who): rules if who == Role.SYSTEM_ADMIN else (*self.everybody, *rules)
            for who, rules in granted.items()
        }
        self.judged = lru_cache(4096)(self._allows)

    def allows(self, identity: Identity, verb: str, resource: str, subresource: str = "") -> bool:
        """Whether the identity may use the verb on this kind of resource; `reach` decides on single objects."""
        # Only known words reach the cache: callers may ask about any text, and the cache keeps its keys.
        known = (verb in VERBS or verb == ANY) and (resource in self.resources or resource == ANY)
        if not known or len(subresource) > SUBRESOURCE_CHARS_MAX:
            return False
        return self.judged(identity.role, identity.bootstrap, is_delegate(identity), verb, resource, subresource)

    def rules(self, identity: Identity) -> tuple[AccessRule, ...]:
        """All rules of the identity, as SelfSubjectRulesReview lists them."""
        return self._granted(identity.role, bootstrap=identity.bootstrap, delegate=is_delegate(identity))

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (role, verbs, resources) of the access table in the documentation."""
        everybody = [("everybody", rule) for rule in self.everybody]
        own = [(str(role), rule) for role, rules in self.grants.items() for rule in rules if rule not in self.everybody]
        own += [(DELEGATE, rule) for rule in self.delegated if rule not in self.everybody]
        joining = [(JOINING, rule) for rule in self.joining]
        return [(who, ", ".join(rule.verbs), ", ".join(rule.resources)) for who, rule in (*everybody, *own, *joining)]

    def _allows(
        self, role: Role, bootstrap: bool, delegate: bool, verb: str, resource: str, subresource: str
    ) -> bool:  # fmt: skip
        granted = self._granted(role, bootstrap=bootstrap, delegate=delegate)
        return any(rule.covers(verb, resource, subresource) for rule in granted)

    def _granted(self, role: Role, *, bootstrap: bool, delegate: bool) -> tuple[AccessRule, ...]:
        if delegate:
            return self.delegated
        return self.joining if bootstrap else self.grants[role]


def is_delegate(identity: Identity) -> bool:
    """Whether it is a service whose token names tenants: it manages the tenants below these, and nothing else."""
    return identity.role is Role.SERVICE and bool(identity.tenants) and (EVERY, "") not in identity.tenants


def _rules_of_roles(
    work: tuple[str, ...],
    bounds: tuple[str, ...],
    catalogue: tuple[str, ...],
    resources: frozenset[str],
    requestable: tuple[str, ...],
) -> dict[str, tuple[AccessRule, ...]]:
    """The rules of each role, but for the grants that kinds bring and the rules of everybody."""
    read_tenant = AccessRule((*READ, "explain"), _with_parts((*work, *bounds, *REPORTS, *MONEY)))
    use_tenant = (
        AccessRule((*WRITE, "cancel", "release", "simulate"), work),
        AccessRule(("update", "patch"), ("workloads/scale",)),
        # A lease spends the caller's own credit.
        AccessRule(("create", "extend", "close"), ("leases",)),
    )
    return {
        Role.SYSTEM_ADMIN: (AccessRule((ANY,), (ANY,)),),
        Role.TENANT_ADMIN: (
            read_tenant,
            *use_tenant,
            AccessRule(WRITE, bounds),
            AccessRule((*READ, "create", "delete"), ("tokens",)),
            # Of tenants below theirs, and only kinds that grant them the verb.
            AccessRule(("approve",), ("approvals",)),
        ),
        Role.USER: (read_tenant, *use_tenant),
        Role.VIEWER: (read_tenant,),
        Role.NODE: (
            AccessRule(("get", "extend", "close"), ("leases",)),
            AccessRule(("create",), ("usage", "certificates")),
        ),
        Role.APPROVER: (
            # Without resources of no tenant, as webhooks, and parts of the catalogue, as evictions on a node: they name
            # tenants for which the approver does not decide.
            AccessRule((*READ, "explain"), _with_parts(sorted(resources - {*SYSTEM, *catalogue}))),
            AccessRule(("get", "update", "patch"), (f"{ANY}/approval",)),
            AccessRule(("approve",), (*requestable, "approvals")),
        ),
        Role.BILLING_ADMIN: (
            AccessRule(READ, _with_parts((*MONEY, *REPORTS, "ledger"))),
            AccessRule(
                ("create", "update", "patch"), ("accounts", "adjustments", "limits", "prices", "refunds", "topups")
            ),
            AccessRule(("topup", "refund"), ("accounts",)),
            AccessRule(("delete",), ("prices",)),
        ),
        Role.SERVICE: (
            AccessRule((*READ, "explain"), (ANY,)),
            AccessRule(("create", "update", "patch"), ("limits", "topups")),
            AccessRule(("topup",), ("accounts",)),
            AccessRule(("create", "extend", "close"), ("leases",)),
            AccessRule(("create",), ("usage",)),
        ),
        JOINING: (AccessRule(("create",), ("certificates",)),),
        DELEGATE: (
            AccessRule((*READ, "explain"), _with_parts((*work, *bounds, *REPORTS))),
            AccessRule(WRITE, bounds),
        ),
    }


def _merged(rules: tuple[AccessRule, ...], who: str, kinds: Mapping[str, KindAccess]) -> tuple[AccessRule, ...]:
    """A role's rules with the grants that kinds bring: one rule for each set of verbs."""
    merged = {rule.verbs: rule for rule in rules}
    assert len(merged) == len(rules), f"two rules of {who} have the same verbs"
    for plural, access in kinds.items():
        for grant in (one for one in access.grants if who in one.roles):
            before = merged[grant.verbs].resources if grant.verbs in merged else ()
            named = tuple(f"{plural}/{part}" if part else plural for part in grant.parts)
            merged[grant.verbs] = AccessRule(grant.verbs, (*before, *named))
    return tuple(merged.values())


def tenant_name(stored: str) -> TenantName:
    """The name and uid of a tenant that is stored as NAME@UID; `*` stands for every tenant."""
    name, _, uid = stored.partition("@")
    return name, uid


_SEE_EVERYTHING = frozenset({Role.SYSTEM_ADMIN, Role.SERVICE, Role.BILLING_ADMIN})
_OF_A_TENANT = frozenset(OF_TENANTS)


def reach(identity: Identity) -> Reach:
    """The objects that the identity may see."""
    if identity.bootstrap:
        return Reach()
    if (EVERY, "") in identity.tenants or (identity.role in _SEE_EVERYTHING and not identity.tenants):
        return Reach(everything=True)
    if identity.role is Role.APPROVER or identity.tenants:
        return Reach(tenants=identity.tenants)
    if identity.role is Role.NODE:
        return Reach(node=identity.node)
    return Reach(tenant=identity.tenant, subtree=identity.role is Role.TENANT_ADMIN, tenant_uid=identity.tenant_uid)


def grantable(identity: Identity) -> frozenset[Role]:
    """The roles that an identity may give to a token; `reach` decides for which tenants."""
    if identity.role is Role.SYSTEM_ADMIN:
        return frozenset(Role)
    if identity.role is Role.TENANT_ADMIN:
        return _OF_A_TENANT
    return frozenset()


def identity_fault(role: Role, *, user: str, tenant: str, node: str) -> str:
    """The fault of an identity with this role, as a sentence; empty if it is valid."""
    if role in _OF_A_TENANT and not tenant:
        return f"role {role} belongs to a tenant: name one"
    if role is Role.NODE and not node:
        return "role node belongs to one node: name it"
    if role is not Role.NODE and node:
        return f"role {role} belongs to no node: leave the node out"
    if "/" in user and role not in _OF_A_TENANT:
        # The audit log would show it as a tenant's user.
        return f"the name of a user with role {role}, who belongs to no tenant, must not contain a slash"
    for what, name in (("user", user), ("tenant", tenant), ("node", node)):
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            return f"the {what}'s name must be printable and have at most {NAME_CHARS_MAX} characters"
    return ""


def unauthenticated(message: str, hint: str = "run `bursar login`, or send a valid token") -> Refusal:
    """Refuse a caller without valid credentials; the message ends with the hint."""
    return Refusal(Code.UNAUTHENTICATED, f"{message}; {hint}", hint)
