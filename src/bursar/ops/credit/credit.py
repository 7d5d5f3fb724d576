"""Verbs on credit: top up, refund, adjust, lease by name, set limits and prices.

Each is one command of the ledger's lane, decided under locks and answered once per request_id, for ever.
"""

from __future__ import annotations

import dataclasses

import structlog

from bursar.commands.credit.credit import (
    Adjust,
    CloseLeaseCommand,
    DropPrice,
    ExtendLeaseCommand,
    OpenLease,
    PutAccount,
    PutPrice,
    Refund,
    TopUp,
)
from bursar.commands.credit.ledger import Credit, Receipt
from bursar.core.credit.account import Owner, books_closed, is_filed, no_account
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.runtime import Runtime

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


async def refund(
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
    command = Refund(
        idempotency_key=idempotency_key, actor=actor, tenant_uid=tenant_uid, whose=owner, amount=amount, reason=reason,
        for_lease=lease,
    )  # fmt: skip
    return await submit(runtime, command, owner)


async def adjust(
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
    command = Adjust(
        idempotency_key=idempotency_key, actor=actor, tenant_uid=tenant_uid, whose=owner, amount=amount, reason=reason,
        for_lease=lease,
    )  # fmt: skip
    return await submit(runtime, command, owner)


async def open_lease(runtime: Runtime, command: OpenLease) -> Receipt | Refusal:
    return await submit(runtime, command, command.whose)


async def extend_lease(runtime: Runtime, command: ExtendLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


async def close_lease(runtime: Runtime, command: CloseLeaseCommand, tenant: str = "") -> Receipt | Refusal:
    return await submit(runtime, command, Owner(tenant))


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
