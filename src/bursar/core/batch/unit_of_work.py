"""The sheet of a batch: what was read under locks, and what has been decided on it so far.

Commands are decided one after another on the same sheet, so each sees the effects of those before it. A command that is
refused must leave the sheet as it found it: rules check everything first, and only then write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from bursar.core.credit.ledger import Ledger
from bursar.core.nodes.liveness import SeenHeartbeat
from bursar.core.nodes.node import NodeCapacity, Placement
from bursar.core.objects.allocation import GangKey, GangRow
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import UNASSIGNED, Key, Origin, Stored, Write
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tree
from bursar.core.usage.usage_levels import NOBODY, UsageBegan, UsageEnded, amounts_on
from bursar.core.values.replace import replace


@dataclass(slots=True)
class UnitOfWork:
    now: datetime
    tree: Tree
    counters: Counters
    era: int = 0  # of the database: another one, and a later one, after it was restored from a backup
    objects: dict[Key, Stored] = field(default_factory=dict)
    recent: set[Key] = field(default_factory=set)  # objects that exist, and were not read again
    nodes: dict[str, NodeCapacity] = field(default_factory=dict)
    heartbeats: dict[str, SeenHeartbeat] = field(default_factory=dict)  # of the nodes that were ever heard
    placements: dict[str, tuple[Placement, ...]] = field(default_factory=dict)  # by the allocation's uid
    gangs: dict[GangKey, GangRow] = field(default_factory=dict)
    # Only where a node is claimed for sensitive work: how many are in the whole system, and what is placed on it.
    claimed: int = 0
    occupants: dict[str, list[tuple[Placement, Stored]]] = field(default_factory=dict)  # by node
    # Only where something is paid for: accounts and leases, and whose account is which.
    ledger: Ledger | None = None
    payers: dict[tuple[str, str], int] = field(default_factory=dict)  # by (tenant, user)
    # Only where something is paid for or begins to be used: of which class the devices of nodes are.
    classes: dict[str, str] = field(default_factory=dict)
    # What is to be saved.
    writes: list[Write] = field(default_factory=list)
    recharged: dict[Key, Stored] = field(default_factory=dict)
    touched_nodes: set[str] = field(default_factory=set)
    used_nodes: set[str] = field(default_factory=set)  # of which nothing moved but their room
    removed_nodes: set[str] = field(default_factory=set)
    disowned_nodes: set[str] = field(default_factory=set)  # whose tokens and certificates count no more
    node_uids: dict[str, str] = field(default_factory=dict)
    placed: dict[tuple[str, str], Placement] = field(default_factory=dict)  # by (node, uid)
    # (node, uid) of stored placements that go, before new ones come
    lifted: set[tuple[str, str]] = field(default_factory=set)
    touched_gangs: set[GangKey] = field(default_factory=set)
    notifications: list[Notification] = field(default_factory=list)
    # Hours: by (node, uid) what begins to be used, and what that began before ends; apart what does both in one batch.
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
        """Remove an object; `last` is its final state, where that differs from what was stored."""
        self.recharged.pop(key, None)
        write = Write(key, self.objects.pop(key), None, origin, last=last)
        self.writes.append(write)
        return write

    def recharge(self, after: Stored) -> None:
        """Change what an object holds, and nothing that it shows."""
        self.objects[after.key] = after
        if after.revision == UNASSIGNED:
            # It was written in this batch: its line in the feed carries the charge along.
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
        """Give or take back room; what the node offers stays as it is."""
        self.nodes[capacity.name] = capacity
        self.used_nodes.add(capacity.name)

    def remove_node(self, name: str) -> None:
        del self.nodes[name]
        self.touched_nodes.discard(name)
        self.used_nodes.discard(name)
        self.removed_nodes.add(name)
        self.disown_node(name)

    def disown_node(self, name: str) -> None:
        """Whatever the node proved itself with so far is refused from now on."""
        self.disowned_nodes.add(name)

    def place(self, placements: Sequence[Placement]) -> None:
        self.placements[placements[0].uid] = tuple(placements)
        self.placed.update({(one.node, one.uid): one for one in placements})

    def lift(self, uid: str, node: str = "") -> tuple[Placement, ...]:
        """Remove the placements of what is confirmed gone, from one node or from all, and return them."""
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
        """Whose it is: its namespace says so."""
        namespace = self.tree.namespaces.get(one.key.namespace)
        return namespace.tenant if namespace is not None else one.tenant

    def members(self, namespace: str, gang: str) -> Iterable[Stored]:
        return [one for one in self.objects.values() if one.key.namespace == namespace and one.gang == gang]


# Hours.


def begin_usage(batch: UnitOfWork, part: Placement, user: str = "", *, seconds_ago: float = 0.0) -> None:
    """From now on, in whole seconds, the tenant and the user of a placement use what it has of its node.

    What stands for a claim of a whole node is a placement as well: an exclusive one, that is not stored.
    """
    at = int(batch.now.timestamp() - seconds_ago)
    batch.begun[part.node, part.uid] = UsageBegan(
        part.uid, part.node, part.epoch, part.tenant, user or NOBODY, part.namespace, part.name,
        amounts_on(batch.nodes.get(part.node), part), batch.classes.get(part.node, ""), at, part.lease,
    )  # fmt: skip


def end_usage(batch: UnitOfWork, uid: str, node: str, phase: str, reason: str = "") -> None:
    """It is over. What did not begin has nothing to end."""
    ended = UsageEnded(uid, node, int(batch.now.timestamp()), phase, reason)
    if began := batch.begun.pop((node, uid), None):
        batch.spent.append((began, ended))
    else:
        batch.ended[node, uid] = ended
