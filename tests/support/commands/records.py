"""All that is stored, as values: commands are decided on units of work that are built from it, without a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import msgspec

from bursar.commands.command import Command, Result
from bursar.commands.lifecycle.dispatch import change_command, delete_command
from bursar.commands.objects.object import ChangeObject, DeletePreconditions
from bursar.commands.quota.tenant_tree import (
    TreeUse,
    no_capacity,
    recount_tenants,
    set_limits,
    touched_scopes,
    tree_refusal,
)
from bursar.commands.quota.tree_documents import applied
from bursar.commands.scheduling.bind import Bind, BindMember
from bursar.commands.workloads.allocation import request_in
from bursar.commands.workloads.report import Report
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.account import Account, Owner
from bursar.core.credit.lease import Lease
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import PriceList, class_of
from bursar.core.nodes.bind_check import Target
from bursar.core.nodes.liveness import SeenHeartbeat
from bursar.core.nodes.node import NodeCapacity, Placement
from bursar.core.objects.allocation import GangKey, GangRow, Phase
from bursar.core.objects.object import Key, Origin, Stored, Write
from bursar.core.quota.quota import Counter, Counters, needs_recount
from bursar.core.quota.tenant_tree import Row, Tree, TreeChange, hard_of, rows_of, soft_of
from bursar.core.values.money import MICROS
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.lifecycle.create import create_command
from bursar.wire.kinds.registry import BY_NAME

GPU = "nvidia.com/gpu"
TEST = Origin("user:test", "test")
BEGIN = datetime(2031, 1, 1, 12, tzinfo=UTC)


@dataclass
class Records:
    """A system with the tenant and the namespace `default`. Short words do what a client would ask for."""

    now: datetime = BEGIN
    tree: Tree = field(default_factory=Tree)
    objects: dict[Key, Stored] = field(default_factory=dict)
    nodes: dict[str, NodeCapacity] = field(default_factory=dict)
    placements: dict[tuple[str, str], Placement] = field(default_factory=dict)  # by (node, uid)
    gangs: dict[GangKey, GangRow] = field(default_factory=dict)
    counters: dict[Row, Counter] = field(default_factory=dict)
    heartbeats: dict[str, SeenHeartbeat] = field(default_factory=dict)
    accounts: dict[int, Account] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    prices: PriceList = field(default_factory=PriceList)
    revision: int = 0
    last: UnitOfWork | None = None  # of the last command that was not refused

    def __post_init__(self) -> None:
        self._numbers, self._leases = count(1), count(1)
        self.tenant("default")
        self.namespace("default")

    # Deciding.

    def decide(self, command: Command) -> Result:
        """Decide a command, and store its effects; one that is refused must leave nothing behind."""
        batch = self.unit(command)
        before = _image(batch)
        result = command.decide(batch)
        if isinstance(result, Refusal):
            assert _image(batch) == before, "a refused command leaves nothing behind"
        else:
            self._store(batch)
        return result

    def unit(self, command: Command) -> UnitOfWork:
        """The rows that the write path would read for a command: those it names, and no others."""
        batch = UnitOfWork(self.now, self.tree, Counters(self.tree, {}), self._uid)
        for key, size in command.gangs().items():
            if size or key in self.gangs:
                batch.gangs[key] = self.gangs.get(key, GangRow(size))
        in_gangs = {one.key for one in self.objects.values() if (one.key.namespace, one.gang) in batch.gangs}
        keys = {*command.objects(), *command.needs(), *in_gangs}
        batch.objects = {key: self.objects[key] for key in sorted(keys) if key in self.objects}
        charges = [one for one in command.charges(batch) if one[0] in self.tree.namespaces]
        rows = {row for namespace, charge in charges for row in rows_of(self.tree, namespace, charge)}
        batch.counters = Counters(self.tree, {row: self._counter(row) for row in rows})
        uids = {batch.objects[key].uid for key in command.placed(batch) if key in batch.objects}
        parts = [one for one in self.placements.values() if one.uid in uids]
        batch.placements = {uid: some for uid in uids if (some := tuple(one for one in parts if one.uid == uid))}
        names = {*command.nodes(), *(one.node for one in parts)}
        batch.nodes = {name: self.nodes[name] for name in sorted(names) if name in self.nodes}
        self._read_claims(batch, set(command.claimed_nodes()))
        batch.heartbeats = {name: self.heartbeats[name] for name in command.heartbeats() if name in self.heartbeats}
        self._open_ledger(batch, command)
        return batch

    def _read_claims(self, batch: UnitOfWork, names: set[str]) -> None:
        if names:
            batch.claimed = sum(one.claim is not None for one in self.nodes.values())
            for part in self.placements.values():
                if part.node in names:
                    work = self.objects[Key("Allocation", part.namespace, part.name)]
                    batch.occupants.setdefault(part.node, []).append((part, work))

    def _open_ledger(self, batch: UnitOfWork, command: Command) -> None:
        payments = list(command.pays(batch)) if self.tree.prepaid else []
        leases = set(command.leases(batch))
        metered = {*command.meters(batch), *(name for one in payments for name in one.nodes)}
        batch.classes = {name: class_of(self.objects[node_key(name)].labels) for name in metered if name in batch.nodes}
        owners = {owner for one in payments for owner in one.owners}
        batch.payers = {
            (one.tenant, one.user): one.id for one in self.accounts.values() if Owner(one.tenant, one.user) in owners
        }
        if payments or leases:
            batch.ledger = Ledger(
                self.micros, self.prices, deepcopy(self.accounts), deepcopy(self.leases), numbers=self._leases
            )

    @property
    def micros(self) -> int:
        return int(self.now.timestamp()) * MICROS

    def _counter(self, row: Row) -> Counter:
        return self.counters.get(row, Counter(hard_of(self.tree, row), soft_of(self.tree, row)))

    def _uid(self, prefix: str) -> str:
        return f"{prefix}-{next(self._numbers)}"

    def _store(self, batch: UnitOfWork) -> None:
        for write in batch.writes:
            self.revision += 1
            write.revision = self.revision
            if write.after is None:
                del self.objects[write.key]
            else:
                self.objects[write.key] = replace(write.after, revision=self.revision)
        self.objects |= batch.recharged
        self.nodes |= {name: batch.nodes[name] for name in batch.touched_nodes | batch.used_nodes}
        for name in batch.removed_nodes:
            del self.nodes[name]
        for lifted in batch.lifted:
            self.placements.pop(lifted, None)
        self.placements |= batch.placed
        self.gangs |= {key: batch.gangs[key] for key in batch.touched_gangs}
        self.counters |= {row: batch.counters[row] for row in batch.counters.changes()}
        if batch.ledger is not None:
            self.accounts, self.leases = batch.ledger.accounts, batch.ledger.leases
        self.last = batch

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    # The tenant tree.

    def reshape(self, command: Command, use: TreeUse | None = None) -> Result:
        """A change of the tenant tree: it is refused, or the counters follow it."""
        batch = self.unit(command)
        result = command.decide(batch)
        if isinstance(result, Refusal) or not batch.writes:
            return result
        (write,) = batch.writes
        new = applied(self.tree, TreeChange(write.key, write.after is None, write.shown.doc))
        refusal = tree_refusal(self.tree, new, write.key, write.after, use or TreeUse())
        if refusal is not None:
            return refusal
        if needs_recount(self.tree, new):
            plan = recount_tenants(self.tree, new, {row: one for row, one in self.counters.items() if ":" in row[0]})
        else:
            scopes = touched_scopes(self.tree, new)
            plan = set_limits(new, scopes, {row: one for row, one in self.counters.items() if row[0] in scopes})
        if plan.exceeded:
            return no_capacity(write.key, plan.exceeded)
        self.tree = new
        self.counters = {row: one for row, one in self.counters.items() if row not in plan.removed} | plan.put
        self._store(batch)
        return result

    def _is_of_tree(self, key: Key) -> bool:
        return BY_NAME[key.kind].in_tree and key.kind != "Queue"

    def tenant(self, name: str, **spec: Any) -> Result:
        return self._shape("Tenant", {"metadata": {"name": name}, "spec": spec})

    def namespace(self, name: str, tenant: str = "default") -> Result:
        return self._shape("Namespace", {"metadata": {"name": name, "labels": {"bursar.io/tenant": tenant}}})

    def settings(self, **spec: Any) -> Result:
        return self._shape("Settings", {"metadata": {"name": "system"}, "spec": spec})

    def _shape(self, kind: str, document: dict[str, Any]) -> Result:
        return self.reshape(create_command(BY_NAME[kind], self._read(kind, document), TEST, admin=True))

    # Words for what clients ask.

    def _read(self, kind: str, document: dict[str, Any]) -> Any:
        one = msgspec.convert(document, BY_NAME[kind].type)
        assert BY_NAME[kind].check(one) == []
        return one

    def create(self, kind: str, document: dict[str, Any], origin: Origin = TEST, *, admin: bool = True) -> Result:
        return self.decide(create_command(BY_NAME[kind], self._read(kind, document), origin, admin=admin))

    def node(self, name: str, *, labels: Mapping[str, str] | None = None, **capacity: Any) -> Result:
        resources = {key.replace("gpu", GPU): str(value) for key, value in capacity.items()}
        return self.create(
            "Node", {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": {"capacity": resources}}
        )

    def allocation(
        self,
        name: str,
        namespace: str = "default",
        *,
        user: str = "test",
        spec: Mapping[str, Any] | None = None,
        **requests: Any,
    ) -> Result:
        resources = {key.replace("gpu", GPU): str(value) for key, value in requests.items()}
        document = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"resources": {"requests": resources}, **(spec or {})},
        }
        return self.create("Allocation", document, Origin(f"user:{user}", "create"))

    def change(self, key: Key, **spec: Any) -> Result:
        """Set fields of the spec."""
        command = self._change(key, **spec)
        if isinstance(command, Refusal):
            return command
        return self.reshape(command) if self._is_of_tree(key) else self.decide(command)

    def change_command(self, key: Key, **spec: Any) -> ChangeObject:
        """The same change, to be decided later."""
        command = self._change(key, **spec)
        assert isinstance(command, ChangeObject)
        return command

    def _change(self, key: Key, **spec: Any) -> Command | Refusal:
        before = self.objects[key]
        document = msgspec.json.decode(before.doc)
        if status := msgspec.json.decode(before.status):
            document["status"] = status
        document["spec"] = {**document.get("spec", {}), **spec}
        return change_command(BY_NAME[key.kind], before, self._read(key.kind, document), TEST, spec_changed=True)

    def delete(self, key: Key, use: TreeUse | None = None) -> Result:
        command = delete_command(BY_NAME[key.kind], self.objects[key], TEST, preconditions=DeletePreconditions())
        return self.reshape(command, use) if self._is_of_tree(key) else self.decide(command)

    def member(self, name: str, targets: Iterable[str | Target], namespace: str = "default") -> BindMember:
        one = self.objects[key_of(name, namespace)]
        where = tuple(Target(at) if isinstance(at, str) else at for at in targets)
        return BindMember(one.key, where, request_in(one.doc), one.gang, one.uid)

    def bind(self, members: Mapping[str, Iterable[str | Target]], namespace: str = "default") -> Result:
        """Place allocations as one unit: by name, on which nodes."""
        unit = [self.member(name, targets, namespace) for name, targets in members.items()]
        return self.decide(Bind.unit(unit, TEST))

    def report(self, name: str, phase: Phase, namespace: str = "default", **said: Any) -> Result:
        one = self.objects[key_of(name, namespace)]
        return self.decide(Report(key=one.key, origin=TEST, phase=phase, gang=one.gang, **said))

    # What stands.

    def status(self, name: str, namespace: str = "default") -> dict[str, Any]:
        return self.status_of(key_of(name, namespace))

    def status_of(self, key: Key) -> dict[str, Any]:
        shown: dict[str, Any] = msgspec.json.decode(self.objects[key].status)
        return shown

    def used(self, scope: str, dimension: str = GPU) -> tuple[int, int]:
        """The accepted and bound amounts, in whole units."""
        counter = self.counters.get((scope, dimension), Counter())
        return counter.accepted // 1000, counter.bound // 1000

    def given(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Which GPUs of which nodes are given to which work."""
        return sorted((one.node, one.name, one.devices.get(GPU, ())) for one in self.placements.values())


def key_of(name: str, namespace: str = "default") -> Key:
    return Key("Allocation", namespace, name)


def node_key(name: str) -> Key:
    return Key("Node", "", name)


def code(result: Result) -> str:
    return str(result.code) if isinstance(result, Refusal) else "ok"


def refusal(result: Result) -> Refusal:
    assert isinstance(result, Refusal), result
    return result


def written(result: Result) -> Write:
    assert isinstance(result, Write), result
    return result


def _image(batch: UnitOfWork) -> dict[str, Any]:
    """All that a command could have changed."""
    plain = {one.name: getattr(batch, one.name) for one in fields(batch)}
    for name in ("now", "tree", "counters", "new_uid", "ledger"):
        del plain[name]
    ledger = batch.ledger
    money = (ledger.accounts, ledger.leases, ledger.entries, ledger.events) if ledger is not None else None
    return deepcopy({**plain, "moved": batch.counters.changes(), "money": money})
