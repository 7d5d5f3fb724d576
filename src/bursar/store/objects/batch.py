"""Saving a batch: counters, objects with their changes, and placements, in one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bursar.core.nodes.node import NodeCapacity, Placement
from bursar.core.objects.object import Key, Stored, Write
from bursar.core.quota.quota import ScopePair
from bursar.core.quota.tenant_tree import Row, Tree
from bursar.store.db.columns import documents, numbers, texts
from bursar.store.db.database import Connection, Stale
from bursar.store.db.sql_loader import statements
from bursar.store.nodes import node
from bursar.store.objects.object import encode_charge
from bursar.store.quota import quota

SQL = statements("objects/batch")

SAVE_PLACED = SQL.save.replace("-- placing\n", f"{SQL.placing}\n").replace("-- placing_told\n", f"{SQL.placing_told}\n")

encode = msgspec.json.Encoder().encode


async def save(db: Connection, writes: Sequence[Write], tree: Tree, changes: Mapping[Row, ScopePair]) -> None:
    """Update the counters, number the revisions, write the last state of each object and every change.

    Writes receive their revisions. Raises Stale if a row differs from the one that was decided on.
    """
    ops, columns = _lines(writes)
    saved = await db.fetchrow(SQL.save, *columns, *quota.delta_columns(tree, changes))
    _check(saved, ops, {"counted": len(changes)})
    _number(writes, saved["before"])


async def save_placed(
    db: Connection,
    writes: Sequence[Write],
    tree: Tree,
    changes: Mapping[Row, ScopePair],
    used: Sequence[NodeCapacity],
    placed: Sequence[Placement],
) -> None:
    """Do the same as `save`, and also write the free resources of locked nodes and new placements."""
    places = {write.shown.uid: place for place, write in enumerate(writes, start=1)}
    ops, columns = _lines(writes)
    parts = node.placement_columns(placed, [places[one.uid] for one in placed])
    saved = await db.fetchrow(
        SAVE_PLACED, *columns, *quota.delta_columns(tree, changes), *node.capacity_columns(used), *parts
    )
    _check(saved, ops, {"counted": len(changes), "used": len(used)})
    _number(writes, saved["before"])


def _number(writes: Sequence[Write], before: int) -> None:
    for place, write in enumerate(writes, start=1):
        write.revision = before + place


def _check(saved: Any, ops: Sequence[str], besides: Mapping[str, int]) -> None:
    wanted = {"inserted": ops.count("insert"), "updated": ops.count("update"), "deleted": ops.count("delete")}
    wanted |= besides
    for name, count in wanted.items():
        if saved[name] != count:
            raise Stale(f"{count} rows to be {name}, {saved[name]} found as decided")


def _lines(writes: Sequence[Write]) -> tuple[list[str], tuple[str, ...]]:
    """Return the operation on each object's row, and all columns of the lines."""
    last = {write.key: write for write in writes}
    first: dict[Key, Stored | None] = {}
    for write in writes:
        first.setdefault(write.key, write.before)
    ops = [_op(first[write.key], write, last[write.key] is write) for write in writes]
    return ops, (texts(ops), *_columns(writes, [first[write.key] for write in writes]))


def _op(first: Stored | None, write: Write, is_last: bool) -> str:
    if not is_last:
        return "leave"
    if write.after is None:
        return "delete" if first is not None else "leave"
    return "update" if first is not None else "insert"


def _columns(writes: Sequence[Write], firsts: Sequence[Stored | None]) -> tuple[str, ...]:
    """Columns with one line per write. Values that equal the stored ones (`first`) are not sent again."""
    shown = [write.shown for write in writes]
    before = [write.before for write in writes]
    sent = list(zip(shown, before, firsts, strict=True))
    return (
        numbers([first.revision if first else 0 for first in firsts]),
        texts([write.key.kind for write in writes]),
        texts([write.key.namespace for write in writes]),
        texts([write.key.name for write in writes]),
        texts([one.uid for one in shown]),
        texts([one.tenant for one in shown]),
        texts([write.type for write in writes]),
        documents([None if first and one.labels is first.labels else encode(one.labels) for one, _, first in sent]),
        documents([encode(one.fields) for one in shown]),
        documents([None if was is first or was is None else encode(was.labels) for _, was, first in sent]),
        documents([None if was is first or was is None else encode(was.fields) for _, was, first in sent]),
        texts([one.gang for one in shown]),
        documents([encode_charge(one.charge) for one in shown]),
        documents([None if first and one.doc is first.doc else one.doc for one, _, first in sent]),
        documents([one.status for one in shown]),
        texts([write.origin.actor for write in writes]),
        texts([write.origin.verb for write in writes]),
        texts([write.origin.reason for write in writes]),
        texts([was.tenant if was else "" for was in before]),
    )
