"""Cluster ceilings: a cache of the sizes of the nodes that a tenant may use, to refuse requests that can never run.

Tenants that may use the same nodes share a ceiling. A request that fits is accepted on data of the last second: at
worst it stays pending, with a reason. A request is refused only after the nodes were read again, so that a node
registered a moment ago counts, whichever process registered it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from bursar.core.nodes.node import is_open_to
from bursar.core.objects.charge import Amounts
from bursar.core.quota.satisfiable import Ceiling, Demand, ceiling_of, refusal
from bursar.core.quota.tenant_tree import lineage
from bursar.core.values.refusal import Refusal
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.store.db.database import Connection, Database
from bursar.store.quota import cluster_ceiling as store
from bursar.store.quota.cluster_ceiling import Edition
from bursar.wire.kinds.allocation import AllocationSpec, Resources, requests_of
from bursar.wire.kinds.node import allocatable_in, dedicated_to

if TYPE_CHECKING:
    from bursar.ops.runtime.runtime import Runtime

AGE_SECONDS_MAX = 1.0
FITTING_MAX = 4096
FITTING_BYTES_MAX = 1024
CEILINGS_MAX = 256

_encode = msgspec.json.Encoder().encode

# The fields that decide whether a request fits: resources as written, nodes, exclusive, members.
_Form: TypeAlias = tuple[bytes, int, bool, int]


async def unsatisfiable(
    runtime: Runtime, spec: AllocationSpec, members: int = 1, *, tenant: str, path: str = "spec"
) -> Refusal | None:
    """The refusal of allocations of this spec that could never run all together for a tenant; None if they could.

    `path` is the field path of the spec in the request: causes name their fields below it.
    """
    resources = _encode(spec.resources) if isinstance(spec.resources, Resources) else b""
    nodes = spec.nodes if isinstance(spec.nodes, int) else 1
    form = (resources, nodes, spec.exclusive is True, members)
    refused = await runtime.ceilings.refusal(form, spec, tenant)
    if refused is None or path == "spec":
        return refused
    causes = tuple(replace(one, field=path + one.field.removeprefix("spec")) for one in refused.causes)
    return replace(refused, causes=causes)


@dataclass(frozen=True, slots=True)
class _Known:
    ceiling: Ceiling
    fitting: set[_Form] = field(default_factory=set)  # forms that fit under this ceiling

    def remember(self, form: _Form) -> None:
        if len(form[0]) > FITTING_BYTES_MAX:
            return
        if len(self.fitting) >= FITTING_MAX:
            self.fitting.clear()
        self.fitting.add(form)


class CeilingCache:
    def __init__(self, database: Database, trees: TreeCache) -> None:
        self._database = database
        self._trees = trees
        self._known: dict[frozenset[str], _Known] = {}  # by the tenants with dedicated nodes among a tenant's ancestors
        self._sizes: dict[str, tuple[Amounts, tuple[str, ...]]] = {}  # and the tenants that the node is dedicated to
        self._dedicated: frozenset[str] = frozenset()  # the tenants that have a dedicated node
        self._edition = Edition()
        self._read_at = self._changed_at = float("-inf")
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Read the nodes again at the next request, because this process changed one."""
        self._changed_at = asyncio.get_running_loop().time()

    async def refusal(self, form: _Form, spec: AllocationSpec, tenant: str) -> Refusal | None:
        now = asyncio.get_running_loop().time()
        if self._read_at < max(now - AGE_SECONDS_MAX, self._changed_at):
            await self._read_since(now - AGE_SECONDS_MAX)
        if form in self._of(tenant).fitting:
            return None
        _, nodes, exclusive, members = form
        requests = {name: amount for name, amount in requests_of(spec).items() if amount}
        demand = Demand(requests, nodes, exclusive, members)
        if refusal(demand, self._of(tenant).ceiling) is not None:
            await self._read_since(now)
            if refused := refusal(demand, self._of(tenant).ceiling):
                return refused
        self._of(tenant).remember(form)
        return None

    def _of(self, tenant: str) -> _Known:
        """The ceiling of the nodes that a tenant may use: dedicated to nobody, to it or to a tenant above it."""
        mine = self._dedicated.intersection(lineage(self._trees.latest, tenant)) if self._dedicated else frozenset()
        if (known := self._known.get(mine)) is not None:
            return known
        if len(self._known) >= CEILINGS_MAX:
            self._known.clear()
        capacities = [size for size, dedicated in self._sizes.values() if is_open_to(dedicated, mine)]
        known = self._known[mine] = _Known(ceiling_of(capacities, partial=len(capacities) < len(self._sizes)))
        return known

    async def _read_since(self, at: float) -> None:
        """Read the nodes, unless a read began after this moment and after this process's last change."""
        async with self._lock:
            if self._read_at >= max(at, self._changed_at):
                return
            began_at = asyncio.get_running_loop().time()
            async with self._database.reader() as db:
                await self._read(db)
            self._read_at = began_at

    async def _read(self, db: Connection) -> None:
        await self._trees.refresh(db)
        edition = await store.load_edition(db)
        if edition == self._edition:
            return
        changed = await store.load_nodes(db, self._edition.revision)
        sizes = {**self._sizes, **_sizes(changed)}
        if len(sizes) != edition.nodes:
            # Nodes were removed or added meanwhile; only a full read shows which.
            sizes = _sizes(await store.load_nodes(db))
        # Most changes of a node do not change its size, and keep the cache valid.
        if sizes != self._sizes:
            self._known = {}
            self._dedicated = frozenset(tenant for _, dedicated in sizes.values() for tenant in dedicated)
        self._sizes, self._edition = sizes, edition


def _sizes(nodes: Iterable[tuple[str, bytes, bytes]]) -> dict[str, tuple[Amounts, tuple[str, ...]]]:
    return {name: (allocatable_in(doc, status), dedicated_to(doc)) for name, doc, status in nodes}
