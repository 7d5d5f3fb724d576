"""The tenant tree: tenants and their parents, tiers, namespaces, ResourceQuotas, system limits and priority classes.

It determines the counters that a charge raises, and the permits of work (permit.py). It changes rarely and every write
reads it, so it is an immutable value: a change makes a new tree. Writers hold a shared lock on the tree's row, so that
they read the tree in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from bursar.core.credit.billing_terms import NOTHING_SAID, Billing, BillingTerms, CreditPolicy, StatedTerms, terms_of
from bursar.core.objects.approval import NO_APPROVAL, PENDING_REQUESTS, ApprovalPolicy
from bursar.core.objects.ask import Toleration
from bursar.core.objects.charge import Charge, Facts
from bursar.core.objects.object import Key
from bursar.core.quota.units import QuotaPolicy, limits_in_parts
from bursar.core.values.access import Reach
from bursar.core.values.quantity import UNLIMITED

SYSTEM_SCOPE = "system"
KNOWN_ROWS_MAX = 50_000

# Limits of tenants that neither they nor their tier set.
DEFAULT_LIMITS: Mapping[str, int] = {PENDING_REQUESTS: 1000 * 1000}

Row = tuple[str, str]  # (scope, dimension): the key of one counter
WarnAt = Mapping[str, tuple[int, ...]]  # percentages of a limit by dimension


class Enforcement(StrEnum):
    """The effect of an exceeded hard limit on a new object."""

    REJECT = "Reject"  # the object is refused
    QUEUE = "Queue"  # the object is accepted, and pending until the limit has headroom


@dataclass(frozen=True, slots=True)
class PermitPolicy:
    """The system's defaults for permits. The minimum of device fractions is in thousandths."""

    user_priority_max: int = 1000
    reserved: tuple[str, ...] = ("tenant", "tenant.*", "bursar.io/*")  # keys of taints
    fraction_min: int = 100
    whole_only: bool = False  # nodes that do not say take whole devices only


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """A named priority, and the tenants that may use it."""

    name: str
    value: int = 0
    admin_only: bool = False
    allowed_tenants: frozenset[str] = frozenset()  # with their subtrees; empty: all, up to their own maximum
    cross_tenant: bool = False  # whether its work may preempt other tenants' work by priority alone
    global_default: bool = False  # whether it is the class of work that names none


@dataclass(frozen=True, slots=True)
class Tier:
    """Default limits and billing terms for the tenants that name it."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    billing: StatedTerms = NOTHING_SAID
    user_priority_max: int | None = None
    approval: ApprovalPolicy | None = None
    warn_at: WarnAt | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of limits, budgets, shares and credit; its limits hold for its subtree."""

    name: str
    parent: str = ""
    tier: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    enforcement: Enforcement = Enforcement.REJECT
    billing: StatedTerms = NOTHING_SAID
    may_claim: bool = True  # whether its users may claim nodes for sensitive work
    uid: str = ""  # distinguishes tenants of the same name: a deleted tenant's name can be reused
    created_at: str = ""  # RFC 3339, UTC, to the second
    user_priority_max: int | None = None
    tolerations: tuple[Toleration, ...] = ()  # of reserved taints, granted to its work
    isolated: bool = False  # whether its work, and that of its subtree, requires isolation
    approval: ApprovalPolicy | None = None
    warn_at: WarnAt | None = None


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace of objects; it belongs to exactly one tenant."""

    name: str
    tenant: str
    terminating: bool = False
    quota_required: bool = False  # whether amounts that none of its ResourceQuotas covers are refused


@dataclass(frozen=True, slots=True)
class ScopeTerm:
    """One expression of a ResourceQuota's scope selector: scopeName, operator and values as in Kubernetes."""

    scope: str
    operator: str
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResourceQuota:
    """Hard and soft limits within a namespace, for the objects that match its scopes."""

    namespace: str
    name: str
    hard: Mapping[str, int] = field(default_factory=dict)
    soft: Mapping[str, int] = field(default_factory=dict)
    terms: tuple[ScopeTerm, ...] = ()
    enforcement: Enforcement = Enforcement.REJECT

    @property
    def scope(self) -> str:
        return quota_scope(self.namespace, self.name)

    @property
    def dimensions(self) -> frozenset[str]:
        return frozenset(self.hard) | frozenset(self.soft)


