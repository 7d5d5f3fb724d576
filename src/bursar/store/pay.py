"""What is placed on nodes and paid for, in the database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bursar.core.object import Key
from bursar.store.database import Connection
from bursar.store.statements import statements

SQL = statements("pay")


class PaidPlace(NamedTuple):
    """`lease` is 0 where it is not open any more; `seq` is higher than that of any beat before."""

    key: Key
    uid: str
    gang: str
    phase: str
    lease: int
    seq: int


async def load_paid(db: Connection, nodes: Iterable[str]) -> list[PaidPlace]:
    rows = await db.fetch(SQL.paid_on, list(nodes))
    return [
        PaidPlace(
            Key("Allocation", row["namespace"], row["name"]), row["uid"], row["gang"], row["phase"] or "",
            row["lease"] or 0, row["now"],
        )
        for row in rows
    ]  # fmt: skip
