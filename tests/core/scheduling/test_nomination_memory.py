"""Nominations are kept from cycle to cycle, and equal those that a fresh computation gives."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.scheduling.cycle.plan import Plan
from bursar.core.scheduling.state.cluster_state import ClusterState
from support.scheduling.cluster_states import (
    NOW,
    ask,
    bound,
    cluster_of,
    cycle,
    end,
    evicted,
    machine,
    members,
    put,
    run,
    submit,
)

Step = tuple[str, Any]
NODES = "abcd"


def steps() -> st.SearchStrategy[list[Step]]:
    return st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.tuples(st.integers(1, 3), st.integers(0, 3), st.sampled_from([0, 20]))),
            st.tuples(st.just("gang"), st.tuples(st.integers(1, 3), st.integers(1, 3))),
            st.tuples(st.just("end"), st.integers(0, 20)),
            st.tuples(st.just("withdraw"), st.integers(0, 20)),
            st.tuples(st.just("wait"), st.sampled_from([1, 10, 31, 65])),
            st.tuples(st.just("cordon"), st.tuples(st.sampled_from(NODES), st.booleans())),
            st.tuples(st.just("grow"), st.tuples(st.sampled_from(NODES), st.integers(2, 4))),
            st.tuples(st.just("add"), st.integers(0, 9)),
        ),
        min_size=3,
        max_size=25,
    )


def build() -> ClusterState:
    cluster = cluster_of(*(machine(name, gpus=2) for name in NODES))
    for name in NODES:
        run(cluster, ask(f"{name}0", gpus=1), name)
        run(cluster, ask(f"{name}1", gpus=1, priority=1), name)
    return cluster


def take(cluster: ClusterState, number: int, step: Step, now: float) -> float:
    match step:
        case "submit", (gpus, priority, ttl):
            submit(cluster, ask(f"s{number}", gpus=gpus, priority=priority, ttl=ttl, at=now))
        case "gang", (count, priority):
            submit(cluster, *members(f"g{number}", count, priority=priority, gpus=2, at=now))
        case "end", which:
            placed = sorted(cluster.placed)
            end(cluster, *placed[which : which + 1])
        case "withdraw", which:
            for uid in sorted(cluster.waiting)[which : which + 1]:
                cluster.forget(uid)
        case "wait", seconds:
            return now + float(seconds)
        case "cordon", (name, cordoned):
            put(cluster, machine(name, gpus=2, cordoned=cordoned))
        case "grow", (name, gpus):
            put(cluster, machine(name, gpus=gpus))
        case "add", which:
            put(cluster, machine(f"new{which}", gpus=1))
    return now


def told(cluster: ClusterState, plan: Plan) -> tuple[Any, ...]:
    return bound(cluster, plan), evicted(plan), plan.reasons, plan.failed, dict(cluster.nominated)


@settings(max_examples=400)
@given(steps())
def test_what_is_kept_between_cycles_decides_as_a_fresh_look_does(history: list[Step]) -> None:
    kept, fresh = build(), build()
    now = NOW
    for number, step in enumerate(history):
        take(kept, number, step, now)
        now = take(fresh, number, step, now)
        fresh.memory.nominations = None
        ours, theirs = (cycle(cluster, now, placements_max=3) for cluster in (kept, fresh))
        assert told(kept, ours) == told(fresh, theirs)


def test_a_promise_that_nothing_happened_to_is_not_worked_out_again() -> None:
    cluster = build()
    submit(cluster, ask("asker", gpus=2, priority=5))
    assert len(evicted(cycle(cluster))) == 2
    cycle(cluster, NOW + 1)
    assert cluster.memory.nominations is not None
    nominated = cluster.memory.nominations.standing["asker"]
    cycle(cluster, NOW + 2)
    assert cluster.memory.nominations.standing["asker"] is nominated
