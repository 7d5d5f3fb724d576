"""The unit of work of a batch: the rows read under locks, and the effects decided so far.

Commands are decided one after another on the same unit of work, so each sees the effects of those before it. A refused
command must leave it unchanged: rules check everything before they change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.liveness import SeenHeartbeat
from bursar.core.nodes.node import CapacityRise, NodeCapacity, Placement
from bursar.core.objects.allocation import GangKey, GangRow
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import UNASSIGNED, Key, Origin, Stored, Write
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tree
from bursar.core.usage.usage_levels import NOBODY, UsageBegan, UsageEnded, amounts_on
from bursar.core.values.replace import replace


@dataclass(slots=True)
class UnitOfWork:
    """The unit of work of one batch: the rows read under locks, and the effects decided so far."""

    now: datetime
    tree: Tree
    counters: Counters
    new_uid: Callable[[str], str]  # returns a uid with this prefix that sorts by time
    era: int = 0  # of the database: it rises when the database is restored from a backup
    objects: dict[Key, Stored] = field(default_factory=dict)
    recent: set[Key] = field(default_factory=set)  # objects known to exist that were not read again
    nodes: dict[str, NodeCapacity] = field(default_factory=dict)
    heartbeats: dict[str, SeenHeartbeat] = field(default_factory=dict)  # the nodes' last heartbeats
    placements: dict[str, tuple[Placement, ...]] = field(default_factory=dict)  # by the allocation's uid
    gangs: dict[GangKey, GangRow] = field(default_factory=dict)
    # Set only if a node is claimed: the number of claimed nodes in the system, and the work placed on the node.
    claimed: int = 0
    occupants: dict[str, list[tuple[Placement, Stored]]] = field(default_factory=dict)  # by node
    # Set only if something is prepaid: accounts and leases, and the account of each user.
    ledger: Ledger | None = None
    payers: dict[tuple[str, str], int] = field(default_factory=dict)  # by (tenant, user)
    # Set only if something is prepaid or starts: the device class of nodes.
    classes: dict[str, str] = field(default_factory=dict)
    # Effects to save.
    writes: list[Write] = field(default_factory=list)
    recharged: dict[Key, Stored] = field(default_factory=dict)
    touched_nodes: set[str] = field(default_factory=set)
    used_nodes: set[str] = field(default_factory=set)  # nodes of which only the free capacity changed
    removed_nodes: set[str] = field(default_factory=set)
    disowned_nodes: set[str] = field(default_factory=set)  # nodes whose tokens and certificates become invalid
    node_uids: dict[str, str] = field(default_factory=dict)
    placed: dict[tuple[str, str], Placement] = field(default_factory=dict)  # by (node, uid)
    # (node, uid) of stored placements to remove, before new ones are added
    lifted: set[tuple[str, str]] = field(default_factory=set)
    touched_gangs: set[GangKey] = field(default_factory=set)
    notifications: list[Notification] = field(default_factory=list)
    rises: list[CapacityRise] = field(default_factory=list)  # logged after the commit
    # Usage: by (node, uid) the use that begins, and the use that ends; use that does both in one batch is separate.
    begun: dict[tuple[str, str], UsageBegan] = field(default_factory=dict)
    ended: dict[tuple[str, str], UsageEnded] = field(default_factory=dict)
    spent: list[tuple[UsageBegan, UsageEnded]] = field(default_factory=list)

    def put(self, after: Stored, origin: Origin) -> Write:
        """Create or change an object."""
        if after.revision != UNASSIGNED:
            after = replace(after, revision=UNASSIGNED)
        write = Write(after.key, self.objects.get(after.key), after, origin)
        self.objects[after.key] = after
        self.recharged.pop(after.key, None)
        self.writes.append(write)
        return write

    def remove(self, key: Key, origin: Origin, last: Stored | None = None) -> Write:
        """Remove an object; `last` is its final state, if that differs from the stored one."""
        self.recharged.pop(key, None)
        write = Write(key, self.objects.pop(key), None, origin, last=last)
        self.writes.append(write)
        return write

    def recharge(self, after: Stored) -> None:
        """Change an object's charge, and no other field."""
        self.objects[after.key] = after
        if after.revision == UNASSIGNED:
            # It was written in this batch, and that write saves the charge as well.
            last = next(write for write in reversed(self.writes) if write.key == after.key)
            last.after = after
        else:
            self.recharged[after.key] = after

    def set_node(self, capacity: NodeCapacity, uid: str = "") -> None:
        self.nodes[capacity.name] = capacity
        self.touched_nodes.add(capacity.name)
        self.removed_nodes.discard(capacity.name)
        if uid:
            self.node_uids[capacity.name] = uid

    def use_node(self, capacity: NodeCapacity) -> None:
        """Change a node's allocated amounts; its allocatable ones stay."""
        self.nodes[capacity.name] = capacity
        self.used_nodes.add(capacity.name)

    def remove_node(self, name: str) -> None:
        del self.nodes[name]
        self.touched_nodes.discard(name)
        self.used_nodes.discard(name)
        self.removed_nodes.add(name)
        self.disown_node(name)

    def disown_node(self, name: str) -> None:
        """Invalidate the node's tokens and certificates."""
        self.disowned_nodes.add(name)

    def place(self, placements: Sequence[Placement]) -> None:
        self.placements[placements[0].uid] = tuple(placements)
        self.placed.update({(one.node, one.uid): one for one in placements})

    def lift(self, uid: str, node: str = "") -> tuple[Placement, ...]:
        """Remove the placements of work that is confirmed gone, from one node or from all, and return them."""
        there = self.placements.pop(uid, ())
        gone = tuple(one for one in there if node in ("", one.node))
        if left := tuple(one for one in there if one not in gone):
            self.placements[uid] = left
        for one in gone:
            self.placed.pop((one.node, one.uid), None)
            self.lifted.add((one.node, one.uid))
        return gone

    def set_gang(self, key: GangKey, row: GangRow) -> None:
        self.gangs[key] = row
        self.touched_gangs.add(key)

    def tenant_of(self, one: Stored) -> str:
        """The tenant of an object, by its namespace."""
        namespace = self.tree.namespaces.get(one.key.namespace)
        return namespace.tenant if namespace is not None else one.tenant

    def members(self, namespace: str, gang: str) -> Iterable[Stored]:
        return [one for one in self.objects.values() if one.key.namespace == namespace and one.gang == gang]


# Usage.


def begin_usage(batch: UnitOfWork, part: Placement, user: str = "", *, seconds_ago: float = 0.0) -> None:
    """Begin counting the use of a placement, for its tenant and its user, from now on, in whole seconds.

    A claim of a whole node is represented by a placement as well: an exclusive one that is not stored.
    """
    at = int(batch.now.timestamp() - seconds_ago)
    batch.begun[part.node, part.uid] = UsageBegan(
        part.uid, part.node, part.epoch, part.tenant, user or NOBODY, part.namespace, part.name,
        amounts_on(batch.nodes.get(part.node), part), batch.classes.get(part.node, ""), at, part.lease,
    )  # fmt: skip


def end_usage(batch: UnitOfWork, uid: str, node: str, phase: str, reason: str = "") -> None:
    """End counting the use of a placement, if it began."""
    ended = UsageEnded(uid, node, int(batch.now.timestamp()), phase, reason)
    if began := batch.begun.pop((node, uid), None):
        batch.spent.append((began, ended))
    else:
        batch.ended[node, uid] = ended
