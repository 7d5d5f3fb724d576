"""The path of every write: claim idempotency keys, lock, read, decide, save, once per batch.

Locks are taken in the order of docs/invariants.md ("Lock order"): leader, idempotency keys, tree, gangs, objects,
counters, nodes, heartbeats, accounts, and on saving the ledger and then the revision. A statement that had to wait for
a row lock sees the new version of that row, but not other rows that the rival inserted. So data in the locked row
itself is read by the locking statement, and all other data by a later one. Every statement costs a round trip, so
neighbours in the order are locked by one statement if no lookup is needed in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from time import monotonic as now

from bursar.commands.command import DEPOSED, Answers, Command, Reply, Result, decode_reply, encode_reply, written
from bursar.core.batch.placement_billing import account_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.price import class_of
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.object import Key, Write
from bursar.core.quota.quota import Counter, Counters
from bursar.core.quota.tenant_tree import Row, Tree, rows_of
from bursar.core.values.idempotency import RequestKey
from bursar.ops.access.audit import token_note
from bursar.ops.credit.ledger import Prices, ledger_for
from bursar.ops.nodes.capacity import warn_of_rises
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.clock import new_uid
from bursar.ops.runtime.idempotency import claim, decide_once, remember
from bursar.store.access import token as token_store
from bursar.store.access.token import TokenRecord
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Connection, Stale
from bursar.store.db.idempotency import Remembered
from bursar.store.nodes import liveness as liveness_store
from bursar.store.nodes import node as node_store
from bursar.store.nodes import node_ca as authority_store
from bursar.store.objects import approval as approval_store
from bursar.store.objects import batch as batch_store
from bursar.store.objects import gang as gang_store
from bursar.store.objects import object as object_store
from bursar.store.objects import webhook as notice_store
from bursar.store.objects.change import save_notes
from bursar.store.objects.object import Ground
from bursar.store.quota import quota as quota_store
from bursar.store.quota import tenant_tree as tree_store
from bursar.store.scheduling import leader as leader_store
from bursar.store.usage import usage_levels as usage_store
from bursar.wire.kinds.registry import BY_NAME, KINDS
from bursar.wire.shared.document import is_ending

KNOWN_MAX = 200_000

# Kinds whose objects make users members of a tenant, and the field that names the user.
MEMBER_FIELDS = {kind.name: kind.member_field for kind in KINDS if kind.member_field}

SEEN_SECONDS_MAX = 1.0
SEEN_MAX = 10_000
CLASSES_MAX = 100_000


class WriteBatch:
    """Decides batches of commands that do not change the tenant tree."""

    def __init__(self, trees: TreeCache, prices: Prices | None = None) -> None:
        self._trees = trees
        self._prices = prices or Prices()
        # Counters that are known to exist. Locking notices a counter that was removed since.
        self._known: set[Row] = set()
        self._known_in: Tree | None = None
        self._seen: dict[tuple[Key, int], float] = {}  # by key and the tree's version
        # The device class of nodes, by uid and generation, because a change of labels changes the generation.
        self._classes: dict[tuple[str, str, int], str] = {}

    async def __call__(self, db: Connection, commands: Sequence[Command]) -> Sequence[Reply]:
        """Commands of a leader that was deposed are refused and leave no trace; the rest of the batch is committed."""
        if all(command.fence is None for command in commands):
            return await self._decided(db, commands, None)
        fence, ground = await lock_fence(db, commands)
        stands = [one.fence is None or one.fence == fence for one in commands]
        if all(stands):
            return await self._decided(db, commands, ground)
        replies = iter(await self._decided(db, list(compress(commands, stands)), ground))
        return [next(replies) if standing else DEPOSED for standing in stands]

    async def _decided(self, db: Connection, commands: Sequence[Command], ground: Ground | None) -> Sequence[Reply]:
        if not commands:
            return ()
        claimed, remembered = await claim(db, commands)
        fresh = [
            command for command in commands if command.idempotency_key is None or command.idempotency_key.key in claimed
        ]
        batch = await self._read(db, ground or await lock_ground(db, fresh), fresh)
        results = decide(batch, commands, remembered)
        if batch.rises:
            warn_of_rises(batch.rises)
        await save(db, batch)
        replies = [finished(result) for result in results]
        await remember(db, commands, claimed, replies, encode_reply)
        return replies

    async def _read(self, db: Connection, ground: Ground, commands: Sequence[Command]) -> UnitOfWork:
        tree = await self._trees.at(db, ground.version)
        batch = UnitOfWork(datetime.now(UTC), tree, Counters(tree, {}), new_uid, era=tree_store.era_of(ground.version))
        await lock_gangs(db, batch, commands)
        await self._lock_objects(db, ground, batch, commands)
        await self._lock_counters_and_nodes(db, batch, commands)
        if metered := {name for command in commands for name in command.meters(batch)}:
            await self._read_classes(db, batch, metered)
        await self._open_ledger(db, batch, commands)
        return batch

    async def _lock_objects(
        self, db: Connection, ground: Ground, batch: UnitOfWork, commands: Sequence[Command]
    ) -> None:
        if ground.objects is None:
            keys = keys_of(commands)
            if batch.gangs:
                keys.update(await object_store.load_gang_members(db, batch.gangs))
            batch.objects = await object_store.lock(db, keys)
        else:
            batch.objects = ground.objects
        needs = {key for command in commands for key in command.needs()}
        batch.recent = self._recently_seen(needs, ground.version)
        # Objects that only have to exist are not read if they existed a moment ago.
        if wanted := needs - batch.recent - batch.objects.keys():
            batch.objects |= await object_store.load(db, wanted)
        # Objects of such kinds are only referred to by name. That one existed a second ago is enough, because it could
        # as well be deleted right after the request. A new version of the tree has them read again.
        there_now = (key for key in needs if key in batch.objects and BY_NAME[key.kind].only_named)
        self._seen.update({(key, ground.version): now() for key in there_now})

    def _recently_seen(self, needs: set[Key], version: int) -> set[Key]:
        if len(self._seen) > SEEN_MAX:
            self._seen.clear()
        return {key for key in needs if now() - self._seen.get((key, version), -SEEN_SECONDS_MAX) < SEEN_SECONDS_MAX}

    async def _lock_counters_and_nodes(self, db: Connection, batch: UnitOfWork, commands: Sequence[Command]) -> None:
        """Lock the counters, the nodes, and the nodes' last heartbeats."""
        rows = counters_of(batch, commands)
        names = await find_nodes(db, batch, commands)
        if rows:
            await self._ensure(db, batch.tree, rows)
        counters: Mapping[Row, Counter] = {}
        if rows and names:
            counters, batch.nodes = await node_store.lock_after_counters(db, rows, names)
        elif rows:
            counters = await quota_store.lock(db, rows)
        elif names:
            batch.nodes = await node_store.lock(db, names)
        if len(counters) != len(rows):
            self._known.clear()
            raise Stale("a counter that existed was removed")
        if rows:
            batch.counters = Counters(batch.tree, counters)
        if claimed := {name for command in commands for name in command.claimed_nodes()}:
            await read_claims(db, batch, claimed)
        if heartbeating := {name for command in commands for name in command.heartbeats()}:
            batch.heartbeats = await liveness_store.lock(db, heartbeating)

    async def _ensure(self, db: Connection, tree: Tree, rows: set[Row]) -> None:
        """Create missing counters: a counter is created at its first use."""
        if self._known_in is not tree:
            self._known, self._known_in = set(), tree
        if unknown := rows - self._known:
            await quota_store.ensure(db, tree, unknown)
            self._known = self._known | rows if len(self._known) < KNOWN_MAX else rows

    async def _open_ledger(self, db: Connection, batch: UnitOfWork, commands: Sequence[Command]) -> None:
        """Lock the accounts and leases that the commands may change. Without prepaid tenants there is no query."""
        payments = [one for command in commands for one in command.pays(batch)] if batch.tree.prepaid else []
        paid = any(one.lease for parts in batch.placements.values() for one in parts) or any(
            capacity.claim is not None and capacity.claim.lease for capacity in batch.nodes.values()
        )
        leases = {number for command in commands for number in command.leases(batch)} if paid else set()
        if not payments and not leases:
            return
        if payments:
            batch.payers = await ledger_store.find_accounts(db, {owner for one in payments for owner in one.owners})
            await self._read_classes(db, batch, {name for one in payments for name in one.nodes})
        accounts = {account for one in payments if isinstance(account := account_of(batch, one.owners), int)}
        new = sum(len(one.nodes) for one in payments)
        batch.ledger = await ledger_for(db, self._prices, accounts, leases, new)

    async def _read_classes(self, db: Connection, batch: UnitOfWork, names: set[str]) -> None:
        """Read the device classes of nodes. Labels cannot change while a node's capacity row is locked."""
        capacities = [batch.nodes[name] for name in names if name in batch.nodes]
        keys = {capacity.name: (capacity.name, capacity.uid, capacity.generation) for capacity in capacities}
        if unknown := [name for name, key in keys.items() if key not in self._classes]:
            if len(self._classes) > CLASSES_MAX:
                self._classes.clear()
            labels = await node_store.load_labels(db, unknown)
            self._classes |= {keys[name]: class_of(labels.get(name, {})) for name in unknown}
        batch.classes |= {name: self._classes.get(key, "") for name, key in keys.items()}


