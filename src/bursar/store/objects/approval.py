"""Requests under approval gates in the database: the open ones, and the approvals with a time ahead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bursar.core.objects.approval import DUE_FIELD, GATE_FIELD, NOTED_FIELD, SINCE_FIELD
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Stored, Write
from bursar.store.db.columns import lists
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements
from bursar.store.objects.object import decode_charge

SQL = statements("objects/approval")
EMPTY = b"{}"


class OpenRequest(NamedTuple):
    """An undecided request, with its object."""

    key: Key
    tenant: str
    gate: str
    since: str
    revision: int
    gang: str
    charge: Charge
    doc: bytes
    status: bytes


class RequestCharge(NamedTuple):
    """The charge of a request, and the gang with which it is decided; empty if it is decided alone."""

    charge: Charge
    gang: str


class OpenGate(NamedTuple):
    """The number of undecided requests at a gate, and the time of the oldest: of all, and of those without a note."""

    gate: str
    requests: int
    oldest: str
    oldest_unanswered: str  # empty if all were noted


@dataclass(frozen=True, slots=True)
class After:
    """The place in the list of undecided requests after which a page begins."""

    since: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""


class Due(NamedTuple):
    """An object whose approval has something due."""

    due: str
    key: Key


async def save(db: Connection, writes: Sequence[Write]) -> None:
    """Write the rows of objects whose approval changed."""
    put: dict[Key, Stored] = {}
    gone: set[Key] = set()
    for write in writes:
        was, now = _row(write.before), _row(write.after)
        if was != now or (now is not None and write.before is None):
            put.pop(write.key, None)
            gone.discard(write.key)
            if now is None:
                gone.add(write.key)
            elif write.after is not None:
                put[write.key] = write.after
    if put:
        rows = [(*key, one.tenant, *(_row(one) or ())) for key, one in put.items()]
        await db.execute(SQL.put, *lists(rows, 8))
    if gone:
        await db.execute(SQL.remove, *lists(sorted(gone), 3))


def _row(one: Stored | None) -> tuple[str, str, str, str] | None:
    """The gate that is open, since when, its last note, and the next time at which something is due; None without a
    gate and such a time."""
    if one is None:
        return None
    gate, due = one.fields.get(GATE_FIELD, ""), one.fields.get(DUE_FIELD, "")
    return (gate, one.fields.get(SINCE_FIELD, ""), one.fields.get(NOTED_FIELD, ""), due) if gate or due else None


def concerns(writes: Sequence[Write]) -> bool:
    """Whether any write changes an approval."""
    return any(_row(write.before) != _row(write.after) for write in writes)


async def list_open(
    db: Connection, tenants: Collection[str] | None, gates: Collection[str] | None, after: After, limit: int
) -> list[OpenRequest]:
    rows = await db.fetch(
        SQL.list_open,
        None if tenants is None else sorted(tenants),
        None if gates is None else sorted(gates),
        after.since,
        after.kind,
        after.namespace,
        after.name,
        limit,
    )
    return [
        OpenRequest(
            Key(row["kind"], row["namespace"], row["name"]), row["tenant"], row["gate"], row["since"], row["revision"],
            row["gang"] or "", decode_charge(row["charge"]), row["doc"], row["status"] or EMPTY,
        )
        for row in rows
    ]  # fmt: skip


async def load_charges(db: Connection, keys: Collection[Key]) -> dict[Key, RequestCharge]:
    """Load the charges of those requests that exist."""
    return {
        Key(row["kind"], row["namespace"], row["name"]): RequestCharge(decode_charge(row["charge"]), row["gang"] or "")
        for row in await db.fetch(SQL.charges, *lists(sorted(keys), 3))
    }


async def list_due(db: Connection, at: str, after: Due, limit: int) -> list[Due]:
    """The objects whose approval has something due, earliest first, after one of them."""
    rows = await db.fetch(SQL.list_due, at, after.due, *after.key, limit)
    return [Due(row["due"], Key(row["kind"], row["namespace"], row["name"])) for row in rows]


async def find_next_due(db: Connection, after: str) -> str:
    """The next time after `after` at which something is due; empty if nothing is."""
    return str(await db.fetchval(SQL.next_due, after) or "")


async def count_open(db: Connection) -> list[OpenGate]:
    return [
        OpenGate(row["gate"], row["open"], row["oldest"], row["unanswered"] or "")
        for row in await db.fetch(SQL.count_open)
    ]
