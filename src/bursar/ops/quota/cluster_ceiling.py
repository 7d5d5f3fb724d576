"""The ceiling in memory: how large the nodes are, so that what could never run is refused at once.

What fits is let in on what was read within the last second: at worst it waits, and says why. Nothing is refused before
the nodes have been read again, so that one registered a moment ago counts, whichever process registered it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from bursar.core.objects.charge import Amounts
from bursar.core.quota.satisfiable import Ceiling, Demand, ceiling_of, refusal
from bursar.core.values.refusal import Refusal
from bursar.store.db.database import Connection, Database
from bursar.store.quota import cluster_ceiling as store
from bursar.store.quota.cluster_ceiling import Edition
from bursar.wire.kinds.allocation import AllocationSpec, Resources, requests_of
from bursar.wire.kinds.node import allocatable_in

if TYPE_CHECKING:
    from bursar.ops.runtime.runtime import Runtime

AGE_SECONDS_MAX = 1.0
FITTING_MAX = 4096
FITTING_BYTES_MAX = 1024

_encode = msgspec.json.Encoder().encode

# What decides whether something fits: resources as written, nodes, exclusive, members.
_Form: TypeAlias = tuple[bytes, int, bool, int]


async def unsatisfiable(
    runtime: Runtime, spec: AllocationSpec, members: int = 1, *, path: str = "spec"
) -> Refusal | None:
    """Why so many allocations of this spec, all together, could never run; None when they could.

    `path` is where the spec stands in what was sent: causes name their fields there.
    """
    resources = _encode(spec.resources) if isinstance(spec.resources, Resources) else b""
    nodes = spec.nodes if isinstance(spec.nodes, int) else 1
    form = (resources, nodes, spec.exclusive is True, members)
    refused = await runtime.ceilings.refusal(form, spec)
    if refused is None or path == "spec":
        return refused
    causes = tuple(replace(one, field=path + one.field.removeprefix("spec")) for one in refused.causes)
    return replace(refused, causes=causes)


class CeilingCache:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._ceiling = Ceiling()
        self._fitting: set[_Form] = set()  # what is known to fit under this ceiling
        self._sizes: dict[str, Amounts] = {}
        self._edition = Edition()
        self._read_at = self._changed_at = float("-inf")
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """This process changed a node: who asks next sees the change."""
        self._changed_at = asyncio.get_running_loop().time()

    async def refusal(self, form: _Form, spec: AllocationSpec) -> Refusal | None:
        now = asyncio.get_running_loop().time()
        if self._read_at < max(now - AGE_SECONDS_MAX, self._changed_at):
            await self._read_since(now - AGE_SECONDS_MAX)
        if form in self._fitting:
            return None
        _, nodes, exclusive, members = form
        requests = {name: amount for name, amount in requests_of(spec).items() if amount}
        demand = Demand(requests, nodes, exclusive, members)
        if refusal(demand, self._ceiling) is not None:
            await self._read_since(now)
            if refused := refusal(demand, self._ceiling):
                return refused
        self._remember(form)
        return None

    def _remember(self, form: _Form) -> None:
        if len(form[0]) > FITTING_BYTES_MAX:
            return
        if len(self._fitting) >= FITTING_MAX:
            self._fitting.clear()
        self._fitting.add(form)

    async def _read_since(self, at: float) -> None:
        """Read the nodes, unless somebody began to after this moment and after the last change made here."""
        async with self._lock:
            if self._read_at >= max(at, self._changed_at):
                return
            began_at = asyncio.get_running_loop().time()
            async with self._database.reader() as db:
                await self._read(db)
            self._read_at = began_at

    async def _read(self, db: Connection) -> None:
        edition = await store.load_edition(db)
        if edition == self._edition:
            return
        changed = await store.load_nodes(db, self._edition.revision)
        sizes = {**self._sizes, **{name: allocatable_in(doc, status) for name, doc, status in changed}}
        if len(sizes) != edition.nodes:
            # Some are gone, or came meanwhile; which, only all of them tell.
            sizes = {name: allocatable_in(doc, status) for name, doc, status in await store.load_nodes(db)}
        # Most changes of a node are not of its size, and leave all that is known standing.
        if sizes != self._sizes:
            self._ceiling, self._fitting = ceiling_of(sizes.values()), set()
        self._sizes, self._edition = sizes, edition