def counters_of(batch: UnitOfWork, commands: Sequence[Command]) -> set[Row]:
    """The counters that deciding may change. Allocations of one template share a charge, which is looked up once."""
    charges = {
        (namespace, id(charge)): charge
        for command in commands
        for namespace, charge in command.charges(batch)
        if namespace in batch.tree.namespaces
    }
    return {row for (namespace, _), charge in charges.items() for row in rows_of(batch.tree, namespace, charge)}


async def find_nodes(db: Connection, batch: UnitOfWork, commands: Sequence[Command]) -> set[str]:
    """The nodes that commands name, and those of placed objects, which cannot move while the objects are locked."""
    names = {name for command in commands for name in command.nodes()}
    placed = {
        batch.objects[key].uid
        for command in commands
        for key in command.placed(batch)
        if BY_NAME[key.kind].placed and key in batch.objects and batch.objects[key].charge.bound
    }
    if placed:
        for one in await node_store.load_placements_of(db, placed):
            batch.placements[one.uid] = (*batch.placements.get(one.uid, ()), one)
            names.add(one.node)
    return names


async def read_claims(db: Connection, batch: UnitOfWork, names: set[str]) -> None:
    """Read the claims and placements of nodes. The lock on the settings keeps out other claims, and the locks on the
    nodes keep out placements."""
    batch.claimed = await node_store.count_claimed(db)
    placements = await node_store.load_placements_on(db, names)
    keys = {one.uid: one.key for one in placements}
    objects = await object_store.load(db, keys.values()) if keys else {}
    for one in placements:
        if (work := objects.get(keys[one.uid])) is not None and work.uid == one.uid:
            batch.occupants.setdefault(one.node, []).append((one, work))


