"""Visibility of quota figures: messages leave out the limits and usage of scopes that their reader may not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bursar.core.objects.pending_reason import PendingReason
from bursar.core.quota.quota import Exceeded
from bursar.core.quota.tenant_tree import Tree, lineage
from bursar.core.quota.tenant_tree import sees as sees_tenant
from bursar.core.values.access import Reach

Sees = Callable[[str], bool]  # whether the figures of a scope are visible

ABOVE = ""  # in place of a hidden scope
HIDDEN = "<hidden>"  # in place of hidden names of tenants; no tenant can have this name


def everything(_: str) -> bool:
    """The sight of readers who see all tenants."""
    return True


def reader_of(actor: str, tenant: str) -> str | None:
    """The tenant whose users read an answer to this actor; None for actors who see all tenants. Records of the system
    itself are read by users of the tenant that owns the work."""
    kind, _, who = actor.partition(":")
    if kind == "user":
        owner, slash, _ = who.partition("/")
        return owner if slash else None
    return None if kind == "service" else tenant


def sight(tree: Tree, reader: str | None) -> Sees:
    """The scopes that users of a tenant see: namespaces and their quotas, their tenant, and its subtree."""
    if reader is None:
        return everything

    def sees(scope: str) -> bool:
        kind, _, name = scope.partition(":")
        return kind in ("namespace", "quota") or (kind == "tenant" and reader in lineage(tree, name))

    return sees


def conceal_grant(tree: Tree, whose: Reach, names: Sequence[str]) -> list[str]:
    """The tenants of a grant that a reader sees, with HIDDEN in place of all others."""
    seen = [name for name in names if sees_tenant(tree, whose, name)]
    return seen if len(seen) == len(names) else [*seen, HIDDEN]


def is_strangers(tree: Tree, whose: Reach, names: Sequence[str]) -> bool:
    """Whether a grant concerns only other tenants: none that the reader sees, nor one whose grants cover their work."""
    own = set(lineage(tree, whose.tenant))
    return bool(names) and own.isdisjoint(names) and not any(sees_tenant(tree, whose, name) for name in names)


def visible(exceeded: Sequence[Exceeded], sees: Sees) -> list[Exceeded]:
    """The exceeded limits without the figures of hidden scopes."""
    return [one if sees(one.scope) else Exceeded(ABOVE, one.dimension, 0, 0, one.requested) for one in exceeded]


def reason_for(reason: PendingReason, sees: Sees) -> PendingReason:
    """The pending reason without the figures of hidden scopes."""
    if all(sees(scope) for scope, *_ in reason.limits):
        return reason
    limits = tuple(
        (scope, dimension, hard, bound, asked) if sees(scope) else (ABOVE, dimension, 0, 0, asked)
        for scope, dimension, hard, bound, asked in reason.limits
    )
    return replace(reason, limits=limits)
