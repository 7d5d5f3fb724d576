"""Webhooks: create, list, stop, test and remove. The secret is shown once, when the webhook is created, and never
written to the feed; the feed records who created, stopped or removed one.

Notices are committed with the change that they report; bridges/webhook.py sends them.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from datetime import datetime, timedelta

import msgspec
import structlog
from msgspec.structs import replace

from bursar.core.credit.ledger import News
from bursar.core.objects.approval import RequestNews
from bursar.core.objects.webhook import SECRET_BYTES, secret_fault, secret_of, url_fault
from bursar.core.quota.warning import QuotaNews
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

TYPES: Collection[str] = tuple(str(one) for one in (*News, *BudgetNews, *QuotaNews, *RequestNews))
WEBHOOKS = "system:webhooks"
TRIAL = "webhook.test"  # a test notice, sent to one webhook on request
KEPT = timedelta(days=30)
WEBHOOKS_MAX = 200

_encode = msgspec.json.Encoder().encode


async def add_webhook(runtime: Runtime, webhook: Webhook, secret: str = "") -> tuple[Webhook, str] | Refusal:
    """Create a webhook, with the given secret or a generated one. Only this answer contains the secret."""
    if causes := faults(webhook, secret):
        listed = "; ".join(f"{one.field}: {one.message}" for one in causes)
        return invalid(f"the webhook is invalid: {listed}", *causes)
    secret = secret or secret_of(os.urandom(SECRET_BYTES))
    async with runtime.database.reader() as db, db.transaction():
        # The lock keeps the tenant: no webhook may remain for a name that a later tenant could take.
        tree = await runtime.trees.at(db, await tree_store.lock_shared(db))
        if webhook.tenant and webhook.tenant not in tree.tenants:
            return Refusal(Code.NOT_FOUND, f'tenants "{webhook.tenant[:63]}" not found')
        if len(await store.load_all(db)) >= WEBHOOKS_MAX:
            return Refusal(
                Code.IN_USE, f"there are already {WEBHOOKS_MAX} webhooks, the maximum", "Remove one that is not used."
            )
        made = await store.add(db, webhook, secret)
        if made is None:
            return Refusal(
                Code.ALREADY_EXISTS,
                f'webhooks "{webhook.name}" already exists',
                "To get another secret, remove it and create it again.",
            )
        await save_notes(db, [webhook_note(webhook, "ADDED", "create", webhook.created_by)])
    log.info(
        "webhook_created", message="a webhook was created", webhook=webhook.name, direction=webhook.direction,
        by=webhook.created_by,
    )  # fmt: skip
    return replace(webhook, created_at=made), secret


def faults(webhook: Webhook, secret: str = "") -> list[Cause]:
    found = [field_fault("name", fault) for fault in dns_subdomain(webhook.name)]
    if secret and (fault := secret_fault(secret)):
        found.append(field_fault("secret", fault))
    if webhook.direction not in ("out", "in"):
        found.append(field_fault("direction", "must be out (for notices) or in (for payments)"))
    elif webhook.direction == "out" and (fault := url_fault(webhook.url)):
        found.append(field_fault("url", fault))
    elif webhook.direction == "in":
        found += [
            field_fault(name, "is only for webhooks of direction out")
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
    """Remove a webhook, with its undelivered notices."""
    async with runtime.database.reader() as db, db.transaction():
        gone = await store.remove(db, name)
        if gone is None:
            return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
        await save_notes(db, [webhook_note(gone, "DELETED", "delete", by)])
    log.info("webhook_removed", message="a webhook was removed", webhook=name, by=by)
    return None


async def stop_webhook(runtime: Runtime, name: str, why: str) -> None:
    """Stop deliveries to a webhook, until it is removed and created again."""
    async with runtime.database.reader() as db, db.transaction():
        stopped = await store.stop(db, name, why)
        if stopped is not None:
            await save_notes(db, [webhook_note(stopped, "MODIFIED", "stop", WEBHOOKS, why)])


async def try_webhook(runtime: Runtime, name: str, by: str = "") -> tuple[int, datetime] | Refusal:
    """Queue a test notice for one webhook: its number and time."""
    found = next((one for one in await list_webhooks(runtime) if one.name == name), None)
    if found is None:
        return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
    if found.direction != "out":
        return Refusal(Code.UNPROCESSABLE, f"webhook {name} has direction in: it receives no notices")
    async with runtime.database.reader() as db:
        made = await store.save_for(db, name, TRIAL, _encode({"webhook": name, "by": by}))
    if made is None:
        return Refusal(Code.ENDED, f"webhook {name} is stopped: {found.stopped}", "Remove it, and create it again.")
    return made


async def list_pending(runtime: Runtime, name: str, after: int, limit: int) -> list[Pending] | Refusal:
    """The undelivered notices of a webhook, in order."""
    async with runtime.database.reader() as db:
        found = await store.load_pending(db, name, after, limit)
        if not found and name not in {one.name for one in await store.load_all(db)}:
            return Refusal(Code.NOT_FOUND, f'webhooks "{name}" not found')
    return found


async def forget_notices(runtime: Runtime) -> int:
    """Delete notices older than `KEPT`, and return their number."""
    forgotten = 0
    async with runtime.database.reader() as db:
        while count := await store.forget(db, now() - KEPT):
            forgotten += count
    return forgotten
