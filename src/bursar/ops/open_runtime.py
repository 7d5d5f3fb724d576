"""Assemble the runtime: its lanes, their capacities, and the batch function of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bursar.commands.command import Command, Reply
from bursar.commands.credit.ledger import Credit, Receipt
from bursar.core.credit.lease import Grant
from bursar.core.objects.object import Key, Stored
from bursar.core.values.refusal import Refusal
from bursar.ops.credit.ledger import (
    CREDITS_MAX,
    EXTENDING,
    EXTENSIONS_MAX,
    CreditBatch,
    Extend,
    ExtendBatch,
    ExtendLanes,
    PayerCache,
    Prices,
)
from bursar.ops.credit.usage_events import EVENTS_MAX, Measure, Noted, measure
from bursar.ops.nodes.heartbeat import HEARTBEATS_MAX, RECALLS_MAX, KeptConnection, hear, recall
from bursar.ops.nodes.signing import Signing
from bursar.ops.quota.cluster_ceiling import CeilingCache
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.lane import Lane
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.runtime.transaction import Transactor
from bursar.ops.usage.usage_rollup import Past
from bursar.ops.write_path.batch import WriteBatch
from bursar.ops.write_path.tenant_tree_write import TreeWriteBatch
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Database
from bursar.store.objects import object as object_store
from bursar.store.objects.change import ensure_partitions

# A backlog is bound in large batches, so that more commands share a batch's fixed cost.
BINDS_MAX = 512


async def open_runtime(database: Database) -> Runtime:
    """Open the runtime of one process, on a database that has its schema."""
    async with database.reader() as db:
        await ensure_partitions(db)
        await ledger_store.ensure_partitions(db)
    trees, prices, payers = TreeCache(), Prices(), PayerCache()
    transactors: list[Transactor[Any, Any] | KeptConnection[Any, Any]] = []
    heartbeats, recalls = KeptConnection(database, hear), KeptConnection(database, recall)
    extends = [
        Transactor[Extend, Grant | Refusal]("extending", database, ExtendBatch(prices, payers))
        for _ in range(EXTENDING)
    ]
    credits_ = Transactor[Credit, Receipt | Refusal]("crediting", database, CreditBatch(trees, prices, payers))
    measures = Transactor[Measure, Noted | Refusal]("measuring", database, measure)
    transactors += [heartbeats, recalls, credits_, measures, *extends]
    on_commit: list[Callable[[], None]] = []

    def lane(
        name: str,
        *,
        shape: bool = False,
        alone: bool = False,
        dry: bool = False,
        capacity: int = 8192,
        most: int = 256,
        runners: int = 1,
    ) -> Lane[Command, Reply]:
        runs = [
            Transactor[Command, Reply](
                name,
                database,
                TreeWriteBatch(trees) if shape else WriteBatch(trees, prices),
                dry=dry,
                on_commit=on_commit,
            )
            for _ in range(runners)
        ]
        transactors.extend(runs)
        # A change of the tree is decided alone: the rows it must read depend on what it changes.
        batch_max = 1 if shape or alone else most
        return Lane(name, *(one.run for one in runs), capacity=capacity, batch_max=batch_max, weigh=weight_of)

    return Runtime(
        database,
        trees,
        creating=lane("creating", capacity=4096),
        changing=lane("changing"),
        binding=lane("binding", most=BINDS_MAX, runners=2),
        bulk=lane("bulk", alone=True, capacity=1024),
        shaping=lane("shaping", shape=True),
        trying=lane("trying", dry=True, capacity=1024),
        trying_shape=lane("trying-shape", shape=True, dry=True, capacity=256),
        reading=Lane("reading", ObjectReader(database), capacity=16384),
        # Each stream waits for its answer before it sends again, so there is at most one heartbeat per stream.
        heartbeating=Lane("beating", heartbeats, capacity=65536, batch_max=HEARTBEATS_MAX),
        recalling=Lane("recalling", recalls, capacity=65536, batch_max=RECALLS_MAX),
        extending=ExtendLanes(
            [Lane("extending", one.run, capacity=65536, batch_max=EXTENSIONS_MAX) for one in extends], payers
        ),
        crediting=Lane("crediting", credits_.run, batch_max=CREDITS_MAX),
        measuring=Lane("measuring", measures.run, capacity=16384, batch_max=EVENTS_MAX),
        ceilings=CeilingCache(database, trees),
        prices=prices,
        signing=Signing(database),
        _transactors=transactors,
        past_hours=Past(),
        on_commit=on_commit,
    )


def weight_of(command: Command) -> int:
    return command.weight()


class ObjectReader:
    """Batched reads of single objects."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, keys: Sequence[Key]) -> Sequence[Stored | None]:
        async with self._database.reader() as db:
            found = await object_store.load(db, set(keys))
        return [found.get(key) for key in keys]
