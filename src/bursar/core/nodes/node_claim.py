"""Claims of nodes for sensitive work: the holder, the work that may use the node, and its wipes.

A claim belongs to a user, not to their tenant, and lasts until it is released, whether the node is used or not. It
begins with a wipe, unless the node is known to be clean: earlier work may have left files. A released node is wiped
before anybody else may use it. The holder is shown to callers who may see that tenant; others see only that the node is
claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from bursar.core.values.refusal import Cause, Code, Refusal

POOL = "sensitive_pool_size"  # the system's limit on claimed nodes
UID_PREFIX = "claim"
SENSITIVE = "sensitive"  # the profile of queues for sensitive work
NAMES_TOLD_MAX = 8


class ClaimState(StrEnum):
    """The state of a claimed node."""

    HELD = "Claimed"  # its holder may use it
    WIPING = "Wiping"  # its agent is wiping it, before use or after release
    WIPE_FAILED = "WipeFailed"  # the wipe failed; an administrator can retry it


class NodeClaim(Struct, frozen=True, omit_defaults=True):
    """A user's exclusive claim of a node. It lasts until the node is released and wiped."""

    id: str
    tenant: str
    user: str
    since: str
    by: str  # who requested it: the user, or an administrator for them
    reason: str = ""
    state: ClaimState = ClaimState.HELD
    released: str = ""  # the time of its release
    attempt: int = 0  # the number of wipes requested
    message: str = ""  # why the last wipe failed
    tenant_uid: str = ""  # distinguishes tenants of the same name: one may replace another during a wipe
    lease: int = 0  # the lease that pays for it; 0 if it is billed afterwards, or released
    unpaid: str = ""  # the refusal of its lease: it takes no new work, and is released once it is empty

    @property
    def prepares(self) -> bool:
        """Whether the wipe in progress, or failed, is the one before use and not the one after release."""
        return self.state is not ClaimState.HELD and not self.released

    @property
    def holder(self) -> str:
        """The holder as TENANT/USER, the form of `status.user` of allocations."""
        return f"{self.tenant}/{self.user}"


def open_to(claim: NodeClaim | None, user: str, *, sensitive: bool) -> bool:
    """Whether work of this user may use a node: a claimed node takes only its holder's work, and sensitive work needs
    a claimed node. A node whose claim is no longer paid for, or that is not wiped yet, takes no work."""
    if claim is None:
        return not sensitive
    return claim.state is ClaimState.HELD and not claim.unpaid and claim.holder == user


def is_of(claim: NodeClaim, tenant_uid: str) -> bool:
    """Whether a claim belongs to the present tenant of its name. A tenant with a held node cannot be deleted."""
    return not claim.released or claim.tenant_uid == tenant_uid


def is_claim(uid: str) -> bool:
    """Whether a uid is that of a claim, and not of an allocation."""
    return uid.startswith(f"{UID_PREFIX}-")


def holds(claim: NodeClaim | None, tenant: str) -> bool:
    """Whether a user of the tenant holds the node, or it is being wiped for them."""
    return claim is not None and not claim.released and claim.tenant == tenant


def kept_off(node: str, claim: NodeClaim | None, user: str, *, sensitive: bool) -> Refusal | None:
    """Refuse a bind to a node by its claim. The message names no user, because another tenant may read it."""
    if open_to(claim, user, sensitive=sensitive):
        return None
    if claim is None:
        return Refusal(Code.STALE, f"node {node} is not claimed by the user who submitted this sensitive work")
    if claim.state is ClaimState.HELD and claim.unpaid and claim.holder == user:
        return Refusal(Code.STALE, f"node {node} is claimed, but its claim is no longer paid for")
    if claim.state is ClaimState.HELD:
        return Refusal(Code.STALE, f"node {node} is claimed by somebody else")
    return Refusal(Code.STALE, f"node {node} must be wiped before it can be used")


# Refusals.


