"""The walk of every write: claim, lock, read, decide, save, once per batch.

Locks are taken in one global order: leader, request claims, tree, gangs, objects, counters, nodes, beats, accounts,
leases, the ledger, and last the revision. A statement that had to wait sees the new version of the row it waited for,
but not the rows that a rival put beside it. So what is wholly in the row that is locked is read by the statement that
locks it, and all else in a later one. Every message to the server costs a turn: what comes one after another in the
order is locked by one statement, where nothing has to be looked up in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import compress
from time import monotonic as now

from bursar.core.batch.placement_billing import payer
from bursar.core.batch.unit_of_work import Sheet
from bursar.core.credit.price import class_of
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.object import Key, Write
from bursar.core.quota.quota import Counter, Counters
from bursar.core.quota.tenant_tree import Row, Tree, rows_of
from bursar.ops.access.audit import token_note
from bursar.ops.credit.ledger import book_for
from bursar.ops.credit.price import Prices
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.ops.runtime.command import DEPOSED, Command, Reply, Result, decode_reply, encode_reply, written
from bursar.ops.runtime.idempotency import claim, decide_once, remember
from bursar.store.access import token as token_store
from bursar.store.access.token import TokenRecord
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Connection, Stale
from bursar.store.db.idempotency import Remembered, RequestKey
from bursar.store.nodes import liveness as liveness_store
from bursar.store.nodes import node as node_store
from bursar.store.nodes import node_ca as authority_store
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

KNOWN_MAX = 200_000

# Kinds that others only refer to by name. That one was there a second ago is good enough: it could be deleted right
# after the request as well. Queues are changed with the tree: who saw one in another version of that looks again.
CATALOGUE = frozenset({"Queue"})
SEEN_SECONDS_MAX = 1.0
SEEN_MAX = 10_000
CLASSES_MAX = 100_000


class Walk:
    """Decides batches of commands that leave the tree as it is."""

    def __init__(self, trees: TreeCache, prices: Prices | None = None) -> None:
        self._trees = trees
        self._prices = prices or Prices()
        # Counters that are known to exist. Those that are gone all the same are noticed when they are locked.
        self._known: set[Row] = set()
        self._known_in: Tree | None = None
        self._seen: dict[tuple[Key, int], float] = {}  # by key and the tree's version
        # Of which class nodes' devices are, by the node's uid and generation: with other labels it has another one.
        self._classes: dict[tuple[str, str, int], str] = {}

    async def __call__(self, db: Connection, commands: Sequence[Command]) -> Sequence[Reply]:
        """Commands of a leader that was deposed are refused and leave no trace; the rest of the batch stands."""
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
        fresh = [command for command in commands if command.claim is None or command.claim.key in claimed]
        sheet = await self._read(db, ground or await lock_ground(db, fresh), fresh)
        results = decide(sheet, commands, remembered)
        await save(db, sheet)
        replies = [finished(result) for result in results]
        await remember(db, commands, claimed, replies, encode_reply)
        return replies

    async def _read(self, db: Connection, ground: Ground, commands: Sequence[Command]) -> Sheet:
        tree = await self._trees.at(db, ground.version)
        sheet = Sheet(datetime.now(UTC), tree, Counters(tree, {}), era=tree_store.era_of(ground.version))
        await lock_gangs(db, sheet, commands)
        await self._lock_objects(db, ground, sheet, commands)
        await self._lock_rooms(db, sheet, commands)
        if metered := {name for command in commands for name in command.meters(sheet)}:
            await self._read_classes(db, sheet, metered)
        await self._open_book(db, sheet, commands)
        return sheet

    async def _lock_objects(self, db: Connection, ground: Ground, sheet: Sheet, commands: Sequence[Command]) -> None:
        if ground.objects is None:
            keys = keys_of(commands)
            if sheet.gangs:
                keys.update(await object_store.load_gang_members(db, sheet.gangs))
            sheet.objects = await object_store.lock(db, keys)
        else:
            sheet.objects = ground.objects
        needs = {key for command in commands for key in command.needs()}
        sheet.recent = self._recently_seen(needs, ground.version)
        # What was there a moment ago need not be read, where only that matters.
        if wanted := needs - sheet.recent - sheet.objects.keys():
            sheet.objects |= await object_store.load(db, wanted)
        there_now = (key for key in needs if key in sheet.objects and key.kind in CATALOGUE)
        self._seen.update({(key, ground.version): now() for key in there_now})

    def _recently_seen(self, needs: set[Key], version: int) -> set[Key]:
        if len(self._seen) > SEEN_MAX:
            self._seen.clear()
        return {key for key in needs if now() - self._seen.get((key, version), -SEEN_SECONDS_MAX) < SEEN_SECONDS_MAX}

    async def _lock_rooms(self, db: Connection, sheet: Sheet, commands: Sequence[Command]) -> None:
        """Lock the counters, the nodes, and when these were last heard."""
        rows = counters_of(sheet, commands)
        names = await find_nodes(db, sheet, commands)
        if rows:
            await self._ensure(db, sheet.tree, rows)
        counters: Mapping[Row, Counter] = {}
        if rows and names:
            counters, sheet.nodes = await node_store.lock_after_counters(db, rows, names)
        elif rows:
            counters = await quota_store.lock(db, rows)
        elif names:
            sheet.nodes = await node_store.lock(db, names)
        if len(counters) != len(rows):
            self._known.clear()
            raise Stale("a counter that was known is gone")
        if rows:
            sheet.counters = Counters(sheet.tree, counters)
        if claimed := {name for command in commands for name in command.claims()}:
            await read_claims(db, sheet, claimed)
        if beating := {name for command in commands for name in command.beats()}:
            sheet.beats = await liveness_store.lock(db, beating)

    async def _ensure(self, db: Connection, tree: Tree, rows: set[Row]) -> None:
        """Counters begin with their first use."""
        if self._known_in is not tree:
            self._known, self._known_in = set(), tree
        if unknown := rows - self._known:
            await quota_store.ensure(db, tree, unknown)
            self._known = self._known | rows if len(self._known) < KNOWN_MAX else rows

    async def _open_book(self, db: Connection, sheet: Sheet, commands: Sequence[Command]) -> None:
        """Lock the accounts and leases that are decided on. Where nobody pays beforehand this asks nothing."""
        payments = [one for command in commands for one in command.pays(sheet)] if sheet.tree.prepaid else []
        paid = any(one.lease for parts in sheet.placements.values() for one in parts) or any(
            room.claim is not None and room.claim.lease for room in sheet.nodes.values()
        )
        leases = {number for command in commands for number in command.leases(sheet)} if paid else set()
        if not payments and not leases:
            return
        if payments:
            sheet.payers = await ledger_store.find_accounts(db, {owner for one in payments for owner in one.owners})
            await self._read_classes(db, sheet, {name for one in payments for name in one.nodes})
        accounts = {account for one in payments if isinstance(account := payer(sheet, one.owners), int)}
        new = sum(len(one.nodes) for one in payments)
        sheet.book = await book_for(db, self._prices, accounts, leases, new)

    async def _read_classes(self, db: Connection, sheet: Sheet, names: set[str]) -> None:
        """Of which class the devices of nodes are. Labels stay as they are while a node's room is locked."""
        rooms = [sheet.nodes[name] for name in names if name in sheet.nodes]
        keys = {room.name: (room.name, room.uid, room.generation) for room in rooms}
        if unknown := [name for name, key in keys.items() if key not in self._classes]:
            if len(self._classes) > CLASSES_MAX:
                self._classes.clear()
            labels = await node_store.load_labels(db, unknown)
            self._classes |= {keys[name]: class_of(labels.get(name, {})) for name in unknown}
        sheet.classes |= {name: self._classes.get(key, "") for name, key in keys.items()}


