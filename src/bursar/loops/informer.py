"""The informer: loads the cluster state once, and then applies every change of the feed in order.

A binding of the leader enters the cluster state when it is decided; the same change comes back by the feed and is then
skipped. Changes to allocations that are being committed are deferred until the outcome of the commit is known.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Multiset
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog

from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import SENSITIVE
from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.approval import STATE_FIELD, ApprovalState
from bursar.core.objects.ask import Ask
from bursar.core.objects.object import Key
from bursar.core.quota.permit import permit_of
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, Tree
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState
from bursar.core.scheduling.state.fair_share import ShareOf
from bursar.core.scheduling.state.fleet import UNCLAIMED
from bursar.core.scheduling.state.placed_columns import NEVER, Spot
from bursar.core.usage.budget import penalty, used_fraction
from bursar.core.values.replace import replace
from bursar.core.values.selector import parse_fields
from bursar.loops.stored_status import (
    StoredStatus,
    decode_job,
    decode_job_document,
    decode_map,
    decode_status,
    epoch,
    holder_of,
    nomination_of,
)
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.plan_commands import BINDER
from bursar.store.db.database import Connection
from bursar.store.nodes import node as node_store
from bursar.store.objects import change as change_store
from bursar.store.objects import listing
from bursar.store.objects.change import SeenChange
from bursar.store.objects.listing import Query
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.settings import policy_of
from bursar.wire.to_scheduler.ask import (
    NodeView,
    PriorityClassView,
    TenantShare,
    ask_of,
    node_of,
    priority_class_of,
    queue_profile_of,
    tenant_share_of,
    tier_weight_of,
)

log = structlog.get_logger()

READ_MAX = 2000
YIELD_EVERY = 500
DESCRIBED = ("Settings", "PriorityClass", "Queue", "Tier", "Tenant", "Job")
TREE_KINDS = frozenset({"Namespace", "PriorityClass", "ResourceQuota", "Settings", "Tenant", "Tier"})


class FeedLost(Exception):
    """Changes were dropped before they were read: the cluster state must be loaded again."""


class Informer:
    """The cluster state of one leader, and its position in the feed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.cluster = ClusterState()
        self.revision = 0
        self.settings: dict[str, Any] = {}  # the policy settings of an administrator
        self.noted: dict[str, str] = {}  # by uid, the stored reason of each pending allocation
        self._users: dict[str, str] = {}  # by uid, the submitter of each
        self.returned: set[str] = set()  # those that were placed before
        self.lacks_hours = False  # whether the used hours of a tenant with a budget are unknown
        self.committing: Multiset[str] = Multiset()  # uids that are being committed
        self._deferred: list[SeenChange] = []
        self._known: dict[str, int] = {}  # by uid, own revisions that the feed has not delivered yet
        self._classes: dict[str, PriorityClassView] = {}
        self._shares: dict[str, TenantShare] = {}
        self._tiers: dict[str, float | None] = {}  # the weight of their tenants
        self._hours: Mapping[str, tuple[float, float]] = {}
        self._views: dict[str, NodeView] = {}
        self._capacities: dict[str, NodeCapacity] = {}
        self._stale_nodes: set[str] = set()
        self._stale_limits = False
        self._tree = Tree()
        self.lost = False  # a commit ended unexpectedly: the cluster state is not reliable

    # Loading.

    async def count_nodes(self) -> int:
        async with self._runtime.database.reader() as db:
            return await node_store.count(db)

    async def load(self) -> None:
        """Load everything that matters, as of one revision."""
        phases = f"status.phase!={',status.phase!='.join(sorted(ENDED))}"
        live = Query("Allocation", fields=parse_fields(phases, ("status.phase",)))
        # Read everything before applying it: PostgreSQL would end a transaction that is idle for so long.
        async with (
            self._runtime.database.reader() as db,
            db.transaction(isolation="repeatable_read", readonly=True),
        ):
            self.revision = (await change_store.load_position(db)).revision
            described = [(kind, (await listing.load_page(db, Query(kind))).items) for kind in DESCRIBED]
            nodes = (await listing.load_page(db, Query("Node"))).items
            capacities = await node_store.load_all(db)
            allocations = await listing.load_live(db, live)
            tree, counters = await self._read_limits(db)
        self._tree = tree
        for kind, items in described:
            for item in items:
                self._describe(Key(kind, item.namespace, item.name), item.doc, item.status)
        self._views = {item.name: node_of(item.doc, item.status) for item in nodes}
        for name, capacity in sorted(capacities.items()):
            self._put_node(name, capacity)
        for number, row in enumerate(allocations):
            self._apply_allocation(row)
            if number % YIELD_EVERY == 0:
                # The event loop must stay responsive meanwhile.
                await asyncio.sleep(0)
        # Last, because the stored counters include all allocations.
        self.cluster.limits.load(tree, counters)

    # Following.

    @property
    def distrusts_limits(self) -> bool:
        """Whether the counters must be read again, which requires that no commit is in flight."""
        return self._stale_limits

    @property
    def is_in_doubt(self) -> bool:
        """Whether a part of the state is known to be outdated; the next `catch_up` reads it."""
        return self._stale_limits or bool(self._stale_nodes)

    async def catch_up(self, db: Connection) -> int:
        """Apply the changes committed since; return their number."""
        count = await self._follow(db)
        if self._stale_limits and not self.committing:
            # Counters are not in the feed: they are read in one snapshot with the feed position.
            async with db.transaction(isolation="repeatable_read", readonly=True):
                count += await self._follow(db)
                tree, counters = await self._read_limits(db)
            self._stale_limits = False
            self._permit(tree)
            self.cluster.limits.load(tree, counters)
        return count

    def _permit(self, tree: Tree) -> None:
        """Reload if the permissions of a tenant changed: its work was read under the old ones."""
        old, self._tree = self._tree, tree
        for name in {group.key.tenant for group in self.cluster.groups.values()} | self.cluster.used.keys():
            if permit_of(old, name) != permit_of(tree, name):
                raise FeedLost(f"what tenant {name} may ask for was changed")

    async def _follow(self, db: Connection) -> int:
        count = 0
        while True:
            changes = await change_store.load_seen(db, self.revision, READ_MAX, BINDER)
            if changes and changes[0].revision != self.revision + 1:
                raise FeedLost(f"changes from {self.revision + 1} to {changes[0].revision - 1} are gone")
            await self._apply_all(db, changes)
            if changes:
                self.revision = changes[-1].revision
                count += len(changes)
            if len(changes) < READ_MAX:
                return count

    async def _apply_all(self, db: Connection, changes: Sequence[SeenChange]) -> None:
        """Apply changes. Capacities are not in the feed, so those of changed nodes are read. Nodes are added before
        work is placed on them, and removed after it left."""
        for change in changes:
            if change.key.kind != "Allocation":
                self._apply(change)
        names, self._stale_nodes = self._stale_nodes, set()
        capacities = await node_store.load(db, names) if names else {}
        for name in sorted(names):
            if name in capacities:
                self._put_node(name, capacities[name])
        for change in changes:
            if change.key.kind == "Allocation":
                self._apply(change)
        for name in sorted(names & self.cluster.fleet.row_of.keys()):
            if name not in capacities or name not in self._views:
                self._capacities.pop(name, None)
                named = self.cluster.fleet.named
                self.cluster.remove_node(name)
                if named != self.cluster.fleet.named:
                    self._ask_as_tenants()

    async def _read_limits(self, db: Connection) -> tuple[Tree, Mapping[Row, Counter]]:
        return await self._runtime.trees.refresh(db), await quota_store.load_limited(db)

    def distrust_limits(self) -> None:
        """Read the counters before the next plan, because the database counts differently."""
        self._stale_limits = True

    def distrust_node(self, name: str) -> None:
        self._stale_nodes.add(name)
        self._capacities.pop(name, None)

    def set_hours(self, hours: Mapping[str, tuple[float, float]]) -> None:
        """Set the used GPU-hours and node-hours of tenants with a budget."""
        self._hours, self.lacks_hours = hours, False
        for name in self._shares:
            self._put_share(name)

    # Committing.

    def committed(self, uid: str, revision: int) -> None:
        """Note that a decision of this leader was committed as this revision."""
        self._known[uid] = revision

    def settle(self, uids: Iterable[str]) -> None:
        """End a commit: apply the changes that were deferred for it."""
        for uid in uids:
            if self.committing[uid] > 1:
                self.committing[uid] -= 1
            else:
                self.committing.pop(uid, None)
        if self._deferred:
            waiting, self._deferred = self._deferred, []
            for change in waiting:
                self._apply(change)

    # Changes.

    def _apply(self, change: SeenChange) -> None:
        kind = change.key.kind
        if kind == "Allocation":
            if change.uid in self.committing:
                self._deferred.append(change)
            elif not self._is_known(change):
                if change.bare:
                    raise FeedLost(f"{change.key.name} was bound by another scheduler")
                self._apply_allocation(change)
        elif kind == "Node":
            self._apply_node(change)
        elif kind == "PriorityClass":
            # It decides the priority of each allocation that names it, or names none.
            raise FeedLost(f"priority class {change.key.name} was changed")
        else:
            if kind in TREE_KINDS:
                self._stale_limits = True
            if change.type == "DELETED":
                self._undescribe(change.key)
            elif change.doc is not None:
                self._describe(change.key, change.doc, change.status)

    def _is_known(self, change: SeenChange) -> bool:
        """Whether the change is in the cluster state already, or is older than the state."""
        known = self._known.get(change.uid, 0)
        if change.revision > known:
            return False
        if change.revision < known:
            self._relabel(change)
        else:
            del self._known[change.uid]
        return True

    def _relabel(self, change: SeenChange) -> None:
        """Apply labels and annotations of a change that preceded the own commit; the rest is superseded."""
        one, ask = self.cluster.placed.get(change.uid), self._ask(change, decode_status(change.status))
        if one is not None and one.ask != ask:
            self.cluster.place(ask, one.spots, since=one.since, ends_at=one.ends_at, ending=one.ending)

    def _describe(self, key: Key, doc: bytes, status: bytes) -> None:
        """Apply a policy, a tenant's share, a queue's profile, a class's value or a job's boost."""
        match key.kind:
            case "Settings":
                self.settings = policy_of(doc)
            case "PriorityClass":
                self._classes[key.name] = priority_class_of(doc)
            case "Queue":
                self._put_profile(key.name, queue_profile_of(doc))
            case "Tier":
                self._put_tier(key.name, tier_weight_of(doc))
            case "Tenant":
                self._shares[key.name] = tenant_share_of(doc)
                self.lacks_hours |= self._shares[key.name].has_budget and key.name not in self._hours
                self._put_share(key.name)
            case "Job":
                boost = decode_job(status).boost
                if boost is not None:
                    uid = decode_job_document(doc).metadata.uid
                    self.cluster.boosts[key.namespace, key.name] = ActiveBoost(
                        boost.priority, epoch(boost.expires), uid
                    )
                else:
                    self.cluster.boosts.pop((key.namespace, key.name), None)

    def _undescribe(self, key: Key) -> None:
        match key.kind:
            case "Queue":
                self.cluster.profiles.pop(key.name, None)
            case "Tier":
                self._put_tier(key.name, None)
            case "Tenant":
                self._shares.pop(key.name, None)
                self.cluster.tenants.pop(key.name, None)
            case "Job":
                self.cluster.boosts.pop((key.namespace, key.name), None)

    def _put_profile(self, queue: str, profile: str) -> None:
        # Work may name a queue that was deleted and created again; on load, queues come first.
        known = self.cluster.profiles.get(queue, "" if self._users else profile)
        if known != profile and SENSITIVE in (known, profile):
            # The profile decides whether all work in the queue is sensitive.
            raise FeedLost(f"queue {queue} was changed")
        self.cluster.profiles[queue] = profile

    def _put_tier(self, name: str, weight: float | None) -> None:
        self._tiers[name] = weight
        for tenant, share in self._shares.items():
            if share.tier == name:
                self._put_share(tenant)

    def _put_share(self, name: str) -> None:
        share = self._shares[name]
        weight = share.weight if share.weight is not None else self._tiers.get(share.tier)
        weight = 1.0 if weight is None else weight
        gpu_hours, node_hours = self._hours.get(name, (0.0, 0.0))
        used = used_fraction(gpu_hours, share.gpu_hours_budget, node_hours, share.node_hours_budget)
        self.cluster.tenants[name] = ShareOf(
            name, share.parent, weight, share.fair_share_target, share.burst_allowance, penalty(used)
        )

    def _apply_node(self, change: SeenChange) -> None:
        name = change.key.name
        if change.type == "DELETED":
            self._views.pop(name, None)
        elif change.doc is not None:
            self._views[name] = node_of(change.doc, change.status)
        self._stale_nodes.add(name)

    def _put_node(self, name: str, capacity: NodeCapacity) -> None:
        """Update a node if its description changed; heartbeats do not change it."""
        view = self._views.get(name)
        if view is None:
            return
        known, before = self._capacities.get(name), self.cluster.fleet.row_of.get(name)
        gate = (view.tenants, view.whole_only, view.isolated)
        described = (view.labels, view.taints, view.ready, view.unschedulable or not capacity.schedulable, gate)
        if known is not None and before is not None:
            fleet = self.cluster.fleet
            same = (
                fleet.labels[before],
                fleet.taints[before],
                fleet.ready[before],
                fleet.cordoned[before],
                fleet.gates[before],
            ) == described
            if same and known.generation == capacity.generation and known.allocatable == capacity.allocatable:
                return
        self._capacities[name] = capacity
        named = self.cluster.fleet.named
        claims = self.cluster.fleet.claims
        held_by, claim = claims[before] if before is not None else UNCLAIMED, holder_of(capacity)
        self.cluster.put_node(
            name,
            capacity.allocatable,
            labels=view.labels,
            taints=view.taints,
            generation=capacity.generation,
            ready=view.ready,
            cordoned=view.unschedulable or not capacity.schedulable,
            claim=claim,
            tenants=view.tenants,
            whole_only=view.whole_only,
            isolated=view.isolated,
        )
        if held_by != claim:
            self._ask_anew({held_by, claim})
        if named != self.cluster.fleet.named:
            self._ask_as_tenants()

    def _ask_anew(self, users: set[str]) -> None:
        """Read the pending work of users again whose claims changed: it may run on other nodes now."""
        for uid in [uid for uid, user in self._users.items() if user in users and uid in self.cluster.waiting]:
            ask = self.cluster.waiting[uid].members[uid]
            self.cluster.wait(self.cluster.as_user(ask, self._users[uid]), self.cluster.nominated.get(uid))

    def _ask_as_tenants(self) -> None:
        """Read pending work again after nodes were dedicated to other tenants: it may run on other nodes now."""
        for uid in list(self.cluster.waiting):
            ask = self.cluster.waiting[uid].members[uid]
            anew = self.cluster.as_tenant(ask, permit_of(self._tree, ask.tenant).lineage)
            if anew is not ask:
                self.cluster.wait(anew, self.cluster.nominated.get(uid))

    def _apply_allocation(self, change: SeenChange) -> None:
        fields = decode_map(change.fields)
        phase = fields.get("status.phase", Phase.PENDING)
        awaits = fields.get(STATE_FIELD) == ApprovalState.PENDING
        if change.type == "DELETED" or phase in ENDED or awaits:
            self.cluster.forget(change.uid)
            self.noted.pop(change.uid, None)
            self._users.pop(change.uid, None)
            self.returned.discard(change.uid)
            return
        status = decode_status(change.status)
        ask = self._ask(change, status)
        if phase == Phase.PENDING:
            self.noted[change.uid] = status.reason
            self._users[change.uid] = status.user
            if status.epoch:
                self.returned.add(change.uid)
            self.cluster.wait(ask, nomination_of(status), again=status.epoch > 0)
        else:
            self.noted.pop(change.uid, None)
            self._users.pop(change.uid, None)
            self.returned.discard(change.uid)
            self._place(ask, status, ending=phase == Phase.TERMINATING)

    def _ask(self, change: SeenChange, status: StoredStatus) -> Ask:
        """The ask of an allocation with its current labels: from the change's document, else the known one."""
        labels = decode_map(change.labels)
        if change.doc is not None:
            ask = ask_of(
                change.doc, uid=change.uid, tenant=change.tenant, labels=labels, priorities=self._classes,
                tree=self._tree, exempt=bool(status.permitted_by),
            )  # fmt: skip
        else:
            ask = self._known_ask(change)
            if ask.labels != labels or ask.tenant != change.tenant:
                ask = replace(ask, labels=labels, tenant=change.tenant)
        user = status.user
        ask = self.cluster.as_tenant(self.cluster.as_user(ask, user), permit_of(self._tree, change.tenant).lineage)
        if ask.payer != user and change.tenant in self._runtime.trees.latest.prepaid:
            ask = replace(ask, payer=user)
        return ask

    def _known_ask(self, change: SeenChange) -> Ask:
        known = self.cluster.ask(change.uid)
        if known is None:
            log.warning(
                "allocation_unknown",
                message="the feed has a change of an allocation that is not in the cluster state",
                allocation=change.key.name,
                uid=change.uid,
            )
            raise FeedLost(f"{change.key.name} is not known")
        return known

    def _place(self, ask: Ask, status: StoredStatus, *, ending: bool) -> None:
        for resource, _ in ask.shape.requests:
            self.cluster.fleet.ensure_resource(resource)
        row_of, columns = self.cluster.fleet.row_of, self.cluster.fleet.device_column_of
        parts = [part for part in status.nodes if part.name in row_of and part.phase not in ENDED]
        spots = tuple(
            Spot(
                row_of[part.name],
                ()
                if ask.shape.exclusive
                else tuple(
                    (columns[name], indices) for name, indices in part.devices.items() if name in columns and indices
                ),
            )
            for part in parts
        )
        since = epoch(status.start_time or status.scheduled_time) or ask.submitted_at
        ends_at = since + ask.ttl_seconds if ask.ttl_seconds else NEVER
        if ending and status.eviction is not None and status.eviction.deadline:
            ends_at = min(ends_at, epoch(status.eviction.deadline))
        self.cluster.place(ask, spots, since=since, ends_at=ends_at, ending=ending)
