"""Quotas against a plain model: whatever is done in whatever order, acceptance and counters are as the model says."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from bursar.commands.command import Reply, Written
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.nodes.eviction import EvictionReason, EvictionRule, Notice
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.values.refusal import Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.scheduling.placement import evict
from bursar.ops.usage.usage_rollup import roll
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.postgres import PostgresServer
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    counters,
    delete,
    end,
    namespace,
    node,
    quota,
    tenant,
)
from support.runtime.state_machines import SOAK, RuntimeMachine, follow
from support.usage.hourly import assert_hours_agree

GPU = "nvidia.com/gpu"
GPUS_PER_NODE = 8
NOTICE = Notice(EvictionReason.PREEMPTED, EvictionRule.ADMIN, "user:admin", "Preempted by user:admin")
TENANTS, SPACES, NODES = ("t1", "t2", "t3"), ("s1", "s2", "s3"), ("n1", "n2")


# The model: everything is a sum over what lives, computed from scratch each time. Amounts are in thousandths.


@dataclass
class Work:
    gpus: int
    ending: bool
    phase: str = "Pending"
    node: str = ""
    nodes_accepted: int = 0

    @property
    def lives(self) -> bool:
        return self.phase in ("Pending", "Scheduled", "Evicted", "Terminating")

    @property
    def placed(self) -> bool:
        return self.phase in ("Scheduled", "Evicted", "Terminating")

    def accepted(self, dimension: str) -> int:
        amounts = {GPU: self.gpus * 1000, "pods": 1000, "allocations": 1000, "nodes": self.nodes_accepted}
        return amounts[dimension] if self.lives else 0

    def bound(self, dimension: str) -> int:
        if not self.placed:
            return 0
        return fraction(self.gpus) if dimension == "nodes" else self.accepted(dimension)


DIMENSIONS = (GPU, "allocations", "nodes", "pods")


def fraction(gpus: int) -> int:
    return max(1, gpus * 1000 // GPUS_PER_NODE)


@dataclass
class Limits:
    hard: dict[str, int] = field(default_factory=dict)
    queue: bool = False
    ending_only: bool = False


Row = tuple[str, str]


@dataclass
class Model:
    work: dict[tuple[str, str], Work] = field(default_factory=dict)
    owner: dict[str, str] = field(default_factory=lambda: dict(zip(SPACES, TENANTS, strict=True)))
    parent: dict[str, str] = field(default_factory=lambda: dict.fromkeys(TENANTS, ""))
    tenants: dict[str, Limits] = field(default_factory=lambda: {name: Limits() for name in TENANTS})
    quotas: dict[tuple[str, str], Limits] = field(default_factory=dict)
    system: Limits = field(default_factory=Limits)

    def lineage(self, name: str) -> list[str]:
        line = []
        while name:
            line.append(name)
            name = self.parent[name]
        return line

    def scopes(self, space: str, ending: bool) -> list[tuple[str, Limits]]:
        """Everything that limits what lives in a namespace, nearest first."""
        near = [
            (f"quota:{where}/{name}", limits)
            for (where, name), limits in sorted(self.quotas.items())
            if where == space and (ending or not limits.ending_only)
        ]
        tenants = [(f"tenant:{name}", self.tenants[name]) for name in self.lineage(self.owner[space])]
        return [*near, *tenants, ("system", self.system)]

    def counters(self) -> dict[Row, tuple[int, int]]:
        """(accepted, bound) of every counter that is not zero."""
        rows: dict[Row, tuple[int, int]] = {}
        for (space, _), one in self.work.items():
            for scope, limits in self.scopes(space, one.ending):
                for dimension in DIMENSIONS:
                    if dimension in limits.hard or scope == f"tenant:{self.owner[space]}":
                        accepted, bound = rows.get((scope, dimension), (0, 0))
                        rows[scope, dimension] = (accepted + one.accepted(dimension), bound + one.bound(dimension))
        return {row: pair for row, pair in rows.items() if pair != (0, 0)}

    def faults(self, space: str, ending: bool, accepted: dict[str, int], bound: dict[str, int]) -> list[Row]:
        """Limits that this request would exceed, nearest scope first, then by dimension."""
        rows = self.counters()
        found = []
        for scope, limits in self.scopes(space, ending):
            for dimension, hard in sorted(limits.hard.items()):
                used, running = rows.get((scope, dimension), (0, 0))
                more, more_running = accepted.get(dimension, 0), bound.get(dimension, 0)
                if (more > 0 and used + more > hard and not limits.queue) or (
                    more_running > 0 and running + more_running > hard
                ):
                    found.append((scope, dimension))
        return found

    def gpus_below(self, tenant: str) -> int:
        return sum(
            one.gpus for (space, _), one in self.work.items() if one.lives and tenant in self.lineage(self.owner[space])
        )

    def free(self, name: str) -> int:
        return GPUS_PER_NODE - sum(one.gpus for one in self.work.values() if one.placed and one.node == name)

    def overrun_by_moving(self, child: str, parent: str) -> bool:
        before, was = self.counters(), self.parent[child]
        self.parent[child] = parent
        after = self.counters()
        self.parent[child] = was
        for name, limits in self.tenants.items():
            for dimension, hard in limits.hard.items():
                row = (f"tenant:{name}", dimension)
                old, new = before.get(row, (0, 0)), after.get(row, (0, 0))
                if (new[0] > max(old[0], hard) and not limits.queue) or new[1] > max(old[1], hard):
                    return True
        return False


LIMITED = st.one_of(
    *(
        st.fixed_dictionaries({dimension: st.sampled_from([0, 2, 4, 6, 8, 12]) for dimension in dimensions})
        for dimensions in ((GPU,), ("allocations",), ("nodes",), (GPU, "nodes"), (GPU, "allocations"))
    )
)
LIMITS = st.one_of(st.just(dict[str, int]()), LIMITED)


def amounts(limits: dict[str, int]) -> dict[str, int]:
    return {dimension: value * 1000 for dimension, value in limits.items()}


class Quotas(RuntimeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.names = 0

    @initialize()
    def build(self) -> None:
        for name in TENANTS:
            assert code(self.run(tenant(self.runtime, name))) == "ok"
        for name, owner in self.model.owner.items():
            assert code(self.run(namespace(self.runtime, name, owner))) == "ok"
        for name in NODES:
            assert code(self.run(node(self.runtime, name, gpu=GPUS_PER_NODE))) == "ok"
        for space in SPACES:
            self.create(space, gpus=1, ending=False, count=2)
            self.create(space, gpus=2, ending=True, count=1)

    # Users and nodes.

    @rule(
        space=st.sampled_from(SPACES),
        gpus=st.sampled_from([0, 1, 1, 2, 4]),
        ending=st.booleans(),
        count=st.integers(1, 3),
    )
    def submit(self, space: str, gpus: int, ending: bool, count: int) -> None:
        self.create(space, gpus, ending, count)

    def create(self, space: str, gpus: int, ending: bool, count: int) -> None:
        for _ in range(count):
            self.create_one(space, gpus, ending)

    def create_one(self, space: str, gpus: int, ending: bool) -> None:
        self.names += 1
        one = Work(gpus, ending)
        expected = self.model.faults(space, ending, {each: one.accepted(each) for each in DIMENSIONS}, {})
        spec = {"ttl": "1h"} if ending else {}
        self.check(self.run(allocation(self.runtime, space, f"a{self.names}", spec=spec, gpu=gpus)), expected)
        if not expected:
            self.model.work[space, f"a{self.names}"] = one

    def some(self, data: st.DataObject, *phases: str) -> tuple[tuple[str, str], Work]:
        keys = [key for key, one in self.model.work.items() if not phases or one.phase in phases]
        key = data.draw(st.sampled_from(keys))
        return key, self.model.work[key]

    def any_in(self, *phases: str) -> bool:
        return any(not phases or one.phase in phases for one in self.model.work.values())

    @precondition(lambda self: self.any_in("Pending"))
    @rule(space=st.sampled_from(SPACES), name=st.sampled_from(NODES))
    def bind(self, space: str, name: str) -> None:
        """Everything that waits in a namespace, as a cycle of the scheduler would."""
        for (where, work), one in self.model.work.items():
            if where == space and one.phase == "Pending":
                self.bind_one(space, work, one, name)

    def bind_one(self, space: str, work: str, one: Work, name: str) -> None:
        reply = self.run(bind(self.runtime, space, work, name))
        if one.gpus > self.model.free(name):
            assert code(reply) == "no_capacity"
            return
        part = fraction(one.gpus)
        bound = {each: one.accepted(each) for each in DIMENSIONS} | {"nodes": part}
        expected = self.model.faults(space, one.ending, {"nodes": max(0, part - one.nodes_accepted)}, bound)
        self.check(reply, expected)
        if not expected:
            one.phase, one.node, one.nodes_accepted = "Scheduled", name, max(part, one.nodes_accepted)

    @precondition(lambda self: self.any_in("Scheduled"))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """From now on its hours count; to quotas it is the same as before."""
        (space, work), _ = self.some(data, "Scheduled")
        assert code(self.run(end(self.runtime, space, work, Phase.RUNNING))) == "ok"

    @rule()
    def enter_hours(self) -> None:
        self.runner.run(roll(self.runtime.database, datetime.now(UTC)))

    @precondition(lambda self: self.any_in())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        (space, work), one = self.some(data)
        reply = self.run(end(self.runtime, space, work, Phase.FAILED))
        assert code(reply) == "ok"
        if one.phase == "Terminating":
            assert isinstance(reply, Written)
            assert reply.deleted
            del self.model.work[space, work]
        elif one.phase == "Evicted":
            one.phase, one.node = "Pending", ""
        else:
            one.phase = "Failed"

    @precondition(lambda self: self.any_in("Scheduled", "Evicted", "Terminating"))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        (space, work), one = self.some(data, "Scheduled", "Evicted", "Terminating")
        reply = self.run(end(self.runtime, space, work, Phase.PENDING))
        assert code(reply) == "ok"
        if one.phase == "Terminating":
            del self.model.work[space, work]
        else:
            one.phase, one.node = "Pending", ""

    @precondition(lambda self: self.any_in())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        (space, work), one = self.some(data)
        found = self.run(object_ops.get(self.runtime, Key("Allocation", space, work)))
        assert isinstance(found, Stored)
        reply = self.run(evict(self.runtime, found, NOTICE, TEST))
        assert code(reply) == ("ok" if one.placed else "stale")
        if one.phase == "Scheduled":
            one.phase = "Evicted"

    @precondition(lambda self: self.any_in())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        (space, work), one = self.some(data)
        reply = self.run(delete(self.runtime, "Allocation", space, work))
        assert code(reply) == "ok"
        if one.placed:
            one.phase = "Terminating"
        else:
            del self.model.work[space, work]

    # Administrators.

    @rule(name=st.sampled_from(TENANTS), limits=LIMITS, queue=st.booleans())
    def limit_tenant(self, name: str, limits: dict[str, int], queue: bool) -> None:
        """Reduce or raise: usage may be above it afterwards."""
        self.set_limits(name, limits, queue)

    def set_limits(self, name: str, limits: dict[str, int], queue: bool) -> None:
        enforcement = "Queue" if queue else "Reject"
        reply = self.run(change(self.runtime, "Tenant", "", name, limits=limits, enforcement=enforcement))
        assert code(reply) == "ok"
        self.model.tenants[name] = Limits(amounts(limits), queue)

    @rule(limits=LIMITS)
    def limit_system(self, limits: dict[str, int]) -> None:
        assert code(self.run(change(self.runtime, "Settings", "", "system", limits=limits))) == "ok"
        self.model.system = Limits(amounts(limits))

    @rule(child=st.sampled_from(TENANTS), parent=st.sampled_from(("", *TENANTS)))
    def reparent(self, child: str, parent: str) -> None:
        if child != parent:
            self.move(child, parent)

    @rule(child=st.sampled_from(TENANTS), parent=st.sampled_from(TENANTS), spare=st.sampled_from([-1, 0]))
    def reparent_where_capacity_is_scarce(self, child: str, parent: str, spare: int) -> None:
        """One GPU too few, or just enough."""
        if child in self.model.lineage(parent) or parent in self.model.lineage(child):
            return
        wanted = self.model.gpus_below(child) + self.model.gpus_below(parent) + spare
        self.set_limits(parent, {GPU: max(0, wanted)}, queue=False)
        self.move(child, parent)

    def move(self, child: str, parent: str) -> None:
        reply = self.run(change(self.runtime, "Tenant", "", child, parent=parent))
        if child in self.model.lineage(parent):
            assert code(reply) == "invalid"
        elif self.model.overrun_by_moving(child, parent):
            assert code(reply) == "in_use"
        else:
            assert code(reply) == "ok"
            self.model.parent[child] = parent

    @rule(
        space=st.sampled_from(SPACES),
        name=st.sampled_from(["q1", "q2"]),
        limits=LIMITED,
        queue=st.booleans(),
        ending_only=st.booleans(),
    )
    def put_quota(self, space: str, name: str, limits: dict[str, int], queue: bool, ending_only: bool) -> None:
        hard = {dimension: str(value) for dimension, value in limits.items()}
        enforcement, scopes = "Queue" if queue else "Reject", ["Terminating"] if ending_only else []
        spec = {"hard": hard, "enforcement": enforcement, "scopes": scopes}
        if (space, name) in self.model.quotas:
            assert code(self.run(quota(self.runtime, space, name, **spec))) == "already_exists"
            assert code(self.run(change(self.runtime, "ResourceQuota", space, name, **spec))) == "ok"
        else:
            assert code(self.run(quota(self.runtime, space, name, **spec))) == "ok"
        self.model.quotas[space, name] = Limits(amounts(limits), queue, ending_only)

    @precondition(lambda self: self.model.quotas)
    @rule(data=st.data())
    def drop_quota(self, data: st.DataObject) -> None:
        space, name = data.draw(st.sampled_from(sorted(self.model.quotas)))
        assert code(self.run(delete(self.runtime, "ResourceQuota", space, name))) == "ok"
        del self.model.quotas[space, name]

    @rule(space=st.sampled_from(SPACES), owner=st.sampled_from(TENANTS))
    def move_namespace(self, space: str, owner: str) -> None:
        def edit(before: Stored, document: dict[str, Any]) -> Any:
            document["metadata"]["labels"] = {"bursar.io/tenant": owner}
            one = msgspec.convert(document, BY_NAME["Namespace"].type)
            return change_command(BY_NAME["Namespace"], before, one, TEST, spec_changed=False)

        reply = self.run(object_ops.change(self.runtime, Key("Namespace", "", space), edit, tenant="test"))
        in_use = any(where == space for where, _ in (*self.model.work, *self.model.quotas))
        if in_use and owner != self.model.owner[space]:
            assert code(reply) == "in_use"
        else:
            assert code(reply) == "ok"
            self.model.owner[space] = owner

    # What must always hold.

    def check(self, reply: Reply, expected: list[Row]) -> None:
        assert code(reply) == ("quota_exceeded" if expected else "ok"), reply
        if isinstance(reply, Refusal):
            assert [one.scope for one in reply.causes] == [scope for scope, _ in expected]

    @invariant()
    def counters_are_what_the_model_and_the_charges_say(self) -> None:
        rows = self.runner.run(counters(self.runtime))
        used = {row: (one.accepted, one.bound) for row, one in rows.items() if (one.accepted, one.bound) != (0, 0)}
        assert used == self.model.counters()
        hard = {row: one.hard for row, one in rows.items()}
        for name, limits in self.model.tenants.items():
            assert {dimension: hard.get((f"tenant:{name}", dimension)) for dimension in limits.hard} == limits.hard
        self.runner.run(assert_counters_equal_charges(self.runtime))
        self.runner.run(assert_hours_agree(self.runtime))


def test_quotas_follow_the_model_whatever_is_done(embedded_postgres: PostgresServer, database_template: str) -> None:
    examples, steps = (400, 50) if SOAK else (14, 25)
    follow(Quotas, embedded_postgres, database_template, examples=examples, steps=steps)
