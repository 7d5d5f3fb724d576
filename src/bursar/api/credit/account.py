"""Handlers of accounts: top-ups, refunds, adjustments, limits and status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from bursar.api.credit.credit import (
    continue_place,
    continue_token,
    find_account,
    ledger_key_for,
    limit_of,
    named_owner,
    own_account,
    read_order,
    sees,
    words_faults,
)
from bursar.api.http.route import Answer, Call, Outcome
from bursar.commands.credit.credit import PutAccount
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Account, Owner, no_account
from bursar.core.credit.account_change import GPUS_MAX
from bursar.core.credit.drift import NO_DRIFT, first_hour
from bursar.core.credit.lease import lease_number
from bursar.core.values.access import reach
from bursar.core.values.money import credits_of, nanocredits
from bursar.core.values.quantity import amount
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault
from bursar.ops.credit import credit as ops
from bursar.store.credit import ledger as store
from bursar.store.credit import reconcile as reconcile_store
from bursar.wire.reports.credit import (
    GPU,
    AccountChange,
    AccountList,
    AccountView,
    Moved,
    NewAccount,
    NewAdjustment,
    NewLimits,
    NewRefund,
    NewTopup,
    account_view,
    adjustment_faults,
    credit_faults,
    device_faults,
    drift_view,
    limits_of,
    name_faults,
    status_faults,
    zone_faults,
)
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import time_text
from bursar.wire.shared.limits import quantity_text

ACCOUNTS_MAX = 500


# Payments and adjustments.


async def top_up(call: Call) -> Outcome:
    """Top up an account. The first top-up of a tenant opens its pool."""
    order = await read_order(call, NewTopup, "top-up", _topup_faults)
    if isinstance(order, Refusal):
        return order
    owner = await _owner(call, order.account)
    if isinstance(owner, Refusal):
        return owner
    tenant_uid = await ops.find_tenant(call.context.runtime, owner)
    if isinstance(tenant_uid, Refusal):
        return tenant_uid
    receipt = await ops.top_up(
        call.context.runtime,
        owner,
        nanocredits(order.amount),
        actor=call.identity.actor,
        idempotency_key=ledger_key_for(call, order, tenant_uid),
        reason=order.reason,
        tenant_uid=tenant_uid,
    )
    return _moved(receipt, order)


async def refund(call: Call) -> Outcome:
    """Refund spent credit."""
    order = await read_order(call, NewRefund, "refund", _refund_faults)
    return order if isinstance(order, Refusal) else await _move(call, order, ops.refund)


async def adjust(call: Call) -> Outcome:
    """Adjust a balance by hand; the entry keeps the actor and the reason."""
    order = await read_order(call, NewAdjustment, "adjustment", _adjustment_order_faults)
    return order if isinstance(order, Refusal) else await _move(call, order, ops.adjust)


async def _move(call: Call, order: NewRefund | NewAdjustment, verb: Any) -> Outcome:
    account = await find_account(call, order.account)
    if isinstance(account, Refusal):
        return account
    lease = await _lease_of(call, account, order.lease_id)
    if isinstance(lease, Refusal):
        return lease
    receipt = await verb(
        call.context.runtime,
        Owner(account.tenant, account.user),
        nanocredits(order.amount),
        actor=call.identity.actor,
        reason=order.reason,
        lease=lease,
        idempotency_key=ledger_key_for(call, order, account.tenant_uid),
        tenant_uid=account.tenant_uid,
    )
    return _moved(receipt, order)


async def _lease_of(call: Call, account: Account, name: str) -> int | Refusal:
    """The lease of the refund, which must be of this account; 0 for none."""
    if not name:
        return 0
    number = lease_number(name)
    async with call.context.database.reader() as db:
        payers = await store.accounts_of_leases(db, [number]) if number is not None else {}
    if number is None or payers.get(number) != account.id:
        return Refusal(Code.NOT_FOUND, f'leases "{name[:63]}" of account {account.name} not found')
    return number


async def _owner(call: Call, in_body: str) -> Owner | Refusal:
    """The owner in the request, whether or not the account exists."""
    owner = named_owner(call, in_body)
    if isinstance(owner, Refusal):
        return owner
    if owner is None:
        account = await own_account(call)
        return account if isinstance(account, Refusal) else Owner(account.tenant, account.user)
    return Owner(*owner) if await sees(call, *owner) else no_account(Owner(*owner))


def _moved(receipt: Receipt | Refusal, order: NewTopup | NewRefund | NewAdjustment) -> Outcome:
    if isinstance(receipt, Refusal):
        return receipt
    account = receipt.account
    assert account is not None
    moved = Moved(
        account.name,
        credits_of(nanocredits(order.amount)),
        credits_of(account.posted),
        credits_of(account.available),
        time_text(receipt.at),
    )
    return Answer(201, encode(moved), headers={REPLAYED: "true"} if receipt.replayed else {})


REPLAYED = "Idempotent-Replayed"


def _topup_faults(order: NewTopup) -> list[Cause]:
    return [*credit_faults("amount", order.amount, least=1), *words_faults("reason", order.reason)]


def _refund_faults(order: NewRefund) -> list[Cause]:
    return [*credit_faults("amount", order.amount, least=1), *words_faults("reason", order.reason, required=True)]


def _adjustment_order_faults(order: NewAdjustment) -> list[Cause]:
    return [*adjustment_faults("amount", order.amount), *words_faults("reason", order.reason, required=True)]


# Accounts and limits.


async def list_accounts(call: Call) -> Outcome:
    limit, place = limit_of(call, ACCOUNTS_MAX), continue_place(call, tuple[str, str])
    if isinstance(limit, Refusal):
        return limit
    if isinstance(place, Refusal):
        return place
    tenants, whose = await call.context.visible_tenants(call.identity), reach(call.identity)
    users = None if whose.everything or whose.subtree else ("", call.identity.user)
    async with call.context.database.reader() as db:
        found = await store.list_accounts(db, tenants, users, place or ("", ""), limit + 1)
    shown = found[:limit]
    following = continue_token(found[limit - 1].tenant, found[limit - 1].user) if len(found) > limit else ""
    return Answer(200, encode(AccountList(await _shown(call, shown), following)))


async def get_account(call: Call) -> Outcome:
    account = await find_account(call)
    return account if isinstance(account, Refusal) else Answer(200, encode((await _shown(call, [account]))[0]))


async def open_account(call: Call) -> Outcome:
    """Open an account. A user's own account then pays for that user instead of the tenant's pool."""
    order = await read_order(call, NewAccount, "account", _account_faults, required=False)
    if isinstance(order, Refusal):
        return order
    owner = Owner(order.tenant, order.user)
    if not await sees(call, *owner):
        return no_account(owner)
    tenant_uid = await ops.find_tenant(call.context.runtime, owner)
    if isinstance(tenant_uid, Refusal):
        return tenant_uid
    changes: dict[str, Any] = {"credit_limit": nanocredits(order.credit_limit)}
    if order.low_balance is not None:
        changes["low_balance"] = nanocredits(order.low_balance)
    command = PutAccount(
        idempotency_key=ledger_key_for(call, order, tenant_uid),
        actor=call.identity.actor,
        tenant_uid=tenant_uid,
        whose=owner,
        changes=changes,
        only_new=True,
    )
    return _put(await ops.put_account(call.context.runtime, command), 201)


async def change_account(call: Call) -> Outcome:
    """Change the status, the credit limit and the low-balance threshold of an account."""
    order = await read_order(call, AccountChange, "account", _change_faults, required=False)
    if isinstance(order, Refusal):
        return order
    changes: dict[str, Any] = {}
    if order.status is not UNSET:
        changes["status"] = order.status
    if order.credit_limit is not UNSET:
        changes["credit_limit"] = nanocredits(order.credit_limit)
    if order.low_balance is not UNSET:
        changes["low_balance"] = None if order.low_balance is None else nanocredits(order.low_balance)
    receipt = await _amend(call, order, changes)
    return _put(receipt, 200)


async def get_limits(call: Call) -> Outcome:
    account = await find_account(call)
    if isinstance(account, Refusal):
        return account
    async with call.context.database.reader() as db:
        return Answer(200, encode(limits_of(account, await store.load_now(db))))


async def put_limits(call: Call) -> Outcome:
    """Replace all limits of an account. The default burst is the cost of one window."""
    order = await read_order(call, NewLimits, "set of limits", _limit_faults, required=False)
    if isinstance(order, Refusal):
        return order
    rate = None if order.spend_rate is None else nanocredits(order.spend_rate)
    burst = (rate or 0) * (await call.context.tree()).credits.lease_seconds
    changes = {
        "gpus_max": None if order.concurrency is None else _thousandths(order.concurrency),
        "spend_rate_max": rate,
        "spend_burst": burst if order.spend_burst is None else nanocredits(order.spend_burst),
        "daily_cap": None if order.daily_cap is None else nanocredits(order.daily_cap),
        "stop_at_cap": order.stop_at_cap,
        "time_zone": order.time_zone,
    }
    receipt = await _amend(call, order, changes)
    if isinstance(receipt, Refusal):
        return receipt
    assert receipt.account is not None
    return Answer(200, encode(limits_of(receipt.account, receipt.at)))


async def _amend(call: Call, order: AccountChange | NewLimits, changes: dict[str, Any]) -> Receipt | Refusal:
    account = await find_account(call)
    if isinstance(account, Refusal):
        return account
    command = PutAccount(
        idempotency_key=ledger_key_for(call, order, account.tenant_uid),
        actor=call.identity.actor,
        tenant_uid=account.tenant_uid,
        whose=Owner(account.tenant, account.user),
        changes=changes,
        only_old=True,
    )
    return await ops.put_account(call.context.runtime, command)


def _put(receipt: Receipt | Refusal, status: int) -> Outcome:
    """Answer with the account as it was written; a repeated request gets the same response."""
    if isinstance(receipt, Refusal):
        return receipt
    assert receipt.account is not None
    return Answer(status, encode(account_view(receipt.account, receipt.at)))


async def _shown(call: Call, accounts: Sequence[Account]) -> list[AccountView]:
    policy = (await call.context.tree()).credits
    async with call.context.database.reader() as db:
        now = await store.load_now(db)
        ids = [one.id for one in accounts]
        drifts = await reconcile_store.load_drifts(db, ids, first_hour(now, policy.drift_account_hours))
    return [account_view(one, now, drift_view(drifts.get(one.id, NO_DRIFT), policy)) for one in accounts]


def _thousandths(given: str | float) -> int:
    return amount(GPU, quantity_text(given))


def _account_faults(order: NewAccount) -> list[Cause]:
    return [
        *name_faults("tenant", order.tenant),
        *(name_faults("user", order.user) if order.user else ()),
        *credit_faults("credit_limit", order.credit_limit),
        *(() if order.low_balance is None else credit_faults("low_balance", order.low_balance)),
    ]


def _change_faults(order: AccountChange) -> list[Cause]:
    given = (order.status, order.credit_limit, order.low_balance)
    if all(one is UNSET for one in given):
        return [field_fault("", "set at least one of status, credit_limit and low_balance")]
    return [
        *(() if order.status is UNSET else status_faults("status", str(order.status))),
        *(() if order.credit_limit is UNSET else credit_faults("credit_limit", order.credit_limit)),
        *(() if order.low_balance in (UNSET, None) else credit_faults("low_balance", order.low_balance)),
    ]


def _limit_faults(order: NewLimits) -> list[Cause]:
    amounts = {name: getattr(order, name) for name in ("spend_rate", "spend_burst", "daily_cap")}
    faults = [one for name, value in amounts.items() if value is not None for one in credit_faults(name, value)]
    faults += zone_faults("time_zone", order.time_zone)
    if order.spend_burst is not None and order.spend_rate is None:
        faults.append(field_fault("spend_burst", "requires spend_rate"))
    if order.concurrency is not None:
        wrong = device_faults("concurrency", order.concurrency)
        if not wrong and _thousandths(order.concurrency) > GPUS_MAX:
            wrong = [field_fault("concurrency", f"must be at most {GPUS_MAX // 1000}")]
        faults += wrong
    return faults
