"""Verbs on credit: top up, refund, adjust, lease by name, close expired leases, set limits and prices; and the policy.

Each verb of a user is one command of the ledger's lane, decided under locks and answered once per request_id, for ever.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from bursar.commands.command import Reply
from bursar.commands.credit.credit import (
    Adjust,
    CloseLeaseCommand,
    DropPrice,
    ExtendLeaseCommand,
    Lapse,
    OpenLease,
    PutAccount,
    PutPrice,
    Refund,
    TopUp,
)
from bursar.commands.credit.ledger import Credit, Receipt
from bursar.commands.credit.shortfall import NoteShortfall
from bursar.core.credit.account import Owner, books_closed, is_filed, no_account
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.ops.objects.object import get
from bursar.ops.runtime.lane import Overloaded, put_all, raise_first
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.settings import SETTINGS_KEY, credit_policy_of

log = structlog.get_logger()


async def top_up(
    runtime: Runtime,
    owner: Owner,
    amount: int,
    *,
    actor: str,
    idempotency_key: IdempotencyKey | None = None,
    reason: str = "",
    tenant_uid: str = "",
) -> Receipt | Refusal:
    """Add credit to an account. `tenant_uid` is the result of `find_tenant`, if the caller has called it already."""
    whose = tenant_uid or await find_tenant(runtime, owner)
    if isinstance(whose, Refusal):
        return whose
    command = TopUp(
        idempotency_key=idempotency_key, actor=actor, tenant_uid=whose, whose=owner, amount=amount, reason=reason
    )
    return await submit(runtime, command, owner)


async def _correct(
    kind: type[Refund | Adjust],
    runtime: Runtime,
    owner: Owner,
    amount: int,
    *,
    actor: str,
    reason: str,
    lease: int = 0,
    idempotency_key: IdempotencyKey | None = None,
    tenant_uid: str = "",
) -> Receipt | Refusal:
    command = kind(
        idempotency_key=idempotency_key, actor=actor, tenant_uid=tenant_uid, whose=owner, amount=amount, reason=reason,
        for_lease=lease,
    )  # fmt: skip
    return await submit(runtime, command, owner)


refund: Final = partial(_correct, Refund)
adjust: Final = partial(_correct, Adjust)


async def open_lease(runtime: Runtime, command: OpenLease) -> Receipt | Refusal:
    return await submit(runtime, command, command.whose)


async def extend_lease(runtime: Runtime, command: ExtendLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


async def close_lease(runtime: Runtime, command: CloseLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


async def lapse(runtime: Runtime, overdue: Mapping[int, int]) -> dict[int, bool]:
    """Close leases that were not extended in time, given by number with the `paid_until` seen last, and settle their
    holds. A node that is away cannot report how long its work ran, so all of the paid time is posted until it reports.

    The result says for each decided lease whether it was closed: one that was extended meanwhile, or is closed already,
    is left alone. Leases missing from the result are still overdue.
    """
    asked = [Lapse(number=number, paid_until=paid_until) for number, paid_until in overdue.items()]
    replies = await put_all(runtime.crediting, asked)
    raise_first([one for one in replies if not isinstance(one, Overloaded)])
    return {
        one.number: not isinstance(reply, Refusal)
        for one, reply in zip(asked, replies, strict=True)
        if not isinstance(reply, BaseException)
    }


async def note_shortfalls(runtime: Runtime, notes: Sequence[NoteShortfall]) -> list[Reply | BaseException]:
    """Save notes on leases that could not be extended; each is answered by its reply or exception. They use the lane
    of changes, so that binding does not wait for them."""
    taken = (runtime.changing.submit(one, one.key.namespace) for one in notes)
    return await asyncio.gather(*taken, return_exceptions=True)


async def put_account(runtime: Runtime, command: PutAccount) -> Receipt | Refusal:
    if not command.tenant_uid:
        whose = await find_tenant(runtime, command.whose)
        if isinstance(whose, Refusal):
            return whose
    return await submit(runtime, command, command.whose)


async def put_price(runtime: Runtime, command: PutPrice) -> Receipt | Refusal:
    return await submit(runtime, command, Owner(""))


async def drop_price(runtime: Runtime, command: DropPrice) -> Receipt | Refusal:
    reply = await submit(runtime, command, Owner(""))
    if not isinstance(reply, Refusal):
        log.info(
            "price_withdrawn", message="a price was withdrawn", resource=command.resource, klass=command.klass,
            by=command.actor,
        )  # fmt: skip
    return reply


async def submit(runtime: Runtime, command: Credit, owner: Owner) -> Receipt | Refusal:
    return await runtime.crediting.submit(command, owner.tenant)


async def find_tenant(runtime: Runtime, owner: Owner) -> str | Refusal:
    """The uid of an account's tenant, whether the account is open yet or not. Accounts are opened only for tenants that
    exist, and the accounts of deleted tenants accept nothing."""
    if is_filed(owner.tenant):
        return books_closed(owner)
    async with runtime.database.reader() as db:
        tree = await runtime.trees.refresh(db)
    if owner.tenant in tree.tenants:
        return tree.tenants[owner.tenant].uid
    hint = f"Create the tenant first: bursar create tenant {owner.tenant}"
    return dataclasses.replace(no_account(owner), hint=hint)


async def load_credit_policy(runtime: Runtime) -> CreditPolicy:
    """The credit policy in the current system settings."""
    found = await get(runtime, SETTINGS_KEY)
    return CreditPolicy() if isinstance(found, Refusal) else credit_policy_of(found.doc)
