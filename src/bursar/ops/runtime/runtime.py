"""The runtime: database, lanes and caches of one process. API, gRPC and loops hold one and call verbs with it.

`ops/open_runtime.py` assembles it. This module only declares its parts, so that every verb can import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bursar.commands.command import Command, Reply
    from bursar.commands.credit.ledger import Credit, Receipt
    from bursar.core.objects.object import Key, Stored
    from bursar.core.values.refusal import Refusal
    from bursar.ops.credit.ledger import ExtendLanes, Prices
    from bursar.ops.credit.usage_events import Measure, Noted
    from bursar.ops.nodes.heartbeat import Heartbeat, HeartbeatHeard, KeptConnection
    from bursar.ops.nodes.signing import Signing
    from bursar.ops.quota.cluster_ceiling import CeilingCache
    from bursar.ops.quota.tenant_tree import TreeCache
    from bursar.ops.runtime.lane import Lane
    from bursar.ops.runtime.transaction import Transactor
    from bursar.ops.usage.usage_rollup import Past
    from bursar.store.db.database import Database
    from bursar.store.nodes.heartbeat import WantedSet


@dataclass(slots=True)
class Runtime:
    """Database, lanes and caches of one process.

    Creating has a lane of its own and is shed first; finishing, changing and binding go on.

    Commands that write very many objects go through `bulk`, one after another.
    """

    database: Database
    trees: TreeCache
    creating: Lane[Command, Reply]
    changing: Lane[Command, Reply]
    binding: Lane[Command, Reply]
    bulk: Lane[Command, Reply]
    shaping: Lane[Command, Reply]
    trying: Lane[Command, Reply]  # dry runs
    trying_shape: Lane[Command, Reply]
    reading: Lane[Key, Stored | None]
    heartbeating: Lane[Heartbeat, HeartbeatHeard | None]  # None for a heartbeat that does not count
    recalling: Lane[str, WantedSet]  # by the node's name
    extending: ExtendLanes
    crediting: Lane[Credit, Receipt | Refusal]  # all other changes of the ledger
    measuring: Lane[Measure, Noted | Refusal]
    ceilings: CeilingCache
    prices: Prices
    signing: Signing  # the keys that sign leases for nodes
    _transactors: list[Transactor[Any, Any] | KeptConnection[Any, Any]]
    past_hours: Past
    # Called after each commit, so that local watchers need not wait for a notification.
    on_commit: list[Callable[[], None]] = field(default_factory=list)

    async def close(self) -> None:
        lanes = (
            self.creating, self.changing, self.binding, self.bulk, self.shaping, self.trying, self.trying_shape,
        )  # fmt: skip
        reads = (self.reading, self.heartbeating, self.recalling)
        money = (self.extending, self.crediting, self.measuring)
        await asyncio.gather(
            *(lane.close() for lane in lanes), *(lane.close() for lane in reads), *(lane.close() for lane in money)
        )
        await asyncio.gather(*(one.close() for one in self._transactors), return_exceptions=True)
