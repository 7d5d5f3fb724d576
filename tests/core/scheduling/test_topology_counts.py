"""Topology counts: tallies count exactly the allocations that their selectors match, through any changes, in little
memory."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.topology_counts import (
    TALLIES_MAX,
    CountedGroup,
    MatchKey,
    TopologyCounts,
    match_key_of,
)
from bursar.core.values.selector import Op, Selector, SelectorTerm, matches
from support.scheduling.cluster_states import ZONE, ask, cluster_of, machine

ZONES = ("z0", "z1", "z2")
VALUES = ("a", "b", "c")

keys = st.sampled_from("xy")
values = st.sets(st.sampled_from(VALUES), min_size=1).map(lambda some: tuple(sorted(some)))
terms = st.one_of(
    st.builds(SelectorTerm, keys, st.sampled_from([Op.IN, Op.NOT_IN]), values),
    st.builds(SelectorTerm, keys, st.sampled_from([Op.EXISTS, Op.ABSENT])),
)
crowds = st.tuples(
    st.builds(lambda some: Selector(tuple(some)), st.lists(terms, max_size=2)),
    st.sampled_from([("n",), ("m",), ("n", "m")]),
    st.sampled_from("tu"),
)
who = st.builds(
    lambda labels, namespace, tenant: ask("one", cpu=1, labels=labels, namespace=namespace, tenant=tenant),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from(VALUES)),
    st.sampled_from("nm"),
    st.sampled_from("tu"),
)


@given(st.data())
def test_everybody_who_is_picked_is_counted_and_nobody_else(data: st.DataObject) -> None:
    cluster = cluster_of(*(machine(f"n{row}", cpu=64, zone=ZONES[row % 3]) for row in range(5)))
    topology_counts, there = TopologyCounts(cluster.fleet), Counter[tuple[MatchKey, int]]()
    by_key: dict[MatchKey, Ask] = {}
    asked: list[CountedGroup] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["come", "come", "leave", "ask", "move"])):
            case "come":
                one, row = data.draw(who), data.draw(st.integers(0, 4))
                match_key = match_key_of(one)
                by_key[match_key] = one
                there[match_key, row] += 1
                topology_counts.come(one, match_key, row)
            case "leave" if there:
                match_key, row = data.draw(st.sampled_from(sorted(there, key=repr)))
                there[match_key, row] -= 1
                there += Counter()
                topology_counts.come(by_key[match_key], match_key, row, -1)
            case "ask":
                asked.append(data.draw(crowds))
            case "move":
                row, zone = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(ZONES))
                cluster.put_node(f"n{row}", {"cpu": 64_000}, labels={ZONE: zone})
        column = cluster.fleet.label(ZONE)
        for selector, namespaces, tenant in asked:
            counts = topology_counts.counts(ZONE, (selector, namespaces, tenant)).tolist()
            expected = [0] * len(counts)
            for ((space, labels, whose), row), count in there.items():
                if space in namespaces and whose == tenant and matches(selector, dict(labels)):
                    expected[column.codes[row]] += count
            assert counts == expected


def test_those_who_came_and_went_are_not_remembered_by_every_tally() -> None:
    cluster = cluster_of(machine("a", cpu=64, zone="z0"))
    topology_counts, everybody = TopologyCounts(cluster.fleet), ask("one", cpu=1)
    for number in range(500):
        crowd = (Selector((SelectorTerm("app", Op.IN, (f"app{number}",)),)), ("n",), "t")
        topology_counts.of(ZONE, crowd)
    for number in range(TALLIES_MAX + 500):
        one = replace(everybody, labels={"app": f"app{number}"})
        topology_counts.come(one, match_key_of(one), 0)
        topology_counts.come(one, match_key_of(one), 0, -1)
    assert sum(len(topology_count._askers) for topology_count in topology_counts._topology_counts.values()) == 0
    assert len(topology_counts._tallies_of) <= TALLIES_MAX
