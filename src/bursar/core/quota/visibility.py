"""Whose figures somebody may read: no message tells the limits and the use of a scope that its reader does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bursar.core.objects.pending_reason import PendingReason
from bursar.core.quota.quota import Exceeded
from bursar.core.quota.tenant_tree import Tree, lineage
from bursar.core.quota.tenant_tree import sees as sees_tenant
from bursar.core.values.access import Reach

Sees = Callable[[str], bool]  # whether the figures of a scope may be told

ABOVE = ""  # in place of a scope that is not told
HIDDEN = "<hidden>"  # in place of tenants' names that are not told; no tenant can be called so


def everything(_: str) -> bool:
    return True


def reader_of(actor: str, tenant: str) -> str | None:
    """The tenant whose people read what is answered to this actor; None for those who see all tenants. What the system
    writes down itself is read by people of the tenant whose work it is about."""
    kind, _, who = actor.partition(":")
    if kind == "user":
        owner, slash, _ = who.partition("/")
        return owner if slash else None
    return None if kind == "service" else tenant


def sight(tree: Tree, reader: str | None) -> Sees:
    """What people of a tenant see: quotas of the namespaces they work in, their tenant, and those below it."""
    if reader is None:
        return everything

    def sees(scope: str) -> bool:
        kind, _, name = scope.partition(":")
        return kind == "quota" or (kind == "tenant" and reader in lineage(tree, name))

    return sees


def conceal_grant(tree: Tree, whose: Reach, names: Sequence[str]) -> list[str]:
    """The tenants that a grant names, as somebody may read them: HIDDEN stands for all that they do not see."""
    seen = [name for name in names if sees_tenant(tree, whose, name)]
    return seen if len(seen) == len(names) else [*seen, HIDDEN]


def is_strangers(tree: Tree, whose: Reach, names: Sequence[str]) -> bool:
    """Whether what is granted to these tenants is others' alone: neither seen by somebody nor for their work."""
    own = set(lineage(tree, whose.tenant))
    return bool(names) and own.isdisjoint(names) and not any(sees_tenant(tree, whose, name) for name in names)


def told(exceeded: Sequence[Exceeded], sees: Sees) -> list[Exceeded]:
    """Limits without room, as they may be told: of those above somebody's tenant no more than that they are there."""
    return [one if sees(one.scope) else Exceeded(ABOVE, one.dimension, 0, 0, one.requested) for one in exceeded]


def reason_for(reason: PendingReason, sees: Sees) -> PendingReason:
    """Why something waits, as it may be told."""
    if all(sees(scope) for scope, *_ in reason.limits):
        return reason
    limits = tuple(
        (scope, dimension, hard, bound, asked) if sees(scope) else (ABOVE, dimension, 0, 0, asked)
        for scope, dimension, hard, bound, asked in reason.limits
    )
    return replace(reason, limits=limits)