async def lock_fence(db: Connection, commands: Sequence[Command]) -> tuple[int, Ground | None]:
    """Lock the leader's row until the commit, and return its fence; with the `Ground` if no command has an idempotency
    key, because keys are claimed before the tree is locked."""
    if any(command.idempotency_key is not None for command in commands):
        return await leader_store.lock(db), None
    if has_gangs(commands):
        fence, version = await leader_store.lock_with_tree(db)
        return fence, Ground(version)
    return await object_store.lock_under_leader(db, keys_of(commands))


async def lock_ground(db: Connection, commands: Sequence[Command]) -> Ground:
    if has_gangs(commands):
        return Ground(await tree_store.lock_shared(db))
    return await object_store.lock_under_tree(db, keys_of(commands))


def has_gangs(commands: Sequence[Command]) -> bool:
    """Whether gangs must be locked, which happens before their members are locked."""
    return any(command.gangs() for command in commands)


def keys_of(commands: Sequence[Command]) -> set[Key]:
    return {key for command in commands for key in command.objects()}


async def lock_gangs(db: Connection, batch: UnitOfWork, commands: Sequence[Command]) -> None:
    wanted: dict[GangKey, int] = {}
    for command in commands:
        wanted.update(command.gangs())
    if wanted:
        await gang_store.ensure(db, {key: size for key, size in wanted.items() if size})
        await gang_store.lock(db, wanted)
        batch.gangs = await gang_store.load(db, wanted)
        if any(size and key not in batch.gangs for key, size in wanted.items()):
            raise Stale("the last member of a gang left while another one joined")