def held(node: str, claim: NodeClaim, *, told: bool) -> Refusal:
    """Refuse a claim of a node that is claimed already; `told` callers may see the holder."""
    if claim.released:
        return not_wiped(node, claim)
    if told:
        message = f"node {node} is claimed by {claim.holder} since {claim.since}"
        if claim.unpaid:
            message += ", and is being released, because the claim is no longer paid for"
        cause = Cause("claimed", message, scope=node, current_usage=claim.holder)
        return Refusal(Code.CONFLICT, message, "Choose another node, or ask them to release it.", (cause,))
    message = f"node {node} is claimed by somebody else"
    return Refusal(Code.CONFLICT, message, "Choose another node.", (Cause("claimed", message, scope=node),))


def not_wiped(node: str, claim: NodeClaim) -> Refusal:
    """Refuse a claim of a released node that is not wiped yet."""
    message = f"node {node} was released at {claim.released} and is not wiped yet"
    if claim.state is ClaimState.WIPE_FAILED:
        message += ", because wiping it failed"
    hint = f"Wait until it is wiped. An administrator can retry: bursar node wipe {node}"
    return Refusal(Code.CONFLICT, message, hint, (Cause("wiping", message, scope=node),))


def not_clean(node: str, *, placed: bool, wipes: bool) -> Refusal | None:
    """Refuse a claim of a node that is not clean and cannot be wiped now; None if it can."""
    seen = f"work has run on node {node} since it was last wiped, and may have left files"
    if not wipes:
        message = f"{seen}; it cannot be wiped, because its agent has no wipe hook"
        hint = f"Choose another node. An administrator can confirm that it has been wiped: bursar node wiped {node}"
    elif placed:
        message = f"{seen}; it cannot be wiped while work is placed there"
        hint = "Wait until that work has ended, or choose another node."
    else:
        return None
    return Refusal(Code.CONFLICT, message, hint, (Cause("not_clean", message, scope=node),))


def not_allowed(tenant: str) -> Refusal:
    """Refuse a claim in a tenant that may not claim nodes. The permission covers the tenant's subtree."""
    return Refusal(
        Code.FORBIDDEN,
        f'users of tenant "{tenant}" may not claim nodes',
        f"Ask a system admin: bursar admin tenant update {tenant} --sensitive",
    )


def still_claimed(tenant: str, nodes: Sequence[str]) -> Refusal | None:
    """Refuse the deletion of a tenant with claimed nodes, which the next tenant of its name would inherit."""
    if not nodes:
        return None
    told = ", ".join(nodes[:NAMES_TOLD_MAX])
    return Refusal(Code.IN_USE, f'tenants "{tenant}" still has claimed nodes: {told}', "Have them released first.")


def pool_exhausted(claimed: int, size: int) -> Refusal:
    """Refuse a claim beyond the system's limit on claimed nodes, whose numbers every caller may see."""
    if not size:
        return Refusal(
            Code.QUOTA_EXCEEDED,
            f"claim rejected: no nodes may be claimed for sensitive use ({POOL}: 0)",
            f"An administrator raises it: spec.limits.{POOL} of settings system.",
            (Cause("quota_exceeded", f"{POOL} is 0", "", POOL, "system", "0", str(claimed), "1"),),
        )
    verb = "exceeds" if claimed > size else "would exceed"
    message = f"claim rejected: the system {verb} {POOL} (current: {claimed}, requested: 1, limit: {size})"
    return Refusal(
        Code.QUOTA_EXCEEDED,
        message,
        f"Wait until a claimed node is released and wiped, or have {POOL} raised.",
        (Cause("quota_exceeded", message, "", POOL, "system", str(size), str(claimed), "1"),),
    )


def in_use(node: str, names: Sequence[str], what: str) -> Refusal:
    """Refuse a change of a node with placed work. `names` are the allocations that the caller may see."""
    told = ", ".join(names[:NAMES_TOLD_MAX])
    more = len(names) - NAMES_TOLD_MAX
    listed = f": {told}{f' and {more} more' if more > 0 else ''}" if told else ""
    return Refusal(
        Code.IN_USE,
        f"node {node} cannot be {what} while work is placed there{listed}",
        "Wait until it has ended, or delete it first.",
        tuple(Cause("in_use", f"{name} is placed there", scope=node) for name in names[:NAMES_TOLD_MAX]),
    )
