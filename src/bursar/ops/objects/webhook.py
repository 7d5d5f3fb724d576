"""Webhooks: made, listed and removed. Their secrets are shown once, when they are made, and never written to the feed,
which tells who made, stopped or removed one.

What is sent to them is what others commit (`notice`); the bridge that sends it is bridges/webhook.py.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import datetime, timedelta

import msgspec
import structlog
from msgspec.structs import replace

from bursar.core.credit.ledger import News
from bursar.core.objects.webhook import SECRET_BYTES, secret_fault, secret_of, url_fault
from bursar.core.usage.budget import BudgetNews
from bursar.core.values.names import dns_subdomain
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.ops.access.audit import webhook_note
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects import webhook as store
from bursar.store.objects.change import save_notes
from bursar.store.objects.webhook import Pending, Webhook
from bursar.store.quota import tenant_tree as tree_store

log = structlog.get_logger()

TYPES: Collection[str] = tuple(str(one) for one in (*News, *BudgetNews))
WEBHOOKS = "system:webhooks"
TRIAL = "webhook.test"  # what is only sent to see whether it comes
KEPT = timedelta(days=30)
WEBHOOKS_MAX = 200

_encode = msgspec.json.Encoder().encode


async def add_webhook(runtime: Runtime, webhook: Webhook, secret: str = "") -> tuple[Webhook, str] | Refusal:
    """Make one, with the secret that is given or one of our own; the secret is in this answer, and nowhere else."""
    if causes := faults(webhook, secret):
        listed = "; ".join(f"{one.field}: {one.message}" for one in causes)
        return invalid(f"the webhook is invalid: {listed}", *causes)
    secret = secret or secret_of(os.urandom(SECRET_BYTES))
    async with runtime.database.reader() as db, db.transaction():
        # It cannot be deleted meanwhile: no webhook is left under a name that another may be given.
        tree = await runtime.trees.at(db, await tree_store.lock_shared(db))
        if webhook.tenant and webhook.tenant not in tree.tenants:
            return Refusal(Code.NOT_FOUND, f'tenants "{webhook.tenant[:63]}" not found')
        if len(await store.load_all(db)) >= WEBHOOKS_MAX:
            return Refusal(
                Code.IN_USE, f"there are {WEBHOOKS_MAX} webhooks already", "Remove one that nobody needs any more."
            )
        made = await store.add(db, webhook, secret)
        if made is None:
            return Refusal(
                Code.ALREADY_EXISTS,
                f'webhooks "{webhook.name}" already exists',
                "Remove it first to have another secret.",
            )
        await save_notes(db, [webhook_note(webhook, "ADDED", "create", webhook.created_by)])
    log.info("a webhook was made", webhook=webhook.name, direction=webhook.direction, by=webhook.created_by)
    return replace(webhook, created_at=made), secret


def faults(webhook: Webhook, secret: str = "") -> list[Cause]:
    found = [field_fault("name", fault) for fault in dns_subdomain(webhook.name)]
    if secret and (fault := secret_fault(secret)):
        found.append(field_fault("secret", fault))
    if webhook.direction not in ("out", "in"):
        found.append(field_fault("direction", "must be out, for notices, or in, for payments"))
    elif webhook.direction == "out" and (fault := url_fault(webhook.url)):
        found.append(field_fault("url", fault))
    elif webhook.direction == "in":
        found += [
            field_fault(name, "is for those that notices are sent to")
            for name, given in (("url", webhook.url), ("types", webhook.types), ("allowLocal", webhook.allow_local))
            if given
        ]
    if unknown := sorted(set(webhook.types) - set(TYPES)):
        found.append(field_fault("types", f"{unknown[0][:63]!r} is not one of {', '.join(TYPES)}"))
    return found


async def list_webhooks(runtime: Runtime) -> list[Webhook]:
    async with runtime.database.reader() as db:
        return await store.load_all(db)


async def remove_webhook(runtime: Runtime, name: str, by: str = "") -> Refusal | None:
    """What it was still to get is forgotten with it."""
    async with runtime.database.reader() as db, db.transaction():
        gone = await store.remove(db, name)
        if gone is None:
            return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
        await save_notes(db, [webhook_note(gone, "DELETED", "delete", by)])
    log.info("a webhook was removed", webhook=name, by=by)
    return None


async def stop_webhook(runtime: Runtime, name: str, why: str) -> None:
    """Send it nothing any more, until somebody makes it anew."""
    async with runtime.database.reader() as db, db.transaction():
        stopped = await store.stop(db, name, why)
        if stopped is not None:
            await save_notes(db, [webhook_note(stopped, "MODIFIED", "stop", WEBHOOKS, why)])


async def try_webhook(runtime: Runtime, name: str, by: str = "") -> tuple[int, datetime] | Refusal:
    """Have a notice sent that tells of nothing, to this one alone: its number, and when that was."""
    found = next((one for one in await list_webhooks(runtime) if one.name == name), None)
    if found is None:
        return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
    if found.direction != "out":
        return Refusal(Code.UNPROCESSABLE, f"webhook {name} is one whose payments are believed: nothing is sent to it")
    async with runtime.database.reader() as db:
        made = await store.save_for(db, name, TRIAL, _encode({"webhook": name, "by": by}))
    if made is None:
        return Refusal(Code.ENDED, f"webhook {name} is stopped: {found.stopped}", "Remove it, and make it anew.")
    return made


async def list_pending(runtime: Runtime, name: str, after: int, limit: int) -> list[Pending] | Refusal:
    """What a webhook has not taken, in order."""
    async with runtime.database.reader() as db:
        found = await store.load_pending(db, name, after, limit)
        if not found and name not in {one.name for one in await store.load_all(db)}:
            return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
    return found


async def forget_notices(runtime: Runtime) -> int:
    """Drop notices of long ago; how many."""
    forgotten = 0
    async with runtime.database.reader() as db:
        while count := await store.forget(db, now() - KEPT):
            forgotten += count
    return forgotten