@dataclass(frozen=True, slots=True)
class Limit:
    """An effective limit and its source: `override`, `tier:<name>`, `default` or `unlimited`."""

    value: int
    source: str


@dataclass(frozen=True, slots=True)
class Tree:
    """One version of the tenant tree."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    namespaces: Mapping[str, Namespace] = field(default_factory=dict)
    quotas: Mapping[str, tuple[ResourceQuota, ...]] = field(default_factory=dict)  # by namespace
    system: Mapping[str, int] = field(default_factory=dict)
    credits: CreditPolicy = field(default_factory=CreditPolicy)
    # The revisions of the last two deletions of a tenant of this name, as far as the feed goes back.
    ended: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    classes: Mapping[str, PriorityClass] = field(default_factory=dict)
    permits: PermitPolicy = PermitPolicy()
    quota_policy: QuotaPolicy = field(default_factory=QuotaPolicy)
    # Caches: the tree is immutable.
    known_rows: dict[tuple[str, Facts, frozenset[str]], tuple[Row, ...]] = field(default_factory=dict, compare=False)
    known_limits: dict[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    known_prepaid: list[Mapping[str, BillingTerms]] = field(default_factory=list, compare=False)
    known_permits: dict[str, Any] = field(default_factory=dict, compare=False)  # by tenant (core/quota/permit.py)
    known_covered: list[frozenset[str]] = field(default_factory=list, compare=False)

    @property
    def covered(self) -> frozenset[str]:
        """The namespaces whose charges must be covered by ResourceQuotas. Every batch reads them."""
        if not self.known_covered:
            self.known_covered.append(frozenset(one.name for one in self.namespaces.values() if one.quota_required))
        return self.known_covered[0]

    @property
    def prepaid(self) -> Mapping[str, BillingTerms]:
        """The billing terms of all prepaid tenants. Every batch reads them, and most systems have none."""
        if not self.known_prepaid:
            self.known_prepaid.append(_prepaid(self.tenants, self.tiers))
        return self.known_prepaid[0]


def tenant_scope(tenant: str) -> str:
    return f"tenant:{tenant}"


def namespace_scope(namespace: str) -> str:
    """The scope of a namespace that requires quotas. It has no counters."""
    return f"namespace:{namespace}"


def quota_scope(namespace: str, name: str) -> str:
    return f"quota:{namespace}/{name}"


def billing_terms(tree: Tree, tenant: str) -> BillingTerms:
    """The billing terms of a tenant; the defaults if it is not in the tree."""
    owner = tree.tenants.get(tenant)
    return _terms(owner, tree.tiers) if owner is not None else BillingTerms()


def _terms(tenant: Tenant, tiers: Mapping[str, Tier]) -> BillingTerms:
    tier = tiers.get(tenant.tier)
    return terms_of(tenant.billing, tier.billing if tier is not None else NOTHING_SAID)


def _prepaid(tenants: Mapping[str, Tenant], tiers: Mapping[str, Tier]) -> dict[str, BillingTerms]:
    return {
        name: terms
        for name, tenant in tenants.items()
        if (tenant.billing is not NOTHING_SAID or tenant.tier)
        and (terms := _terms(tenant, tiers)).billing is Billing.PREPAID
    }


def effective_limits(tree: Tree, tenant: Tenant) -> dict[str, Limit]:
    """The limits of a tenant: its own, else those of its tier, else the default. Other dimensions are unlimited."""
    tier, units = tree.tiers.get(tenant.tier), tree.quota_policy.units
    limits = {dimension: Limit(0, "default") for dimension in tree.quota_policy.zero}
    of_tier = limits_in_parts(units, tier.limits) if tier else {}
    limits |= {dimension: Limit(value, f"tier:{tenant.tier}") for dimension, value in of_tier.items()}
    own = limits_in_parts(units, tenant.limits)
    limits |= {dimension: Limit(value, "override") for dimension, value in own.items()}
    return limits


def limit_on(tree: Tree, tenant: Tenant, dimension: str) -> Limit:
    """The limit of a tenant on one dimension."""
    if (limit := effective_limits(tree, tenant).get(dimension)) is not None:
        return limit
    default = DEFAULT_LIMITS.get(dimension)
    return Limit(UNLIMITED, "unlimited") if default is None else Limit(default, "default")


def approval_policy(tree: Tree, tenant: str) -> ApprovalPolicy:
    """The approvals that requests of a tenant need: by its own policy, else that of its tier."""
    owner = tree.tenants.get(tenant)
    if owner is None:
        return NO_APPROVAL
    tier = tree.tiers.get(owner.tier)
    return owner.approval or (tier.approval if tier is not None else None) or NO_APPROVAL


def limits_of(tree: Tree, tenant: str) -> Mapping[str, int]:
    """The effective limits of a tenant as plain numbers; a tenant that is not in the tree has none."""
    known = tree.known_limits.get(tenant)
    if known is None:
        owner = tree.tenants.get(tenant)
        known = {name: limit.value for name, limit in effective_limits(tree, owner).items()} if owner else {}
        tree.known_limits[tenant] = known
    return known


def lineage(tree: Tree, tenant: str) -> Iterator[str]:
    """The tenant, its parent, and so on up to the root."""
    current = tree.tenants.get(tenant)
    while current is not None:
        yield current.name
        current = tree.tenants.get(current.parent)


def is_current(tree: Tree, whose: Reach) -> bool:
    """Whether the present tenant of that name is the caller's own, or does not exist."""
    own = tree.tenants.get(whose.tenant)
    return own is None or whose.tenant_uid in ("", own.uid)


