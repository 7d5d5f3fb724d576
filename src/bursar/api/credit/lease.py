"""Handlers of credit leases, also for work that Bursar does not place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bursar.api.credit.credit import (
    continue_place,
    continue_token,
    find_account,
    find_lease,
    ledger_key_for,
    limit_of,
    named_owner,
    own_account,
    read_order,
)
from bursar.api.http.route import Answer, Call, Outcome
from bursar.commands.credit.credit import CloseLeaseCommand, ExtendLeaseCommand, OpenLease
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Account, Owner, spends_anothers
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.credit.lease import Lease
from bursar.core.nodes.node import WHOLE
from bursar.core.quota.permit import Asking, too_small
from bursar.core.quota.tenant_tree import billing_terms
from bursar.core.values.access import Role, reach
from bursar.core.values.money import MICROS, credits_of
from bursar.core.values.quantity import amount, is_device
from bursar.core.values.refusal import Cause, Refusal, field_fault, invalid
from bursar.ops.credit import credit as ops
from bursar.store.credit import lease as lease_store
from bursar.store.credit import ledger as store
from bursar.wire.reports.credit import (
    GPU,
    ClosedLease,
    CloseLease,
    ExtendedLease,
    ExtendLease,
    LeaseList,
    NewLease,
    OpenedLease,
    device_faults,
    lease_view,
    name_faults,
    seconds_faults,
)
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import time_text
from bursar.wire.shared.limits import amounts, amounts_faults, quantity_text

LEASES_MAX = 500
CLASS_CHARS_MAX = 63
GPUS_MAX = 10**9  # thousandths in one lease


async def open_lease(call: Call) -> Outcome:
    """Open a lease: hold its first window, if the account has credit and every limit has headroom."""
    tree = await call.context.tree()
    order = await read_order(call, NewLease, "lease", lambda one: _faults(one, tree.credits))
    if isinstance(order, Refusal):
        return order
    if refusal := too_small(tree, _asking(order)):
        return refusal
    account = await _payer(call, order.account)
    if isinstance(account, Refusal):
        return account
    terms = billing_terms(tree, account.tenant)
    window = tree.credits.window(terms) if order.window_seconds is None else order.window_seconds * MICROS
    command = OpenLease(
        idempotency_key=ledger_key_for(call, order, account.tenant_uid),
        actor=call.identity.actor,
        tenant_uid=account.tenant_uid,
        whose=Owner(account.tenant, account.user),
        job=order.job_id,
        amounts=_amounts(order),
        klass=order.gpu_type,
        window=window,
        discount=terms.discount,
        mode=terms.mode,
    )
    receipt = await ops.open_lease(call.context.runtime, command)
    if isinstance(receipt, Refusal):
        return receipt
    lease, payer = receipt.lease, receipt.account
    assert lease is not None
    assert payer is not None
    opened = OpenedLease(
        lease.name,
        payer.name,
        lease.job,
        credits_of(lease.rate),
        time_text(lease.paid_until),
        credits_of(lease.held),
    )
    return Answer(201, encode(opened))


async def _payer(call: Call, in_body: str) -> Account | Refusal:
    """Resolve the paying account. Users spend from the account that pays for them, and cannot choose another one."""
    account = await find_account(call, in_body)
    if isinstance(account, Refusal) or call.identity.role is not Role.USER:
        return account
    own = await own_account(call)
    if isinstance(own, Refusal):
        return own
    refusal = spends_anothers(account, own)
    return account if refusal is None else replace(refusal, hint="Omit the account.")


def _amounts(order: NewLease) -> dict[str, int]:
    asked = amounts(order.resources)
    gpus = amount(GPU, quantity_text(order.gpu_count))
    return {**asked, **({GPU: gpus} if gpus else {})}


def _asking(order: NewLease) -> Asking:
    """Fractions of devices in a lease, each with its field: their minimum is the same as in allocations."""
    asked = amounts(order.resources)
    fractions = (
        (f"resources[{name}]" if name in asked else "gpu_count", name, value)
        for name, value in _amounts(order).items()
        if 0 < value < WHOLE and is_device(name)
    )
    return Asking(fractions=tuple(fractions))


def _faults(order: NewLease, policy: CreditPolicy) -> list[Cause]:
    faults = [
        *name_faults("job_id", order.job_id),
        *(name_faults("gpu_type", order.gpu_type, CLASS_CHARS_MAX) if order.gpu_type else ()),
        *device_faults("gpu_count", order.gpu_count),
        *amounts_faults("resources", order.resources),
        *seconds_faults("window_seconds", order.window_seconds, policy.extend_seconds_max),
    ]
    if faults:
        return faults
    if GPU in amounts(order.resources) and amount(GPU, quantity_text(order.gpu_count)):
        return [field_fault("gpu_count", f"must not be set together with {GPU} in resources")]
    wanted = _amounts(order)
    if not any(wanted.values()):
        return [field_fault("gpu_count", "is required, unless other resources are named")]
    if any(value > GPUS_MAX for name, value in wanted.items() if is_device(name)):
        return [field_fault("gpu_count", f"must be at most {GPUS_MAX // 1000}")]
    return []


async def extend_lease(call: Call) -> Outcome:
    """Extend a lease, as far ahead as the settings allow."""
    policy = (await call.context.tree()).credits
    order = await read_order(
        call, ExtendLease, "extension", lambda one: seconds_faults("delta_seconds", one.delta_seconds, SECONDS_MAX)
    )
    if isinstance(order, Refusal):
        return order
    found = await find_lease(call, spending=True)
    if isinstance(found, Refusal):
        return found
    lease, account = found
    command = ExtendLeaseCommand(
        idempotency_key=ledger_key_for(call, order, account.tenant_uid),
        actor=call.identity.actor,
        number=lease.id,
        delta=order.delta_seconds * MICROS,
        ahead_max=policy.extend_seconds_max * MICROS,
    )
    receipt = await ops.extend_lease(call.context.runtime, command, account.tenant)
    if isinstance(receipt, Refusal):
        return receipt
    after = receipt.lease
    assert after is not None
    return Answer(200, encode(ExtendedLease(after.name, credits_of(after.last_rate), time_text(after.paid_until))))


SECONDS_MAX = 30 * 86_400


async def close_lease(call: Call) -> Outcome:
    """Close a lease: settle it by the server's clock and release its hold. An ended lease stays unchanged."""
    order = await read_order(call, CloseLease, "closing", lambda _: [])
    if isinstance(order, Refusal):
        return order
    found = await find_lease(call, spending=True)
    if isinstance(found, Refusal):
        return found
    lease, account = found
    command = CloseLeaseCommand(
        idempotency_key=ledger_key_for(call, order, account.tenant_uid), actor=call.identity.actor, number=lease.id
    )
    receipt: Receipt | Refusal = await ops.close_lease(call.context.runtime, command, account.tenant)
    if isinstance(receipt, Refusal):
        return receipt
    after = receipt.lease
    assert after is not None
    return Answer(200, encode(ClosedLease(after.name, True, credits_of(after.posted), time_text(after.closed_at))))