def counters_of(sheet: Sheet, commands: Sequence[Command]) -> set[Row]:
    """Those that deciding may move. Work of one template shares its charge: its counters are looked up once."""
    charges = {
        (namespace, id(charge)): charge
        for command in commands
        for namespace, charge in command.charges(sheet)
        if namespace in sheet.tree.namespaces
    }
    return {row for (namespace, _), charge in charges.items() for row in rows_of(sheet.tree, namespace, charge)}


async def find_nodes(db: Connection, sheet: Sheet, commands: Sequence[Command]) -> set[str]:
    """Those that commands name, and those that objects are placed on, which cannot change while these are locked."""
    names = {name for command in commands for name in command.nodes()}
    placed = {
        sheet.objects[key].uid
        for command in commands
        for key in command.placed(sheet)
        if key.kind == "Allocation" and key in sheet.objects and sheet.objects[key].charge.bound
    }
    if placed:
        for one in await node_store.load_placements_of(db, placed):
            sheet.placements[one.uid] = (*sheet.placements.get(one.uid, ()), one)
            names.add(one.node)
    return names


async def read_claims(db: Connection, sheet: Sheet, names: set[str]) -> None:
    """Nobody else claims, for the settings are locked, and nothing is placed on these nodes, for their rooms are."""
    sheet.claimed = await node_store.count_claimed(db)
    placements = await node_store.load_placements_on(db, names)
    keys = {one.uid: Key("Allocation", one.namespace, one.name) for one in placements}
    objects = await object_store.load(db, keys.values()) if keys else {}
    for one in placements:
        if (work := objects.get(keys[one.uid])) is not None and work.uid == one.uid:
            sheet.occupants.setdefault(one.node, []).append((one, work))


