"""The cluster state's bookkeeping: objects come, go and change, and every count stays right."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.quota.tenant_tree import Tenant
from bursar.core.scheduling.state.cluster_state import ActiveBoost, ClusterState, Nomination
from bursar.core.scheduling.state.placed_columns import NEVER, Spot
from bursar.core.scheduling.state.topology_counts import crowd_of
from support.scheduling.cluster_states import (
    FPGA,
    GPU,
    HOST,
    NOW,
    RACK,
    Machine,
    apart,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    limit,
    machine,
    members,
    near,
    place,
    put,
    run,
    submit,
    why,
)
from support.scheduling.random_states import asks, machines, some_limits

# Nodes come, go and change.


def test_a_node_that_is_gone_takes_what_ran_there_with_it() -> None:
    cluster = cluster_of(machine("a", gpus=2), machine("b", gpus=2))
    run(cluster, ask("x", gpus=1), "a")
    run(cluster, ask("y", gpus=1, nodes=2), "a", "b")
    cluster.remove_node("a")
    assert set(cluster.placed) == {"y"}
    assert cluster.used["t"][GPU] == WHOLE
    assert cluster.capacity[GPU] == 2 * WHOLE
    assert place(cluster, ask("z", gpus=2)) == {}
    assert place(cluster, ask("w", gpus=1)) == {"w": ("b",)}


def test_a_gang_that_lost_a_node_can_still_be_looked_at() -> None:
    cluster = cluster_of(machine("a", gpus=1), machine("b", gpus=1))
    first, second = members("g", 2, gpus=1)
    run(cluster, first, "a")
    run(cluster, second, "b")
    cluster.remove_node("a")
    submit(cluster, ask("vip", gpus=1, priority=10))
    plan = cycle(cluster)
    assert [victim.uid for victim in plan.preemptions[0].victims] == ["g-1"]


def test_a_row_that_is_used_again_remembers_nothing() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=4, rack="a", disk="ssd"), machine("b", cpu=1))
    run(cluster, ask("x", gpus=4, labels={"app": "db"}), "a")
    cluster.remove_node("a")
    put(cluster, machine("c", cpu=2))
    assert cluster.fleet.row_of["c"] == 0
    assert place(cluster, ask("y", gpus=1), ask("z", cpu=2), ask("w", where=near(RACK, app="db"))) == {"z": ("c",)}


def test_more_nodes_than_the_columns_had_capacity_for() -> None:
    cluster = cluster_of(*(machine(f"n{number:03}", gpus=1) for number in range(200)))
    assert len(place(cluster, *(ask(f"x{number}", gpus=1) for number in range(250)))) == 200
    assert not cluster.fleet.now.free[cluster.fleet.column_of[GPU]].any()


def test_a_wider_node_that_comes_later_spoils_no_plan_for_later() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    run(cluster, ask("x", gpus=8), "a", ends_in=100)
    put(cluster, machine("b", gpus=16, offers={FPGA: WHOLE}, cordoned=True))
    submit(cluster, ask("y", gpus=8))
    cycle(cluster)
    assert cluster.memory.reservation is not None
    assert cluster.memory.reservation.start == NOW + 100


def test_a_device_that_the_node_has_lost_is_still_held_by_whom_it_was_given_to() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    column = cluster.fleet.device_column_of[GPU]
    cluster.place(ask("x", gpus=1), [Spot(0, ((column, (11,)),))], since=NOW)
    assert place(cluster, ask("y", gpus=1), ask("z", gpus=1)) == {"y": ("a",)}
    end(cluster, "x")
    assert bound(cluster, cycle(cluster)) == {"z": ("a",)}


def test_the_same_allocation_on_other_devices_is_moved() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    one = ask("x", gpus=1)
    run(cluster, one, "a", devices=(0,))
    run(cluster, one, "a", devices=(1,))
    assert cluster.fleet.now.devices[0][0].tolist()[:2] == [WHOLE, 0]


def test_a_tally_follows_a_node_to_another_domain() -> None:
    cluster = cluster_of(machine("a", cpu=4, rack="r1"), machine("b", cpu=4, rack="r2"))
    run(cluster, ask("old", labels={"app": "db"}), "a")
    where = near(RACK, app="db")
    assert place(cluster, ask("x", cpu=3, where=where)) == {"x": ("a",)}
    put(cluster, machine("a", cpu=4, rack="r2"))
    assert place(cluster, ask("y", cpu=3, where=where)) == {"y": ("b",)}


# Waiting.


def test_changing_what_waits_moves_it_to_where_it_belongs() -> None:
    cluster = cluster_of(machine("a", cpu=1))
    submit(cluster, ask("x", cpu=1), ask("y", cpu=1))
    submit(cluster, replace(ask("x", cpu=1), priority=5))
    assert len(cluster.groups) == 2
    assert bound(cluster, cycle(cluster)) == {"x": ("a",)}


def test_those_who_wait_alike_are_served_in_the_order_of_submission() -> None:
    cluster = cluster_of(machine("a", cpu=2))
    late, early, middle = (ask(name, cpu=1, at=at) for name, at in (("l", NOW), ("e", NOW - 9), ("m", NOW - 5)))
    submit(cluster, late, early, middle)
    assert list(bound(cluster, cycle(cluster))) == ["e", "m"]


def test_a_group_blocked_for_a_quota_does_not_hold_up_those_that_are_charged_otherwise() -> None:
    cluster = cluster_of(machine("a", cpu=8))
    limit(cluster, Tenant("t", limits={"limits.cpu": WHOLE}))
    dear, cheap = (ask(name, cpu=1, at=at) for name, at in (("dear", NOW - 9), ("cheap", NOW)))
    dear = replace(dear, charge=replace(dear.charge, accepted={**dear.charge.accepted, "limits.cpu": 2 * WHOLE}))
    assert place(cluster, dear, cheap) == {"cheap": ("a",)}


def test_what_was_not_committed_waits_as_before() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    one = ask("x", gpus=1)
    place(cluster, one)
    cluster.unassume(one)
    assert not cluster.placed
    assert list(cluster.waiting) == ["x"]
    assert bound(cluster, cycle(cluster)) == {"x": ("a",)}


def test_a_victim_that_stopped_waits_again_with_its_submit_time() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    one = ask("x", gpus=1, at=NOW - 500)
    run(cluster, one, "a")
    cluster.wait(one)
    assert not cluster.placed
    assert bound(cluster, cycle(cluster)) == {"x": ("a",)}


def test_a_boost_replaces_the_priority_until_it_expires() -> None:
    cluster = cluster_of()
    one = ask("x", job="j", priority=7)
    cluster.boosts["n", "j"] = ActiveBoost(100, NOW)
    assert cluster.priority(one, NOW - 1) == 100
    assert cluster.priority(one, NOW) == 7
    assert cluster.priority(ask("y", priority=3), NOW - 1) == 3


def test_a_nomination_goes_with_the_allocation() -> None:
    cluster = cluster_of(machine("a", gpus=1))
    cluster.wait(ask("x", gpus=1), Nomination(("a",), NOW + 60))
    end(cluster, "x")
    assert not cluster.nominated
    cluster.wait(ask("x", gpus=1), Nomination(("a",), NOW + 60))
    cluster.renounce("x")
    assert bound(cluster, cycle(cluster)) == {"x": ("a",)}


def test_a_gang_is_forgotten_with_its_last_member() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    for one in members("g", 2, gpus=1):
        cluster.wait(one)
    assert set(cluster.gangs) == {("n", "g")}
    end(cluster, "g-0", "g-1")
    assert not cluster.gangs
    assert not cluster.groups


# Limits.


def test_a_node_that_grows_gives_back_exactly_what_was_counted() -> None:
    cluster = cluster_of(machine("a", gpus=2))
    limit(cluster, Tenant("t", limits={"nodes": WHOLE}))
    place(cluster, ask("x", gpus=1))
    put(cluster, machine("a", gpus=8))
    assert cluster.limits.cells["tenant:t", "nodes"].bound == 500
    end(cluster, "x")
    assert cluster.limits.cells["tenant:t", "nodes"].bound == 0


# Incremental equals rebuilt.


def books(cluster: ClusterState, offered: Iterable[str] = ()) -> dict[str, Any]:
    """Everything that is counted of what somebody offers, in a form that does not depend on the order of arrival."""
    fleet = cluster.fleet
    resources = {name: column for name, column in sorted(fleet.column_of.items()) if name in offered}
    devices = {name: column for name, column in sorted(fleet.device_column_of.items()) if name in offered}
    names = sorted(fleet.row_of)
    rows = [fleet.row_of[name] for name in names]
    lines, held = cluster.running.lines, sorted(cluster.placed.values(), key=lambda one: one.ask.uid)
    return {
        "free": {name: fleet.now.free[column, rows].tolist() for name, column in resources.items()},
        "devices": {
            name: [[part for part in fleet.now.devices[column][row].tolist() if part >= 0] for row in rows]
            for name, column in devices.items()
        },
        "whole": {name: fleet.now.whole[column, rows].tolist() for name, column in devices.items()},
        "widest": {name: fleet.now.widest[column, rows].tolist() for name, column in devices.items()},
        "placed": fleet.now.placed[rows].tolist(),
        "exclusive": fleet.now.exclusive[rows].tolist(),
        "open": fleet.now.open[rows].tolist(),
        "running": [
            (
                one.ask.uid,
                [fleet.names[row] for row in lines.row[one.lines]],
                lines.ends_at[one.lines].tolist(),
                lines.priority[one.lines].tolist(),
                {name: lines.amounts[column, one.lines].tolist() for name, column in resources.items()},
            )
            for one in held
        ],
        "lines": int(np.count_nonzero(lines.row >= 0)),
        "on_row": {fleet.names[row]: sorted(uids) for row, uids in cluster.running.on_row.items() if uids},
        "used": {
            tenant: {name: amount for name, amount in sorted(used.items()) if amount}
            for tenant, used in sorted(cluster.used.items())
            if any(used.values())
        },
        "capacity": {name: amount for name, amount in sorted(cluster.capacity.items()) if amount},
        "match_keys": {
            match_key: {fleet.names[row]: count for row, count in at.items()}
            for match_key, at in cluster.topology_counts.rows.items()
        },
        "shunning": {
            key: {fleet.names[row]: count for row, count in at.items()}
            for key, at in cluster.topology_counts.shunning.items()
        },
        # Of nodes it keeps what it was counted for when it was placed, whatever its node offers by now.
        "bound": {row: cell.bound for row, cell in cluster.limits.cells.items() if row[1] != "nodes"},
        "gangs": {key: (sorted(gang.waiting), sorted(gang.placed)) for key, gang in sorted(cluster.gangs.items())},
        "waiting": sorted(cluster.waiting),
        "groups": sorted(sorted(group.members) for group in cluster.groups.values()),
    }


def topology_counts(cluster: ClusterState, those: Iterable[Ask]) -> list[dict[str, int]]:
    """Every count that these would ask for, by the name of the domain."""
    found = []
    for one in those:
        where = one.shape.where
        crowds = [(each.topology_key, crowd_of(each, one)) for each in (*where.near, *where.apart)]
        for key, crowd in crowds:
            counts = cluster.topology_counts.counts(key, crowd)
            assert cluster.topology_counts.of(key, crowd).total == counts.sum()
            found.append(
                {name: int(counts[code]) for name, code in cluster.fleet.label(key).code_of.items() if counts[code]}
            )
    return found


@dataclass
class History:
    """A cluster state with random changes, and the data needed to build the same state from nothing."""

    wanted: list[Ask]
    here: dict[str, Machine]
    data: st.DataObject
    cluster: ClusterState
    gone: set[str] = field(default_factory=set)

    def lose(self, uid: str) -> None:
        self.cluster.forget(uid)
        self.gone.add(uid)

    def decide(self, now: float) -> None:
        """Some of what was planned is not committed."""
        for binding in cycle(self.cluster, now).bindings:
            if self.data.draw(st.booleans(), label="refused"):
                for one, _ in binding.members:
                    if one.uid in self.cluster.placed:
                        self.cluster.unassume(one)

    def happen(self) -> None:
        draw, cluster = self.data.draw, self.cluster
        match draw(st.sampled_from(["end", "stop", "node", "lose", "nothing"])):
            case "end":
                self.lose(draw(st.sampled_from([one.uid for one in self.wanted])))
            case "stop" if cluster.placed:
                cluster.wait(cluster.placed[draw(st.sampled_from(sorted(cluster.placed)))].ask)
            case "node":
                changed: Machine = draw(st.sampled_from(draw(machines())))
                self.here[changed.name] = changed
                put(cluster, changed)
            case "lose" if self.here:
                name = draw(st.sampled_from(sorted(self.here)))
                # What ran on several nodes has lost a part: here it is gone altogether.
                for uid in sorted(cluster.running.on_row.get(cluster.fleet.row_of[name], ())):
                    self.lose(uid)
                cluster.remove_node(name)
                del self.here[name]

    def rebuilt(self) -> ClusterState:
        fresh = cluster_of(*(self.here[name] for name in sorted(self.here)))
        some_limits(fresh)
        for one in self.wanted:
            if one.uid in self.cluster.placed:
                kept = self.cluster.placed[one.uid]
                spots = [self._moved(spot, fresh) for spot in kept.spots]
                fresh.place(one, spots, since=kept.since, ends_at=kept.ends_at, ending=kept.ending)
            elif one.uid not in self.gone or one.uid in self.cluster.waiting:
                fresh.wait(one)
        return fresh

    def _moved(self, spot: Spot, fresh: ClusterState) -> Spot:
        """The same spot where rows and devices have other numbers."""
        names = {column: name for name, column in self.cluster.fleet.device_column_of.items()}
        columns = fresh.fleet.device_column_of
        devices = tuple((columns[names[which]], used) for which, used in spot.devices if names[which] in columns)
        return Spot(fresh.fleet.row_of[self.cluster.fleet.names[spot.row]], devices)


@settings(max_examples=60)
@given(st.data())
def test_after_any_history_everything_counted_equals_what_a_fresh_cluster_state_counts(data: st.DataObject) -> None:
    those, wanted = data.draw(machines()), data.draw(asks(12))
    history = History(wanted, {one.name: one for one in those}, data, cluster_of(*those))
    some_limits(history.cluster)
    submit(history.cluster, *wanted)
    for step in range(data.draw(st.integers(1, 6))):
        history.decide(NOW + 400.0 * step)
        topology_counts(history.cluster, wanted)
        history.happen()
    fresh = history.rebuilt()
    offered = {name for one in history.here.values() for name in one.offers}
    assert books(history.cluster, offered) == books(fresh, offered)
    assert topology_counts(history.cluster, wanted) == topology_counts(fresh, wanted)


@settings(max_examples=40)
@given(st.data())
def test_undoing_a_plan_leaves_nothing_of_it(data: st.DataObject) -> None:
    those = data.draw(machines())
    wanted = data.draw(asks(10))
    cluster = cluster_of(*those)
    some_limits(cluster)
    for one in wanted:
        cluster.wait(one)
    offered = {name for one in those for name in one.offers}
    before = books(cluster, offered)
    plan = cycle(cluster, preemption=False)
    for binding in plan.bindings:
        for one, _ in binding.members:
            cluster.unassume(one)
    assert books(cluster, offered) == before
    for one in wanted:
        cluster.forget(one.uid)
    assert books(cluster, offered) == {**books(cluster_of(*those), offered), "bound": before["bound"]}
    assert not cluster.waiting
    assert not cluster.memory.blocked


def test_the_log_of_changes_is_forgotten_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.scheduling.state.node_scores.LOG_MAX", 10)
    cluster = cluster_of(machine("a", cpu=100))
    for number in range(30):
        assert place(cluster, ask(f"x{number}", cpu=1, memory=0), ask(f"y{number}", cpu=0.5)) == {
            f"x{number}": ("a",),
            f"y{number}": ("a",),
        }
    assert len(cluster.fleet.now.touched) < 20
    assert np.isclose(cluster.fleet.now.free[cluster.fleet.column_of["cpu"], 0], 100 * WHOLE - 45 * WHOLE)


def test_a_gang_s_name_means_another_gang_in_another_namespace() -> None:
    cluster = cluster_of(machine("a", gpus=4, cpu=1))
    submit(cluster, ask("x", gpus=1, gang=Gang("g", 2)), ask("y", gpus=1, gang=Gang("g", 2), namespace="m"))
    plan = cycle(cluster)
    assert not plan.bindings
    assert why(cluster, plan, "x").why is ReasonCode.GANG_INCOMPLETE
    assert cluster.placed == {}


def test_who_wants_to_be_apart_leaves_no_trace_when_it_goes() -> None:
    cluster = cluster_of(machine("a", cpu=4))
    run(cluster, ask("x", cpu=1, where=apart(HOST, app="web")), "a", ends_in=NEVER)
    assert place(cluster, ask("y", cpu=1, labels={"app": "web"})) == {}
    end(cluster, "x")
    assert bound(cluster, cycle(cluster)) == {"y": ("a",)}


def test_one_that_was_nominated_for_a_while_is_placed_once() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    for name in ("x", "y", "z"):
        cluster.wait(ask(name, gpus=1), Nomination(("a",), until=0.0) if name == "x" else None)
    plan = cycle(cluster)
    assert sorted(bound(cluster, plan)) == ["x", "y", "z"]
    assert not cluster.waiting


def test_large_gangs_without_capacity_are_looked_at_in_several_plans() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    for gang in range(6):
        for number in range(10):
            submit(cluster, ask(f"g{gang}-{number}", gpus=1, gang=Gang(f"g{gang}", 10)))
    plans = [cycle(cluster, blocked_max=15) for _ in range(4)]
    assert [(plan.tried, plan.more) for plan in plans[:2]] == [(2, True), (2, True)]
    assert not plans[-1].more


def test_work_that_waits_for_pod_affinity_does_not_keep_others_from_being_tried() -> None:
    cluster = cluster_of(machine("a", gpus=8))
    for number in range(12):
        lonely = near(HOST, app=f"nobody-{number}")
        submit(cluster, ask(f"lonely-{number}", gpus=1, at=NOW - 3600.0, job=f"job-{number}", where=lonely))
    submit(cluster, ask("plain", gpus=1))
    for _ in range(4):
        cycle(cluster, blocked_max=5)
    assert list(cluster.placed) == ["plain"]
    plans = [cycle(cluster, blocked_max=5) for _ in range(4)]
    assert not plans[-1].more, "when nothing moves, nobody is tried for ever"