# Reading.


async def get_lease(call: Call) -> Outcome:
    found = await find_lease(call)
    if isinstance(found, Refusal):
        return found
    lease, account = found
    return Answer(200, encode(lease_view(lease, account.name)))


async def list_leases(call: Call) -> Outcome:
    """List the open leases of an account or of all visible accounts, or the ended leases of an account."""
    state, limit = call.query.get("state", "open"), limit_of(call, LEASES_MAX)
    if isinstance(limit, Refusal):
        return limit
    if state == "open":
        return await _list_open(call, limit)
    if state == "ended":
        return await _list_ended(call, limit)
    return invalid("state must be open or ended", field_fault("state", "must be open or ended"))


async def _list_open(call: Call, limit: int) -> Outcome:
    scope, place = await _scope(call), continue_place(call, tuple[int])
    if isinstance(scope, Refusal):
        return scope
    if isinstance(place, Refusal):
        return place
    after = min(max(0, place[0]), lease_store.NUMBER_MAX) if place else 0
    async with call.context.database.reader() as db:
        found = await lease_store.list_open(db, scope, job=call.query.get("job_id", ""), after=after, limit=limit + 1)
        payers = await store.load_accounts(db, {one.account for one in found})
    following = continue_token(found[limit - 1].id) if len(found) > limit else ""
    return _listed(found[:limit], payers, following)


async def _list_ended(call: Call, limit: int) -> Outcome:
    account, place = await find_account(call), continue_place(call, tuple[int, int])
    if isinstance(account, Refusal):
        return account
    if isinstance(place, Refusal):
        return place
    before = (min(place[0], lease_store.NUMBER_MAX), min(place[1], lease_store.NUMBER_MAX)) if place else NEWEST
    async with call.context.database.reader() as db:
        found = await lease_store.list_ended(
            db, account.id, job=call.query.get("job_id", ""), before=before, limit=limit + 1
        )
    last = found[limit - 1] if len(found) > limit else None
    return _listed(found[:limit], {account.id: account}, continue_token(last.closed_at, last.id) if last else "")


NEWEST = (lease_store.NUMBER_MAX, lease_store.NUMBER_MAX)


def _listed(found: Sequence[Lease], payers: Mapping[int, Account], following: str) -> Answer:
    return Answer(200, encode(LeaseList([lease_view(one, payers[one.account].name) for one in found], following)))


async def _scope(call: Call) -> lease_store.LeaseScope | Refusal:
    """The accounts whose leases the caller may list."""
    identity = call.identity
    if named_owner(call) is not None:
        account = await find_account(call)
        return account if isinstance(account, Refusal) else lease_store.LeaseScope(account=account.id)
    if identity.role is Role.NODE:
        return lease_store.LeaseScope(node=identity.node)
    whose = reach(identity)
    users = None if whose.everything or whose.subtree else ("", identity.user)
    return lease_store.LeaseScope(tenants=await call.context.visible_tenants(identity), users=users)