def decide(batch: UnitOfWork, commands: Sequence[Command], remembered: Mapping[RequestKey, Remembered]) -> list[Result]:
    """Decide one command after another, on one unit of work."""
    return decide_once(commands, remembered, decode_reply, lambda command: command.decide(batch))


def finished(result: Result) -> Reply:
    if isinstance(result, Answers):
        return tuple(finished(one) for one in result.each)
    if isinstance(result, tuple):
        return tuple(written(one) for one in result)
    return written(result) if isinstance(result, Write) else result


async def save(db: Connection, batch: UnitOfWork) -> None:
    """Save all effects, set by set; the revision is the last lock."""
    changes = batch.counters.changes()
    used = [batch.nodes[name] for name in batch.used_nodes - batch.touched_nodes]
    if batch.gangs:
        await gang_store.save(db, {key: batch.gangs[key] for key in batch.touched_gangs}, locked=batch.gangs)
    revoked = await _save_nodes(db, batch)
    if batch.begun or batch.ended or batch.spent:
        await usage_store.save(db, list(batch.begun.values()), list(batch.ended.values()), batch.spent)
    if batch.recharged:
        await object_store.save_charges(db, list(batch.recharged.values()))
    if batch.ledger is not None:
        await ledger_store.save(db, batch.ledger)
    if batch.notifications:
        await notice_store.save(db, batch.notifications)
    if used and not batch.placed:
        await node_store.use(db, used)
    if batch.placed:
        await batch_store.save_placed(db, batch.writes, batch.tree, changes, used, list(batch.placed.values()))
    elif batch.writes:
        await batch_store.save(db, batch.writes, batch.tree, changes)
    else:
        assert not changes, "counters change only together with objects"
    if approval_store.concerns(batch.writes):
        await approval_store.save(db, batch.writes)
    notes = [token_note(one, "DELETED", "revoke", "system", "its node was deleted") for one in revoked]
    if gone := departed(batch.writes):
        # Under the revision's lock: no token of theirs is being made.
        ended = await token_store.revoke_of_users(db, gone, "system")
        notes += [token_note(one, "DELETED", "revoke", "system", "its user left the tenant") for one in ended]
    await save_notes(db, notes)


def departed(writes: Sequence[Write]) -> set[tuple[str, str]]:
    """The tenants and users of removed members, and of members that are marked for removal now."""
    return {
        (write.shown.tenant, write.shown.fields[field])
        for write in writes
        if (field := MEMBER_FIELDS.get(write.key.kind)) and (write.after is None or is_ending(write.after.doc))
    }


async def _save_nodes(db: Connection, batch: UnitOfWork) -> list[TokenRecord]:
    """Save changed nodes; return the tokens that were revoked with deleted nodes."""
    revoked: list[TokenRecord] = []
    if batch.touched_nodes:
        await node_store.put(db, [batch.nodes[name] for name in batch.touched_nodes], batch.node_uids)
    if batch.removed_nodes:
        await node_store.remove(db, sorted(batch.removed_nodes))
    if batch.disowned_nodes:
        revoked = await token_store.revoke_of_nodes(db, batch.disowned_nodes)
        await authority_store.end_generations(db, batch.disowned_nodes)
    if batch.lifted:
        await node_store.remove_placements(db, batch.lifted)
    return revoked
