"""Handlers of claims of nodes for sensitive work: claim, release, wipe, and confirm a wipe."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from bursar.api.http.action import faulty, read_action, words_faults
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, kind_of, origin_of, written_answer
from bursar.commands.nodes.claim import NOBODYS, ReleaseNode
from bursar.commands.objects.object import submitter
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.object import Origin
from bursar.core.values.access import Role, reach
from bursar.core.values.idempotency import IdempotencyKey as RequestClaim
from bursar.core.values.refusal import Code, Refusal, field_fault
from bursar.core.values.replace import replace
from bursar.ops.nodes import claim as ops
from bursar.wire.shared.document import encode

# Roles that may also claim for other users, and end their claims, as far as they see them.
_ADMINS = frozenset({Role.SYSTEM_ADMIN, Role.TENANT_ADMIN})


class ClaimOrder(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The reason and the user of a claim: administrators may claim for another user, `name` or `tenant/name`."""

    reason: str = ""
    user: str = ""


class ReleaseOrder(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The reason of a release, a repeated wipe, or the confirmation of a wipe."""

    reason: str = ""


class ShownClaim(msgspec.Struct, rename="camel"):
    """The claim of a node; `state` is Claimed, Wiping or WipeFailed."""

    node: str
    id: str
    state: str
    user: str
    since: str
    by: str
    reason: str | UnsetType = UNSET
    released: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class PoolFigures(msgspec.Struct, rename="camel"):
    """The system's limit on claimed nodes, and their number."""

    size: int
    claimed: int


class ClaimList(msgspec.Struct, rename="camel"):
    pool: PoolFigures
    items: list[ShownClaim]
    kind: str = "ClaimList"


async def start(call: Call) -> Outcome:
    """Claim a node. Repeating it has no further effect."""
    asked = read_action(call, ClaimOrder, "claim")
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    reason = wanted.reason.strip()
    if causes := words_faults(reason=reason, user=wanted.user):
        return faulty("claim", causes)
    claimant = await _claimant(call, wanted.user.strip())
    if isinstance(claimant, Refusal):
        return claimant
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    tenant, user = claimant
    origin = _origin_for(call, f"{tenant}/{user}", reason)
    reply = await ops.claim_node(
        call.context.runtime, found.key.name, origin, reach(call.identity), tenant=tenant, user=user, reason=reason,
        idempotency_key=idempotency_key, dry_run=dry,
    )  # fmt: skip
    return await written_answer(call, kind_of(call), reply)


async def _claimant(call: Call, wanted: str) -> tuple[str, str] | Refusal:
    """Resolve the user of a claim as (tenant, user)."""
    identity = call.identity
    first, slash, last = wanted.partition("/")
    tenant, user = (first, last) if slash else (identity.tenant, wanted)
    if not wanted:
        tenant, user = identity.tenant, identity.user
    if not tenant or not user:
        message = "must name a user, as tenant/name: a node is claimed for a user of a tenant"
        hint = "Name a user of a tenant: `bursar node claim NODE --for TENANT/NAME`."
        return replace(faulty("claim", [field_fault("user", message)]), hint=hint)
    if (tenant, user) == (identity.tenant, identity.user):
        return tenant, user
    if identity.role not in _ADMINS or not await call.context.sees(identity, tenant):
        return Refusal(Code.FORBIDDEN, "only an administrator of their tenant may claim a node for another user")
    return tenant, user


async def end(call: Call) -> Outcome:
    """Release a node; for its holder and administrators."""
    asked = _asked(call, "release")
    if isinstance(asked, Refusal):
        return asked
    reason, idempotency_key, dry = asked
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    origin, whose = origin_of(call, reason), reach(call.identity)
    over = whose if call.identity.role in _ADMINS else NOBODYS
    command = ReleaseNode(
        key=found.key, origin=origin, idempotency_key=idempotency_key, user=submitter(origin), over=over
    )
    reply = await ops.release_node(call.context.runtime, command, whose, dry_run=dry)
    return await written_answer(call, kind_of(call), reply)


async def wipe(call: Call) -> Outcome:
    """Retry a failed wipe."""
    asked = _asked(call, "wipe")
    if isinstance(asked, Refusal):
        return asked
    reason, _, dry = asked
    reply = await ops.wipe_node(call.context.runtime, call.parameters["name"], origin_of(call, reason), dry_run=dry)
    return await written_answer(call, kind_of(call), reply)


async def confirm(call: Call) -> Outcome:
    """Confirm that a node has been wiped: others may use it from now on."""
    asked = _asked(call, "confirmation")
    if isinstance(asked, Refusal):
        return asked
    reason, _, dry = asked
    origin = Origin(call.identity.actor, "wiped", reason)
    reply = await ops.end_wipe(call.context.runtime, call.parameters["name"], origin, dry_run=dry)
    return await written_answer(call, kind_of(call), reply)


def _asked(call: Call, what: str) -> tuple[str, RequestClaim | None, bool] | Refusal:
    asked = read_action(call, ReleaseOrder, what)
    if isinstance(asked, Refusal):
        return asked
    wanted, idempotency_key, dry = asked
    reason = wanted.reason.strip()
    if causes := words_faults(reason=reason):
        return faulty(what, causes)
    return reason, idempotency_key, dry


def _origin_for(call: Call, holder: str, reason: str) -> Origin:
    """The audit reason, which names the user if it is not the caller."""
    origin = origin_of(call, reason)
    if submitter(origin) == holder:
        return origin
    return origin_of(call, f"for {holder}: {reason}" if reason else f"for {holder}")


async def list_claims(call: Call) -> Outcome:
    """List the claims whose holders the caller may see, and the use of the pool."""
    pool = await ops.load_pool(call.context.runtime, reach(call.identity))
    items = [_shown(node, claim) for node, claim in pool.claims]
    return Answer(200, encode(ClaimList(PoolFigures(pool.size, pool.claimed), items)))


def _shown(node: str, claim: NodeClaim) -> ShownClaim:
    return ShownClaim(
        node, claim.id, str(claim.state), claim.holder, claim.since, claim.by, claim.reason or UNSET,
        claim.released or UNSET, claim.message or _unpaid(claim) or UNSET,
    )  # fmt: skip


def _unpaid(claim: NodeClaim) -> str:
    return f"it is no longer paid for, and is released once it is empty: {claim.unpaid}" if claim.unpaid else ""
