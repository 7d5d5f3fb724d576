"""Saving what a batch decided: counters, objects and their changes, in one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bursar.core.object import Key, Stored, Write
from bursar.core.quota import Pair
from bursar.core.tree import Row, Tree
from bursar.store import quota
from bursar.store.database import Connection, Stale
from bursar.store.object import encode_charge
from bursar.store.statements import statements

SQL = statements("batch")

encode = msgspec.json.Encoder().encode


async def save(db: Connection, writes: Sequence[Write], tree: Tree, changes: Mapping[Row, Pair]) -> None:
    """Move the counters, take the revisions, write each object's last state and every change.

    The writes get their revisions. What is not as it was decided on is Stale.
    """
    last = {write.key: index for index, write in enumerate(writes)}
    first: dict[Key, Stored | None] = {}
    for write in writes:
        first.setdefault(write.key, write.before)
    lines = [
        _line(write, _op(first[write.key], write, last[write.key] == index), first[write.key])
        for index, write in enumerate(writes)
    ]
    columns = map(list, zip(*lines, strict=True))
    saved = await db.fetchrow(SQL.save, *columns, *quota.delta_columns(tree, changes))
    _check(saved, [line[0] for line in lines], len(changes))
    for place, write in enumerate(writes, start=1):
        write.revision = saved["before"] + place


def _check(saved: Any, ops: Sequence[str], counters: int) -> None:
    wanted = {"counted": counters, "inserted": ops.count("insert"), "updated": ops.count("update")}
    wanted["deleted"] = ops.count("delete")
    for name, count in wanted.items():
        if saved[name] != count:
            raise Stale(f"{count} rows to be {name}, {saved[name]} found as decided")


def _op(first: Stored | None, write: Write, is_last: bool) -> str:
    if not is_last:
        return "leave"
    if write.after is None:
        return "delete" if first is not None else "leave"
    return "update" if first is not None else "insert"


def _line(write: Write, op: str, first: Stored | None) -> tuple[Any, ...]:
    shown, before = write.shown, write.before
    return (
        op,
        first.revision if first is not None else 0,
        *write.key,
        shown.uid,
        shown.tenant,
        write.type,
        encode(shown.labels),
        encode(shown.fields),
        encode(before.labels) if before is not None else None,
        encode(before.fields) if before is not None else None,
        shown.gang or None,
        encode_charge(shown.charge),
        shown.doc,
        shown.status,
        write.origin.actor,
        write.origin.verb,
        write.origin.reason,
        before.tenant if before is not None else None,
    )
