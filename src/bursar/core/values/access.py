"""Who may do what: one table of roles and verbs, and how far each identity sees.

Two questions are asked of every request. `allows` says whether the role may use the verb on this kind of thing at all:
a no is 403. `reach` says whose objects it may be used on: what lies outside is answered as if it did not exist, 404
and never 403, so that nobody learns the names of another tenant's things. The second question needs the object, so it
is put by whoever has loaded it.

Deny by default: what no rule names is refused, and a verb or a resource that this file does not know is refused to
everybody, the system's administrators included. A new kind is added to one of the groups below.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from bursar.core.values.refusal import Code, Refusal


class Role(StrEnum):
    SYSTEM_ADMIN = "system-admin"
    TENANT_ADMIN = "tenant-admin"
    USER = "user"
    VIEWER = "viewer"
    NODE = "node"
    APPROVER = "approver"
    BILLING_ADMIN = "billing-admin"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is asking. `bootstrap` marks the single-use token with which a node joins, good for nothing else."""

    user: str
    role: Role
    tenant: str = ""
    node: str = ""
    token_id: str = ""
    bootstrap: bool = False
    tenant_uid: str = ""  # which tenant of that name: names are given anew

    @property
    def actor(self) -> str:
        """The name under which what was done is recorded."""
        if self.role is Role.NODE:
            return f"node:{self.node}"
        if self.role is Role.SERVICE:
            return f"service:{self.user}"
        # Two tenants may each have an ann.
        return f"user:{self.tenant}/{self.user}" if self.role in _OF_A_TENANT else f"user:{self.user}"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """These verbs on these resources.

    `jobs` is the kind itself and none of its parts, `jobs/status` one part, `jobs/*` every part, `*/approval` that part
    of every kind, and `*` everything.
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
    """Whose objects an identity may see: everybody's, a tenant's (with those below it), or what is bound to a node."""

    everything: bool = False
    tenant: str = ""
    subtree: bool = False
    node: str = ""
    tenant_uid: str = ""  # empty: whoever has the name

    def sees(self, lineage: Iterable[str]) -> bool:
        """Whether it sees an object whose tenant, that tenant's parent and so on up to the root are these."""
        if self.everything:
            return True
        if not self.tenant:
            return False
        path = tuple(lineage)
        return self.tenant in (path if self.subtree else path[:1])

    def sees_account(self, lineage: Iterable[str], owner: str, user: str) -> bool:
        """Whether it sees an account of `owner` within a tenant, as `user` of that tenant: users see their own, and the
        tenant's, which pays for those who have none."""
        return self.sees(lineage) and (self.everything or self.subtree or owner in ("", user))

    def sees_bound(self, nodes: Collection[str]) -> bool:
        """Whether it sees an object because of the nodes it is bound to."""
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

# What everybody may read: it describes the cluster, and belongs to no tenant.
CATALOGUE = ("nodes", "priorityclasses", "queues", "tiers")
# What tenants make and run.
WORK = (
    "allocations", "jobs", "resourceclaims",
    "apps", "deploys", "environments", "execsessions", "ipv4addresses", "logstreams", "releases", "restorejobs",
    "routes", "snapshots", "volumeattachments", "volumes", "workloads",
)  # fmt: skip
# Where it lives, and what bounds it inside the tenant.
BOUNDS = ("namespaces", "resourcequotas")
# What is told about it.
REPORTS = ("claims", "events", "gangs", "metrics", "pods", "usage")
MONEY = (
    "accounts", "adjustments", "balance", "entries", "forecast", "leases", "limits", "prices", "refunds", "statements",
    "topups",
)  # fmt: skip
# The ledger as a whole is nobody's: what is proven of it is proven of everybody's accounts.
SYSTEM = (
    "approvalpolicies", "certificates", "changes", "ledger", "preemptions", "settings", "tenants", "tokens", "webhooks",
)  # fmt: skip
REVIEWS = ("selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews")
RESOURCES = frozenset((*CATALOGUE, *WORK, *BOUNDS, *REPORTS, *MONEY, *SYSTEM, *REVIEWS))


def _with_parts(*kinds: str) -> tuple[str, ...]:
    """Whoever may read a kind may read its parts: status, quotas, usage, logs."""
    return tuple(name for kind in kinds for name in (kind, f"{kind}/{ANY}"))


_EVERYBODY = (
    # No other part: what is said of a node's evictions is said of tenants' work.
    AccessRule(READ, (*CATALOGUE, *(f"{kind}/status" for kind in CATALOGUE))),
    AccessRule(("create",), REVIEWS),
)

_READ_TENANT = AccessRule((*READ, "explain"), _with_parts(*WORK, *BOUNDS, *REPORTS, *MONEY, "tenants"))

_USE_TENANT = (
    AccessRule((*WRITE, "cancel", "release", "simulate"), WORK),
    AccessRule(("update", "patch"), ("workloads/scale",)),
    AccessRule(("update",), ("allocations/stdin",)),
    # Sensitive nodes are claimed by the person who will work on them.
    AccessRule(("claim", "release"), ("nodes",)),
    # A lease spends the caller's own credit.
    AccessRule(("create", "extend", "close"), ("leases",)),
)