async def lock_fence(db: Connection, commands: Sequence[Command]) -> tuple[int, Ground | None]:
    """The fence of the leader, who cannot change until the batch is committed; with the ground, where nobody claims a
    request: claims come before the tree."""
    if any(command.claim is not None for command in commands):
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
    """Whether gangs are to be locked, which comes before their members are."""
    return any(command.gangs() for command in commands)


def keys_of(commands: Sequence[Command]) -> set[Key]:
    return {key for command in commands for key in command.objects()}


async def lock_gangs(db: Connection, sheet: Sheet, commands: Sequence[Command]) -> None:
    wanted: dict[GangKey, int] = {}
    for command in commands:
        wanted.update(command.gangs())
    if wanted:
        await gang_store.ensure(db, {key: size for key, size in wanted.items() if size})
        await gang_store.lock(db, wanted)
        sheet.gangs = await gang_store.load(db, wanted)
        if any(size and key not in sheet.gangs for key, size in wanted.items()):
            raise Stale("a gang's last member left while another was joining")


def decide(sheet: Sheet, commands: Sequence[Command], remembered: Mapping[RequestKey, Remembered]) -> list[Result]:
    """One command after another, on one sheet."""
    return decide_once(commands, remembered, decode_reply, lambda command: command.decide(sheet))


def finished(result: Result) -> Reply:
    if isinstance(result, tuple):
        return tuple(written(one) for one in result)
    return written(result) if isinstance(result, Write) else result


async def save(db: Connection, sheet: Sheet) -> None:
    """Everything that was decided, set by set; the revision is the last lock."""
    changes = sheet.counters.changes()
    used = [sheet.nodes[name] for name in sheet.used_nodes - sheet.touched_nodes]
    if sheet.gangs:
        await gang_store.save(db, {key: sheet.gangs[key] for key in sheet.touched_gangs}, locked=sheet.gangs)
    revoked = await _save_nodes(db, sheet)
    if sheet.begun or sheet.ended or sheet.spent:
        await usage_store.save(db, list(sheet.begun.values()), list(sheet.ended.values()), sheet.spent)
    if sheet.recharged:
        await object_store.save_charges(db, list(sheet.recharged.values()))
    if sheet.book is not None:
        await ledger_store.save(db, sheet.book)
    if sheet.tidings:
        await notice_store.save(db, sheet.tidings)
    if used and not sheet.placed:
        await node_store.use(db, used)
    if sheet.placed:
        await batch_store.save_placed(db, sheet.writes, sheet.tree, changes, used, list(sheet.placed.values()))
    elif sheet.writes:
        await batch_store.save(db, sheet.writes, sheet.tree, changes)
    else:
        assert not changes, "counters move only with what is written"
    await save_notes(db, [token_note(one, "DELETED", "revoke", "system", "its node is gone") for one in revoked])


async def _save_nodes(db: Connection, sheet: Sheet) -> list[TokenRecord]:
    """Tokens that were revoked with their nodes."""
    revoked: list[TokenRecord] = []
    if sheet.touched_nodes:
        await node_store.put(db, [sheet.nodes[name] for name in sheet.touched_nodes], sheet.node_uids)
    if sheet.removed_nodes:
        await node_store.remove(db, sorted(sheet.removed_nodes))
    if sheet.disowned_nodes:
        revoked = await token_store.revoke_of_nodes(db, sheet.disowned_nodes)
        await authority_store.end_generations(db, sheet.disowned_nodes)
    if sheet.lifted:
        await node_store.remove_placements(db, sheet.lifted)
    return revoked
