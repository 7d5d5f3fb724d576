"""Paid placements on nodes without an agent, whose leases the controller extends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from bursar.core.credit.shortfall import Shortfall, recorded_shortfall
from bursar.core.objects.object import Key
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/agentless_billing")


class _PlacedOn(Struct, rename="camel"):
    name: str
    unpaid: str = ""
    paid_until: str = ""


_decode_nodes = msgspec.json.Decoder(list[_PlacedOn]).decode


class PaidPlace(NamedTuple):
    """A paid placement. `lease` is 0 if the lease has ended; `seq` is higher than that of any earlier heartbeat;
    `short` is the recorded shortfall of this node."""

    key: Key
    uid: str
    gang: str
    phase: str
    lease: int
    seq: int
    node: str
    epoch: int
    short: Shortfall | None = None


async def load_paid(db: Connection, nodes: Iterable[str]) -> list[PaidPlace]:
    rows = await db.fetch(SQL.paid_on, list(nodes))
    return [
        PaidPlace(
            Key("Allocation", row["namespace"], row["name"]), row["uid"], row["gang"], row["phase"] or "",
            row["lease"] or 0, row["now"], row["node"], row["epoch"], _short_on(row["node"], row["nodes"]),
        )
        for row in rows
    ]  # fmt: skip


def _short_on(node: str, nodes: bytes | None) -> Shortfall | None:
    found = (one for one in (_decode_nodes(nodes) if nodes else ()) if one.name == node)
    return next((recorded_shortfall(one.unpaid, one.paid_until) for one in found), None)
