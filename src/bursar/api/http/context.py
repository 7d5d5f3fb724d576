"""`ApiContext`, shared by all handlers: the runtime, the change feed, authentication, access rules and limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from bursar.api.http.identity import TENANT_HEADER, Authenticator
from bursar.api.http.ratelimit import LIMIT_PER_MINUTE_DEFAULT, SERVICE_LIMIT_PER_MINUTE_DEFAULT, RateLimit
from bursar.api.http.recall import OpenStreams
from bursar.api.http.seats import Seats
from bursar.api.http.spool import Spools
from bursar.core.quota.tenant_tree import Tree, current_tenants, is_current, sees, subtree
from bursar.core.values.access import Identity, Policy, Reach, reach
from bursar.core.values.refusal import Refusal
from bursar.ops.access.audit import TOKEN
from bursar.ops.nodes.cluster import ClusterCache
from bursar.ops.runtime.feed import FedChange, Feed
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.leader_query import LeaderQueries
from bursar.ops.scheduling.queue_depth import QueueDepths
from bursar.ops.workloads.log_source import LogKeeper
from bursar.ops.workloads.priority import Priorities
from bursar.store.db.database import AWAY, Database
from bursar.wire.kinds.registry import KINDS, policy

TREE_AGE_SECONDS_MAX = 1.0
READY_SECONDS_MAX = 2.0
READY_AGE_SECONDS_MAX = 0.5
# Concurrent full reads, in total and per tenant: each holds a database connection.
LISTS_MAX = 4
LISTS_EACH_MAX = 2
STATES_MAX = 4
STATES_EACH_MAX = 1
BODY_BYTES_MAX = 1_500_000


@dataclass(slots=True)
class ApiContext:
    database: Database
    runtime: Runtime
    feed: Feed
    authenticator: Authenticator
    limits: RateLimit
    requests_per_minute: int = LIMIT_PER_MINUTE_DEFAULT
    service_requests_per_minute: int = SERVICE_LIMIT_PER_MINUTE_DEFAULT
    version: str = ""
    grpc_address: str = ""  # the agents' gRPC server, host:port; empty if unknown
    log_source: LogKeeper | None = None  # reads logs from agents; None: not available
    policy: Policy = field(default_factory=policy)
    _tree_read_at: float = field(default=-1e9)
    _tree_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    watches: Counter[str] = field(default_factory=Counter)  # open watches by party
    streams: OpenStreams = field(default_factory=OpenStreams)
    states: Seats = field(default_factory=lambda: Seats(STATES_MAX, STATES_EACH_MAX))
    lists: Seats = field(default_factory=lambda: Seats(LISTS_MAX, LISTS_EACH_MAX))
    spools: Spools = field(default_factory=Spools)  # long responses that clients are reading
    bodies: Seats = field(default_factory=lambda: Seats(1, 1))  # long bodies that are being decoded
    _fault: str = ""
    _fault_read_at: float = field(default=-1e9)
    _fault_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    leader_queries: LeaderQueries = field(init=False)
    depths: QueueDepths = field(init=False)
    cluster: ClusterCache = field(init=False)
    priorities: Priorities = field(init=False)

    def __post_init__(self) -> None:
        self.leader_queries = LeaderQueries(self.database)
        self.depths = QueueDepths(self.leader_queries, self.database)
        self.cluster = ClusterCache(self.database)
        self.priorities = Priorities(self.database)
        self.feed.listen(TOKEN, self._hear_token)
        for kind in KINDS:
            if kind.member_field:
                self.feed.listen(kind.name, partial(self._hear_member, kind.member_field))

    async def authenticate(self, headers: Mapping[str, str]) -> Identity | Refusal:
        """Authenticate a request by its headers. Raises Unavailable if the database is needed and away."""
        return await self.authenticator.authenticate(headers.get("authorization"), headers.get(TENANT_HEADER, ""))

    def _hear_token(self, fed: FedChange) -> None:
        """Authenticate the open streams of a token again, because it was revoked."""
        token_id = fed.change.key.name
        self.authenticator.forget(token_id)
        for recall in self.streams.of_token(token_id):
            recall()

    def _hear_member(self, member_field: str, fed: FedChange) -> None:
        """Authenticate the open streams of a user again, whose membership has changed."""
        user = fed.fields.get(member_field, "")
        self.authenticator.memberships.forget(user)
        for recall, identity in self.streams.of_user(fed.change.tenant, user):
            self.authenticator.forget(identity.token_id)
            recall()

    async def tree(self, *, fresh: bool = False) -> Tree:
        """The tree for reading and for visibility; at most a second old unless `fresh`."""
        now = asyncio.get_running_loop().time()
        if fresh or now - self._tree_read_at > TREE_AGE_SECONDS_MAX:
            async with self._tree_lock:
                if fresh or asyncio.get_running_loop().time() - self._tree_read_at > TREE_AGE_SECONDS_MAX:
                    async with self.database.reader() as db:
                        await self.runtime.trees.refresh(db)
                    self._tree_read_at = asyncio.get_running_loop().time()
        return self.runtime.trees.latest

    async def tree_for(self, whose: Reach) -> Tree:
        """The tree for resolving what a caller may see. It is read again if it has another tenant of the caller's
        tenant name, because one of the two was deleted just now."""
        tree = await self.tree()
        return tree if is_current(tree, whose) else await self.tree(fresh=True)

    def forget_tree(self) -> None:
        """Invalidate the cached tree after a change by this process: the next reader sees the change."""
        self._tree_read_at = -1e9

    async def fault(self) -> str:
        """The reason why requests cannot be served now, or an empty string; concurrent callers share one query."""
        async with self._fault_lock:
            if asyncio.get_running_loop().time() - self._fault_read_at > READY_AGE_SECONDS_MAX:
                self._fault = await self._find_fault()
                self._fault_read_at = asyncio.get_running_loop().time()
        return self._fault

    async def _find_fault(self) -> str:
        try:
            async with asyncio.timeout(READY_SECONDS_MAX), self.database.reader() as db:
                standby = await db.fetchval("SELECT pg_is_in_recovery()")
        except AWAY:
            return "the database is away"
        return "the database is a standby: it takes no writes" if standby else ""

    async def sees(self, identity: Identity, tenant: str) -> bool:
        """Whether an identity may see objects of a tenant; objects without a tenant are visible to all."""
        whose = reach(identity)
        if whose.everything or not tenant:
            return True
        return sees(await self.tree_for(whose), whose, tenant)

    async def visible_tenants(self, identity: Identity) -> tuple[str, ...] | None:
        """The tenants whose objects an identity may list; None means all."""
        whose: Reach = reach(identity)
        if whose.everything:
            return None
        if whose.tenants:
            tree = await self.tree()
            return tuple(sorted({one for name in current_tenants(tree, whose) for one in subtree(tree, name)}))
        if not whose.tenant:
            return ()
        tree = await self.tree_for(whose)
        if not is_current(tree, whose):
            return ()
        return tuple(sorted(subtree(tree, whose.tenant))) if whose.subtree else (whose.tenant,)
