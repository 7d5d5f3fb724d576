"""Objects in the database: locked, read, and saved with their changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from bursar.core.objects.charge import NOTHING, Charge, Facts
from bursar.core.objects.object import Key, Stored
from bursar.store.db.columns import lists, texts
from bursar.store.db.database import Connection, Stale
from bursar.store.db.sql_loader import statements

SQL = statements("objects/object")

CHARGES_KEPT = 4096

_encode = msgspec.json.Encoder().encode
_decode_map = msgspec.json.Decoder(dict[str, str]).decode


class _ChargeRow(msgspec.Struct, omit_defaults=True):
    """The stored form of a charge; its field names are short, because every row has one."""

    accepted: dict[str, int] = {}
    bound: dict[str, int] = {}
    due: dict[str, int] = {}
    scoped: bool = False
    terminating: bool = False
    best_effort: bool = False
    priority_class: str = ""
    priority: int | None = None


_decode_charge = msgspec.json.Decoder(_ChargeRow).decode


def encode_charge(charge: Charge) -> bytes | None:
    if charge is NOTHING or (charge.empty and not charge.due):
        return None
    raw: bytes | None = charge.known.get(_ChargeRow)
    if raw is None:
        facts = charge.facts
        row = _ChargeRow(
            dict(charge.accepted),
            dict(charge.bound),
            dict(charge.due),
            facts.scoped,
            facts.terminating,
            facts.best_effort,
            facts.priority_class,
            facts.priority,
        )
        raw = charge.known[_ChargeRow] = _encode(row)
    return raw


def decode_charge(raw: bytes | None) -> Charge:
    return NOTHING if raw is None else _charge(raw)


# Allocations of one template have identical charges, which are decoded once and shared.
@lru_cache(CHARGES_KEPT)
def _charge(raw: bytes) -> Charge:
    row = _decode_charge(raw)
    facts = Facts(row.scoped, row.terminating, row.best_effort, row.priority_class, row.priority)
    return Charge(facts, row.accepted, row.bound, row.due)


def stored(row: Any) -> Stored:
    return Stored(
        Key(row["kind"], row["namespace"], row["name"]),
        row["uid"],
        row["tenant"],
        _decode_map(row["labels"]),
        _decode_map(row["fields"]),
        row["doc"],
        row["status"] or b"{}",
        decode_charge(row["charge"]),
        row["gang"] or "",
        row["revision"],
    )


def _columns(keys: Iterable[Key]) -> tuple[str, str, str]:
    ordered = sorted(keys)
    return (
        texts([key.kind for key in ordered]),
        texts([key.namespace for key in ordered]),
        texts([key.name for key in ordered]),
    )


async def lock(db: Connection, keys: Iterable[Key]) -> dict[Key, Stored]:
    """Lock the existing objects among these, in key order, and return them."""
    return _by_key(await db.fetch(SQL.lock, *_columns(keys)))


class Ground(NamedTuple):
    """The locks and rows that a batch holds before it reads anything else."""

    version: int  # version of the tenant tree
    objects: dict[Key, Stored] | None = None  # None: not locked yet


async def lock_under_tree(db: Connection, keys: Iterable[Key]) -> Ground:
    """Take the tree's shared lock, then lock the existing objects in key order."""
    rows = await db.fetch(SQL.lock_under_tree, *_columns(keys))
    return _ground(rows)


async def lock_under_leader(db: Connection, keys: Iterable[Key]) -> tuple[int, Ground]:
    """Take the leader's row lock and the tree's shared lock, then lock the existing objects; return the leader's fence
    and the locked rows."""
    rows = await db.fetch(SQL.lock_under_leader, *_columns(keys))
    return rows[0]["fence"], _ground(rows)


def _ground(rows: Sequence[Any]) -> Ground:
    """Read the version and the objects; if no object was found, there is one line without an object."""
    first = rows[0]
    return Ground(first["tree_version"], _by_key(rows) if first["name"] is not None else {})


def _by_key(rows: Iterable[Any]) -> dict[Key, Stored]:
    found = [stored(row) for row in rows]
    return {one.key: one for one in found}


async def load(db: Connection, keys: Iterable[Key]) -> dict[Key, Stored]:
    return _by_key(await db.fetch(SQL.read, *_columns(keys)))


async def load_gang_members(db: Connection, gangs: Iterable[tuple[str, str]]) -> list[Key]:
    rows = await db.fetch(SQL.members_of_gangs, *lists(sorted(gangs), 2))
    return [Key(row["kind"], row["namespace"], row["name"]) for row in rows]


async def get(db: Connection, key: Key) -> Stored | None:
    row = await db.fetchrow(SQL.get, *key)
    return stored(row) if row else None


async def lock_owned(db: Connection, tenant: str, kinds: Iterable[str]) -> list[Stored]:
    """Lock and load the objects of these kinds that a tenant owns. The caller holds the tree's exclusive lock."""
    return [stored(row) for row in await db.fetch(SQL.owned, tenant, list(kinds))]


async def load_charges_in(db: Connection, namespace: str, kinds: Sequence[str]) -> list[Charge]:
    return [decode_charge(row["charge"]) for row in await db.fetch(SQL.charges_in, namespace, list(kinds))]


async def is_used(db: Connection, namespace: str, kinds: Sequence[str]) -> bool:
    return bool(await db.fetchval(SQL.is_used, namespace, list(kinds)))


async def save_charges(db: Connection, objects: Sequence[Stored]) -> None:
    """Save the charges of objects whose visible fields are unchanged."""
    rows = ((*one.key, one.revision, encode_charge(one.charge)) for one in objects)
    tag = await db.execute(SQL.save_charges, *lists(rows, 5))
    if tag != f"UPDATE {len(objects)}":
        raise Stale(f"{len(objects)} charges to save, but: {tag}")