def sees(tree: Tree, whose: Reach, tenant: str) -> bool:
    """Whether the objects of a tenant are visible. Users of a deleted tenant see nothing of a new one of its name."""
    if whose.tenants:
        current = current_tenants(tree, whose)
        return any(name in current for name in lineage(tree, tenant))
    return whose.everything or (is_current(tree, whose) and whose.sees(lineage(tree, tenant)))


def current_tenants(tree: Tree, whose: Reach) -> set[str]:
    """The tenants that an approver decides for, without later tenants of their names."""
    return {name for name, uid in whose.tenants if name in tree.tenants and tree.tenants[name].uid == uid}


def saw(tree: Tree, whose: Reach, tenant: str, revision: int) -> bool:
    """Whether a change of a tenant's object is visible: none from before the tenant was created, when another one may
    have had its name. Its own users see its deletion."""
    before, last = tree.ended.get(tenant, (0, 0))
    if whose.everything:
        return True
    if tenant in tree.tenants:
        return revision > last and sees(tree, whose, tenant)
    return whose.tenant == tenant and revision > before


def children_of(tree: Tree) -> dict[str, list[str]]:
    """The children of every tenant that has some."""
    below: dict[str, list[str]] = {}
    for name, tenant in tree.tenants.items():
        below.setdefault(tenant.parent, []).append(name)
    return below


def subtree(tree: Tree, tenant: str) -> set[str]:
    """The tenant and its descendants."""
    below = children_of(tree)
    found: set[str] = set()
    queue = [tenant]
    while queue:
        name = queue.pop()
        found.add(name)
        queue.extend(below.get(name, ()))
    return found


# Counts of objects that come with every charge of work. They need a quota only if a charge has nothing else.
_COUNTS = frozenset({"pods", "allocations", "nodes", PENDING_REQUESTS})


