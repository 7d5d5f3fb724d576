"""Gangs in the database: size, number of members, and whether they are charged as a set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from bursar.core.objects.allocation import GangKey, GangRow, Peer
from bursar.store.db.columns import documents, lists
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("objects/gang")

_encode_peers = msgspec.json.Encoder().encode
_decode_peers = msgspec.json.Decoder(tuple[Peer, ...]).decode


def _columns(keys: Iterable[GangKey]) -> list[list[str]]:
    return lists(sorted(keys), 2)


async def ensure(db: Connection, min_members: Mapping[GangKey, int]) -> None:
    ordered = sorted(min_members)
    await db.execute(SQL.ensure, *_columns(ordered), [min_members[key] for key in ordered])


async def lock(db: Connection, keys: Iterable[GangKey]) -> None:
    await db.fetchval(SQL.lock, *_columns(keys))


async def load(db: Connection, keys: Iterable[GangKey]) -> dict[GangKey, GangRow]:
    rows = await db.fetch(SQL.read, *_columns(keys))
    return {
        (row["namespace"], row["name"]): GangRow(
            row["min_members"], row["members"], row["charged"], _decode_peers(row["peers"]) if row["peers"] else ()
        )
        for row in rows
    }


async def save(db: Connection, gangs: Mapping[GangKey, GangRow], *, locked: Iterable[GangKey]) -> None:
    """Save changed gangs, and delete those among the locked ones that have no members."""
    if ordered := sorted(gangs):
        await db.execute(
            SQL.save,
            *_columns(ordered),
            [gangs[key].min_members for key in ordered],
            [gangs[key].members for key in ordered],
            [gangs[key].charged for key in ordered],
            documents([_encode_peers(gangs[key].peers) for key in ordered]),
        )
    await db.execute(SQL.remove_empty, *_columns(locked))