GRANTS: dict[Role, tuple[AccessRule, ...]] = {
    Role.SYSTEM_ADMIN: (AccessRule((ANY,), (ANY,)),),
    Role.TENANT_ADMIN: (
        *_EVERYBODY,
        _READ_TENANT,
        *_USE_TENANT,
        AccessRule(WRITE, BOUNDS),
        AccessRule((*READ, "create", "delete"), ("tokens",)),
    ),
    Role.USER: (*_EVERYBODY, _READ_TENANT, *_USE_TENANT),
    Role.VIEWER: (*_EVERYBODY, _READ_TENANT),
    Role.NODE: (
        *_EVERYBODY,
        AccessRule(("get", "update", "patch"), ("nodes/status",)),
        AccessRule(READ, ("nodes/evictions",)),
        AccessRule(READ, ("allocations", "allocations/status")),
        AccessRule(("update", "patch"), ("allocations/status",)),
        AccessRule(("get", "extend", "close"), ("leases",)),
        AccessRule(("create",), ("usage", "certificates")),
    ),
    Role.APPROVER: (
        *_EVERYBODY,
        AccessRule((*READ, "explain"), _with_parts(*sorted(RESOURCES - {"tokens"}))),
        AccessRule(("get", "update", "patch"), ("*/approval",)),
        AccessRule(("approve",), WORK),
    ),
    Role.BILLING_ADMIN: (
        *_EVERYBODY,
        AccessRule(READ, _with_parts(*MONEY, *REPORTS, "tenants", "ledger")),
        AccessRule(("create", "update", "patch"), ("accounts", "adjustments", "limits", "prices", "refunds", "topups")),
        AccessRule(("topup", "refund"), ("accounts",)),
        AccessRule(("delete",), ("prices",)),
    ),
    Role.SERVICE: (
        *_EVERYBODY,
        AccessRule((*READ, "explain"), (ANY,)),
        AccessRule(("create", "update", "patch"), ("tenants", "tiers", "limits", "topups")),
        # A tenant that was ordered is given a place for its work.
        AccessRule(("create",), ("namespaces",)),
        AccessRule(("topup",), ("accounts",)),
        AccessRule(("create", "extend", "close"), ("leases",)),
        AccessRule(("create",), ("usage",)),
    ),
}

# A node that joins proves itself once, and from then on by what it was given.
_BOOTSTRAP = (AccessRule(("create",), ("nodes", "certificates")),)

_SEE_EVERYTHING = frozenset({Role.SYSTEM_ADMIN, Role.SERVICE, Role.APPROVER, Role.BILLING_ADMIN})
_OF_A_TENANT = frozenset({Role.TENANT_ADMIN, Role.USER, Role.VIEWER})


def allows(identity: Identity, verb: str, resource: str, subresource: str = "") -> bool:
    """Whether the identity may use the verb on this kind of thing; whose things is the question of `reach`."""
    # Only known words reach the cache, for it keeps them, and callers may ask about any text they like.
    known = (verb in VERBS or verb == ANY) and (resource in RESOURCES or resource == ANY)
    if not known or len(subresource) > SUBRESOURCE_CHARS_MAX:
        return False
    return _allows(identity.role, identity.bootstrap, verb, resource, subresource)


@lru_cache(4096)
def _allows(role: Role, bootstrap: bool, verb: str, resource: str, subresource: str) -> bool:
    granted = _BOOTSTRAP if bootstrap else GRANTS[role]
    return any(rule.covers(verb, resource, subresource) for rule in granted)


def rules(identity: Identity) -> tuple[AccessRule, ...]:
    """Everything the identity may do, as SelfSubjectRulesReview tells it."""
    return _BOOTSTRAP if identity.bootstrap else GRANTS[identity.role]


def reach(identity: Identity) -> Reach:
    """Whose objects the identity may see."""
    if identity.bootstrap:
        return Reach()
    if identity.role in _SEE_EVERYTHING:
        return Reach(everything=True)
    if identity.role is Role.NODE:
        return Reach(node=identity.node)
    return Reach(tenant=identity.tenant, subtree=identity.role is Role.TENANT_ADMIN, tenant_uid=identity.tenant_uid)


def grantable(identity: Identity) -> frozenset[Role]:
    """The roles an identity may give in a token; for which tenants is the question of `reach`."""
    if identity.role is Role.SYSTEM_ADMIN:
        return frozenset(Role)
    if identity.role is Role.TENANT_ADMIN:
        return _OF_A_TENANT
    return frozenset()


def identity_fault(role: Role, *, user: str, tenant: str, node: str) -> str:
    """What is wrong with an identity of this role, as a sentence; empty when nothing is."""
    if role in _OF_A_TENANT and not tenant:
        return f"role {role} belongs to a tenant: name one"
    if role is Role.NODE and not node:
        return "role node belongs to one node: name it"
    if role is not Role.NODE and node:
        return f"role {role} belongs to no node: leave the node out"
    if "/" in user and role not in _OF_A_TENANT:
        # It would be recorded as the name of a tenant's user.
        return f"the name of a user with role {role}, who belongs to no tenant, must not contain a slash"
    for what, name in (("user", user), ("tenant", tenant), ("node", node)):
        if len(name) > NAME_CHARS_MAX or not name.isprintable():
            return f"the {what}'s name must be printable and have at most {NAME_CHARS_MAX} characters"
    return ""


def unauthenticated(message: str, hint: str = "run `bursar login`, or send a valid token") -> Refusal:
    """Who is asking is not known; the message ends in what to do about it."""
    return Refusal(Code.UNAUTHENTICATED, f"{message}; {hint}", hint)


def table() -> list[tuple[str, str, str]]:
    """The rows (role, verbs, resources) of the table in the documentation."""
    everybody = [("everybody", rule) for rule in _EVERYBODY]
    own = [(str(role), rule) for role, granted in GRANTS.items() for rule in granted if rule not in _EVERYBODY]
    joining = [("node (bootstrap token)", rule) for rule in _BOOTSTRAP]
    return [(who, ", ".join(rule.verbs), ", ".join(rule.resources)) for who, rule in (*everybody, *own, *joining)]