def uncovered(tree: Tree, namespace: str, facts: Facts, dimensions: Iterable[str]) -> list[str]:
    """The dimensions of a charge that no ResourceQuota of the namespace limits.

    A quota on a resource covers its `limits.` too, and that on `limits.` the resource, if the charge has both.
    """
    asked = frozenset(dimensions) - {PENDING_REQUESTS}
    quotas = (one for one in tree.quotas.get(namespace, ()) if matches(one, facts, tree.classes))
    hard = frozenset(name for one in quotas for name in one.hard)
    resources = asked - _COUNTS
    if not resources:
        return [] if asked & hard else sorted(asked)
    twins = {name for name in resources if _twin(name) in hard & (resources | {name.removeprefix("limits.")})}
    return sorted(resources - hard - twins)


def _twin(name: str) -> str:
    return name.removeprefix("limits.") if name.startswith("limits.") else f"limits.{name}"


_NO_CLASSES: Mapping[str, PriorityClass] = {}


def matches(quota: ResourceQuota, facts: Facts, classes: Mapping[str, PriorityClass] = _NO_CLASSES) -> bool:
    """Whether a ResourceQuota counts an object with these facts: all of its terms must hold."""
    return all(_term_holds(term, facts, classes) for term in quota.terms)


def _term_holds(term: ScopeTerm, facts: Facts, classes: Mapping[str, PriorityClass]) -> bool:
    if not facts.scoped:
        return True  # Every quota counts kinds without scopes (services, volumes).
    match term.scope:
        case "Terminating":
            return facts.terminating
        case "NotTerminating":
            return not facts.terminating
        case "BestEffort":
            return facts.best_effort
        case "NotBestEffort":
            return not facts.best_effort
        case "PriorityClass":
            return _priority_class_holds(term, facts.priority_class, facts.priority, classes)
    return False


def _priority_class_holds(
    term: ScopeTerm, name: str, priority: int | None, classes: Mapping[str, PriorityClass]
) -> bool:  # fmt: skip
    """Match a priority class. A numeric priority matches the classes that it reaches: otherwise work could evade the
    quota of a class with a number."""
    values = [classes[one].value for one in term.values if one in classes] if priority is not None else []
    match term.operator:
        case "In":
            return name in term.values or (priority is not None and any(priority >= value for value in values))
        case "NotIn":
            return name not in term.values or (priority is not None and all(priority > value for value in values))
        case "DoesNotExist":
            return not name
    return bool(name) or priority is not None


def rows_of(tree: Tree, namespace: str, charge: Charge) -> tuple[Row, ...]:
    """The counters that a charge raises: of matching quotas in its namespace, its tenant, limited ancestors and the
    system."""
    key = (namespace, charge.facts, charge.dimensions)
    rows = tree.known_rows.get(key)
    if rows is None:
        if len(tree.known_rows) >= KNOWN_ROWS_MAX:
            tree.known_rows.clear()  # Users can invent dimensions: the cache must stay bounded.
        rows = tuple(_rows_of(tree, namespace, charge.facts, charge.dimensions))
        tree.known_rows[key] = rows
    return rows


def _rows_of(tree: Tree, namespace: str, facts: Facts, dimensions: frozenset[str]) -> Iterator[Row]:
    for quota in tree.quotas.get(namespace, ()):
        if matches(quota, facts, tree.classes):
            yield from ((quota.scope, dimension) for dimension in sorted(dimensions & quota.dimensions))
    for tenant in lineage(tree, tree.namespaces[namespace].tenant):
        limited = limits_of(tree, tenant)
        own = tenant == tree.namespaces[namespace].tenant
        yield from ((tenant_scope(tenant), name) for name in sorted(dimensions) if own or name in limited)
    yield from ((SYSTEM_SCOPE, dimension) for dimension in sorted(dimensions) if dimension in tree.system)


def enforcement_of(tree: Tree, scope: str) -> Enforcement:
    kind, _, name = scope.partition(":")
    if kind == "tenant":
        return tree.tenants[name].enforcement
    quota = _find_quota(tree, name) if kind == "quota" else None
    return quota.enforcement if quota else Enforcement.REJECT


def hard_of(tree: Tree, row: Row) -> int:
    """The hard limit that the tree sets for a counter."""
    scope, dimension = row
    kind, _, name = scope.partition(":")
    if kind == "tenant":
        return limits_of(tree, name).get(dimension, DEFAULT_LIMITS.get(dimension, UNLIMITED))
    if kind == "quota":
        quota = _find_quota(tree, name)
        return quota.hard.get(dimension, UNLIMITED) if quota else UNLIMITED
    return tree.system.get(dimension, UNLIMITED)


