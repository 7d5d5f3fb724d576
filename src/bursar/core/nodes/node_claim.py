"""A node that is claimed for sensitive work: whose it is, who may use it, and what must happen before others may.

A claim is a person's, not their tenant's, and lasts until it is given back, whether the node is used or not. A claim
begins with a wipe, unless the node is known to be clean: an earlier tenant's work may have left something there. A node
that was given back is wiped before anybody else comes near it. Who holds a node is told to those who may know of that
tenant's things; everybody else learns only that it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from bursar.core.values.refusal import Cause, Code, Refusal

POOL = "sensitive_pool_size"  # the limit on how many nodes may be claimed, in the whole system
UID_PREFIX = "claim"
SENSITIVE = "sensitive"  # the profile of queues for sensitive work
NAMES_TOLD_MAX = 8


class ClaimState(StrEnum):
    HELD = "Claimed"
    WIPING = "Wiping"
    WIPE_FAILED = "WipeFailed"


class NodeClaim(Struct, frozen=True, omit_defaults=True):
    """That a node is somebody's. It lasts until the node is wiped: only then is it anybody's again."""

    id: str
    tenant: str
    user: str
    since: str
    by: str  # who asked for it; an administrator may for somebody else
    reason: str = ""
    state: ClaimState = ClaimState.HELD
    released: str = ""  # when it was given back
    attempt: int = 0  # how often wiping was asked for
    message: str = ""  # what went wrong with that
    tenant_uid: str = ""  # which tenant of that name: it may go while the node is wiped, and another be made
    lease: int = 0  # what pays for it beforehand; 0 where it is billed afterwards, or was given back
    unpaid: str = ""  # why no more is paid: nothing is placed there any more, and once it is empty it is given back

    @property
    def prepares(self) -> bool:
        """Whether the node is wiped for its new holder, or that failed; else it is wiped after it was given back."""
        return self.state is not ClaimState.HELD and not self.released

    @property
    def holder(self) -> str:
        """As an allocation's status names who submitted it."""
        return f"{self.tenant}/{self.user}"


def open_to(claim: NodeClaim | None, user: str, *, sensitive: bool) -> bool:
    """Whether work of this user may go to a node: to a claimed one only its holder's, and sensitive work nowhere else.
    A node that is not paid for any more, or not wiped yet, takes nothing."""
    if claim is None:
        return not sensitive
    return claim.state is ClaimState.HELD and not claim.unpaid and claim.holder == user


def is_of(claim: NodeClaim, tenant_uid: str) -> bool:
    """Whether a claim is of the tenant that has its tenant's name now. A tenant cannot go while it holds a node."""
    return not claim.released or claim.tenant_uid == tenant_uid


def is_claim(uid: str) -> bool:
    """Whether what has this uid is a claim, and no allocation."""
    return uid.startswith(f"{UID_PREFIX}-")


def holds(claim: NodeClaim | None, tenant: str) -> bool:
    """Whether somebody of a tenant has the node, or it is wiped for them."""
    return claim is not None and not claim.released and claim.tenant == tenant


def kept_off(node: str, claim: NodeClaim | None, user: str, *, sensitive: bool) -> Refusal | None:
    """Why a plan for this node is out of date. It names nobody: it may be told to another tenant."""
    if open_to(claim, user, sensitive=sensitive):
        return None
    if claim is None:
        return Refusal(Code.STALE, f"node {node} is not claimed by who submitted this sensitive work")
    if claim.state is ClaimState.HELD and claim.unpaid and claim.holder == user:
        return Refusal(Code.STALE, f"node {node} is claimed, and not paid for any more")
    if claim.state is ClaimState.HELD:
        return Refusal(Code.STALE, f"node {node} is claimed by somebody else")
    return Refusal(Code.STALE, f"node {node} is not wiped yet")


# Refusals.


def held(node: str, claim: NodeClaim, *, told: bool) -> Refusal:
    """That a node is taken; by whom, and since when, for those who may know."""
    if claim.released:
        return not_wiped(node, claim)
    if told:
        message = f"node {node} is claimed by {claim.holder} since {claim.since}"
        if claim.unpaid:
            message += ", and is given back, for it is not paid for any more"
        cause = Cause("claimed", message, scope=node, current_usage=claim.holder)
        return Refusal(Code.CONFLICT, message, "Choose another node, or ask them to release it.", (cause,))
    message = f"node {node} is claimed by somebody else"
    return Refusal(Code.CONFLICT, message, "Choose another node.", (Cause("claimed", message, scope=node),))


def not_wiped(node: str, claim: NodeClaim) -> Refusal:
    message = f"node {node} was given back at {claim.released} and is not wiped yet"
    if claim.state is ClaimState.WIPE_FAILED:
        message += ", because wiping it failed"
    hint = f"Wait until it is. An administrator may try again: bursar node wipe {node}"
    return Refusal(Code.CONFLICT, message, hint, (Cause("wiping", message, scope=node),))


def not_clean(node: str, *, placed: bool, wipes: bool) -> Refusal | None:
    """Why a node that is not known to be clean cannot be wiped for a claim now; None where it can."""
    seen = f"work has run on node {node} since it was last wiped, and may have left something behind"
    if not wipes:
        message = f"{seen}; nothing wipes it, because its agent has no wipe hook"
        hint = f"Choose another node. An administrator who has wiped it says so: bursar node wiped {node}"
    elif placed:
        message = f"{seen}; it cannot be wiped while work is placed there"
        hint = "Wait until that has ended, or choose another node."
    else:
        return None
    return Refusal(Code.CONFLICT, message, hint, (Cause("not_clean", message, scope=node),))


def not_allowed(tenant: str) -> Refusal:
    """What holds for a tenant holds for those below it as well."""
    return Refusal(
        Code.FORBIDDEN,
        f'users of tenant "{tenant}" may not claim nodes',
        f"Ask a system admin: bursar admin tenant update {tenant} --sensitive",
    )


def still_claimed(tenant: str, nodes: Sequence[str]) -> Refusal | None:
    """Why a tenant cannot go: its nodes would be nobody's, and then whoever's who gets its name next."""
    if not nodes:
        return None
    told = ", ".join(nodes[:NAMES_TOLD_MAX])
    return Refusal(Code.IN_USE, f'tenants "{tenant}" still has claimed nodes: {told}', "Have them released first.")


def pool_exhausted(claimed: int, size: int) -> Refusal:
    """The limit is the whole system's, so its numbers are nobody's secret."""
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
    """That work is placed there. Only those names are given that the caller may know."""
    told = ", ".join(names[:NAMES_TOLD_MAX])
    more = len(names) - NAMES_TOLD_MAX
    listed = f": {told}{f' and {more} more' if more > 0 else ''}" if told else ""
    return Refusal(
        Code.IN_USE,
        f"node {node} cannot be {what} while work is placed there{listed}",
        "Wait until it has ended, or delete it first.",
        tuple(Cause("in_use", f"{name} is placed there", scope=node) for name in names[:NAMES_TOLD_MAX]),
    )
