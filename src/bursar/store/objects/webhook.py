"""Notices in the database: where they are sent, and who is still to get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from bursar.core.objects.notification import Notification
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/webhook")


class Delivery(Struct, frozen=True):
    """A notice that is to be sent to a receiver now. Its secret is never shown."""

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
    """A receiver of notices (`out`), or somebody whose payments are believed (`in`), without its secret."""

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
    """A notice that a receiver has not taken; `next_at` is when it is tried again, None for never."""

    id: int
    type: str
    tenant: str
    subject: str
    at: datetime
    tries: int
    last_said: str
    next_at: datetime | None


class WebhookPayer(Struct, frozen=True):
    """Whose payments are believed; an empty tenant: for anybody's account."""

    name: str
    tenant: str
    secret: str

    def __repr__(self) -> str:
        return f"Payer({self.name!r})"


async def save(db: Connection, notifications: Sequence[Notification]) -> None:
    """For whoever wants them; in the transaction that they tell of."""
    await db.execute(
        SQL.save,
        [one.type for one in notifications],
        [one.tenant for one in notifications],
        [one.subject for one in notifications],
        [one.data for one in notifications],
    )


async def spread(db: Connection, limit: int = 1000) -> int:
    """Address new notices to those who want them; how many notices that were."""
    count: int = await db.fetchval(SQL.spread, limit)
    return count


async def load_receivers(db: Connection) -> list[str]:
    return [row["name"] for row in await db.fetch(SQL.receivers)]


async def claim(db: Connection, capacity: Mapping[str, int], seconds: float) -> list[Delivery]:
    """Take what is due, of each receiver at most so many; ours for so many seconds."""
    rows = await db.fetch(SQL.claim, list(capacity), list(capacity.values()), seconds)
    return [Delivery(*row) for row in rows]


async def save_delivered(db: Connection, one: Delivery) -> None:
    await db.execute(SQL.delivered, one.webhook, one.id)


async def save_failed(db: Connection, one: Delivery, seconds: float | None, said: str) -> None:
    """Try again in so many seconds; None: never."""
    await db.execute(SQL.failed, one.webhook, one.id, one.tries, -1.0 if seconds is None else seconds, said)


async def stop(db: Connection, webhook: str, why: str) -> Webhook | None:
    """Send it nothing any more; the webhook, if this is what stopped it."""
    return _told(await db.fetchrow(SQL.stop, webhook, why))


async def add(db: Connection, webhook: Webhook, secret: str) -> datetime | None:
    """When it was made; None where there is one of that name."""
    made: datetime | None = await db.fetchval(
        SQL.add, webhook.name, webhook.direction, webhook.tenant, webhook.url, secret, list(webhook.types),
        webhook.allow_local, webhook.created_by,
    )  # fmt: skip
    return made


async def remove(db: Connection, name: str) -> Webhook | None:
    """The webhook, if this is what removed it."""
    return _told(await db.fetchrow(SQL.remove, name))


def _told(row: Any) -> Webhook | None:
    if row is None:
        return None
    return Webhook(
        row["name"], row["direction"], row["tenant"], row["url"], tuple(row["types"]), row["allow_local"],
        row["created_by"],
    )  # fmt: skip


async def load_all(db: Connection) -> list[Webhook]:
    return [
        Webhook(
            row["name"], row["direction"], row["tenant"], row["url"], tuple(row["types"]), row["allow_local"],
            row["created_by"], row["created_at"], row["stopped"], row["waiting"], row["given_up"], row["last_said"],
        )
        for row in await db.fetch(SQL.list)
    ]  # fmt: skip


async def save_for(db: Connection, webhook: str, type_: str, data: bytes) -> tuple[int, datetime] | None:
    """A notice for one receiver alone; None where nothing is sent to it."""
    row = await db.fetchrow(SQL.save_for, webhook, type_, data)
    return (row["id"], row["at"]) if row is not None else None


async def load_pending(db: Connection, webhook: str, after: int, limit: int) -> list[Pending]:
    """What it has not taken, after a notice, in order."""
    return [Pending(*row) for row in await db.fetch(SQL.deliveries, webhook, after, limit)]


async def load_payers(db: Connection) -> Sequence[WebhookPayer]:
    return [WebhookPayer(*row) for row in await db.fetch(SQL.payers)]


async def forget(db: Connection, before: datetime, limit: int = 10_000) -> int:
    """Drop notices of long ago; how many were dropped."""
    tag: str = await db.execute(SQL.forget, before, limit)
    return int(tag.rpartition(" ")[2])
