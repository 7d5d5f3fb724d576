"""Webhooks, events and their pending deliveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from bursar.core.objects.notification import Notification
from bursar.store.db.columns import lists
from bursar.store.db.database import Connection, affected
from bursar.store.db.sql_loader import statements

SQL = statements("objects/webhook")


class Delivery(Struct, frozen=True):
    """An event that is due for delivery to a receiver. Its repr hides the secret."""

    id: int
    type: str
    tenant: str
    subject: str
    data: bytes
    at: datetime
    webhook: str
    url: str
    secret: str
    allow_local: bool
    tries: int
    age_seconds: float

    def __repr__(self) -> str:
        return f"Delivery({self.id}, {self.webhook!r}, tries={self.tries})"


class Webhook(Struct, frozen=True):
    """A receiver of events (`out`), or a sender of payments (`in`), without its secret."""

    name: str
    direction: str = "out"
    tenant: str = ""
    url: str = ""
    types: tuple[str, ...] = ()
    allow_local: bool = False
    created_by: str = ""
    created_at: datetime | None = None
    stopped: str = ""
    waiting: int = 0
    given_up: int = 0
    last_said: str = ""


class Pending(Struct, frozen=True):
    """An event that its receiver has not accepted; `next_at` is the time of the next attempt, None if there is none."""

    id: int
    type: str
    tenant: str
    subject: str
    at: datetime
    tries: int
    last_said: str
    next_at: datetime | None


class WebhookPayer(Struct, frozen=True):
    """A sender of payments; an empty tenant means all accounts."""

    name: str
    tenant: str
    secret: str

    def __repr__(self) -> str:
        return f"Payer({self.name!r})"


async def save(db: Connection, notifications: Sequence[Notification]) -> None:
    """Save events for their receivers, in the transaction that causes them."""
    await db.execute(SQL.save, *lists(((one.type, one.tenant, one.subject, one.data) for one in notifications), 4))


async def spread(db: Connection, limit: int = 1000) -> int:
    """Create the deliveries of new events; return the number of events."""
    return int(await db.fetchval(SQL.spread, limit))


async def load_receivers(db: Connection) -> list[str]:
    return [row["name"] for row in await db.fetch(SQL.receivers)]


async def claim(db: Connection, capacity: Mapping[str, int], seconds: float) -> list[Delivery]:
    """Claim due deliveries for `seconds`, at most `capacity` of each receiver."""
    rows = await db.fetch(SQL.claim, list(capacity), list(capacity.values()), seconds)
    return [Delivery(*row) for row in rows]


async def save_delivered(db: Connection, one: Delivery) -> None:
    await db.execute(SQL.delivered, one.webhook, one.id)


async def save_failed(db: Connection, one: Delivery, seconds: float | None, said: str) -> None:
    """Schedule the next attempt in `seconds`; None: no further attempt."""
    await db.execute(SQL.failed, one.webhook, one.id, one.tries, -1.0 if seconds is None else seconds, said)


async def stop(db: Connection, webhook: str, why: str) -> Webhook | None:
    """Stop deliveries to a webhook; return it if it was active until now."""
    row = await db.fetchrow(SQL.stop, webhook, why)
    return _webhook(row) if row else None


async def add(db: Connection, webhook: Webhook, secret: str) -> datetime | None:
    """Add a webhook; return its creation time, or None if the name is taken."""
    made: datetime | None = await db.fetchval(
        SQL.add, webhook.name, webhook.direction, webhook.tenant, webhook.url, secret, list(webhook.types),
        webhook.allow_local, webhook.created_by,
    )  # fmt: skip
    return made


async def remove(db: Connection, name: str) -> Webhook | None:
    """Remove a webhook; return it if it existed."""
    row = await db.fetchrow(SQL.remove, name)
    return _webhook(row) if row else None


def _webhook(row: Any) -> Webhook:
    return Webhook(**{**row, "types": tuple(row["types"])})


async def load_all(db: Connection) -> list[Webhook]:
    return [_webhook(row) for row in await db.fetch(SQL.list)]


async def save_for(db: Connection, webhook: str, type_: str, data: bytes) -> tuple[int, datetime] | None:
    """Save an event for one receiver only; None if the receiver does not exist or is stopped."""
    row = await db.fetchrow(SQL.save_for, webhook, type_, data)
    return (row["id"], row["at"]) if row is not None else None


async def load_pending(db: Connection, webhook: str, after: int, limit: int) -> list[Pending]:
    """Load the undelivered events of a webhook after an event, in order."""
    return [Pending(*row) for row in await db.fetch(SQL.deliveries, webhook, after, limit)]


async def load_payers(db: Connection) -> Sequence[WebhookPayer]:
    return [WebhookPayer(*row) for row in await db.fetch(SQL.payers)]


async def forget(db: Connection, before: datetime, limit: int = 10_000) -> int:
    """Drop up to `limit` old events; return the number."""
    return affected(await db.execute(SQL.forget, before, limit))