def soft_of(tree: Tree, row: Row) -> int | None:
    scope, dimension = row
    kind, _, name = scope.partition(":")
    quota = _find_quota(tree, name) if kind == "quota" else None
    return quota.soft.get(dimension) if quota else None


def _find_quota(tree: Tree, key: str) -> ResourceQuota | None:
    namespace, _, name = key.partition("/")
    return next((quota for quota in tree.quotas.get(namespace, ()) if quota.name == name), None)


# Changes. Each returns a new tree with empty caches.


def with_tenant(tree: Tree, tenant: Tenant) -> Tree:
    return _fresh(tree, tenants={**tree.tenants, tenant.name: tenant})


def without_tenant(tree: Tree, name: str, revision: int = 0) -> Tree:
    """The tree without a tenant, whose deletion has this revision."""
    ended = with_end(tree.ended, name, revision)
    return _fresh(tree, tenants={key: value for key, value in tree.tenants.items() if key != name}, ended=ended)


def with_end(ended: Mapping[str, tuple[int, int]], name: str, revision: int) -> Mapping[str, tuple[int, int]]:
    """Add a deletion, in order; a known one changes nothing."""
    _, last = ended.get(name, (0, 0))
    return {**ended, name: (last, revision)} if revision > last else ended


def with_tier(tree: Tree, tier: Tier) -> Tree:
    return _fresh(tree, tiers={**tree.tiers, tier.name: tier})


def without_tier(tree: Tree, name: str) -> Tree:
    return _fresh(tree, tiers={key: value for key, value in tree.tiers.items() if key != name})


def with_namespace(tree: Tree, namespace: Namespace) -> Tree:
    return _fresh(tree, namespaces={**tree.namespaces, namespace.name: namespace})


def without_namespace(tree: Tree, name: str) -> Tree:
    return _fresh(tree, namespaces={key: value for key, value in tree.namespaces.items() if key != name})


def with_quota(tree: Tree, quota: ResourceQuota) -> Tree:
    others = without_quota(tree, quota.namespace, quota.name).quotas.get(quota.namespace, ())
    # In name order, so that every process names the same quota first.
    together = tuple(sorted((*others, quota), key=lambda one: one.name))
    return _fresh(tree, quotas={**tree.quotas, quota.namespace: together})


def without_quota(tree: Tree, namespace: str, name: str) -> Tree:
    left = tuple(quota for quota in tree.quotas.get(namespace, ()) if quota.name != name)
    return _fresh(tree, quotas={**tree.quotas, namespace: left})


def with_class(tree: Tree, one: PriorityClass) -> Tree:
    return _fresh(tree, classes={**tree.classes, one.name: one})


def without_class(tree: Tree, name: str) -> Tree:
    return _fresh(tree, classes={key: value for key, value in tree.classes.items() if key != name})


def with_system(
    tree: Tree,
    limits: Mapping[str, int],
    policy: CreditPolicy | None = None,
    permits: PermitPolicy | None = None,
    quotas: QuotaPolicy | None = None,
) -> Tree:
    return _fresh(
        tree, system=dict(limits), credits=policy or CreditPolicy(), permits=permits or PermitPolicy(),
        quota_policy=quotas or QuotaPolicy(),
    )  # fmt: skip


def _fresh(tree: Tree, **changes: object) -> Tree:
    caches: dict[str, Any] = {
        "known_rows": {}, "known_limits": {}, "known_prepaid": [], "known_permits": {}, "known_covered": [],
    }  # fmt: skip
    return replace(tree, **changes, **caches)  # type: ignore[arg-type]


class TreeChange(NamedTuple):
    """A new version of an object that the tree is made of, or its deletion."""

    key: Key
    deleted: bool
    doc: bytes
    revision: int = 0  # of the change, where it is one of the feed
