"""Who is where: tallies count exactly whom their selectors pick, whoever comes and goes, and remember little."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.topology_counts import TALLIES_MAX, Crowd, Kin, Tallies, kin_of
from bursar.core.values.selector import Op, Selector, Term, matches
from support.scheduling.cluster_states import ZONE, ask, machine, world_of

ZONES = ("z0", "z1", "z2")
VALUES = ("a", "b", "c")

keys = st.sampled_from("xy")
values = st.sets(st.sampled_from(VALUES), min_size=1).map(lambda some: tuple(sorted(some)))
terms = st.one_of(
    st.builds(Term, keys, st.sampled_from([Op.IN, Op.NOT_IN]), values),
    st.builds(Term, keys, st.sampled_from([Op.EXISTS, Op.ABSENT])),
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
    world = world_of(*(machine(f"n{row}", cpu=64, zone=ZONES[row % 3]) for row in range(5)))
    tallies, there = Tallies(world.fleet), Counter[tuple[Kin, int]]()
    by_kin: dict[Kin, Ask] = {}
    asked: list[Crowd] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["come", "come", "leave", "ask", "move"])):
            case "come":
                one, row = data.draw(who), data.draw(st.integers(0, 4))
                kin = kin_of(one)
                by_kin[kin] = one
                there[kin, row] += 1
                tallies.come(one, kin, row)
            case "leave" if there:
                kin, row = data.draw(st.sampled_from(sorted(there, key=repr)))
                there[kin, row] -= 1
                there += Counter()
                tallies.come(by_kin[kin], kin, row, -1)
            case "ask":
                asked.append(data.draw(crowds))
            case "move":
                row, zone = data.draw(st.integers(0, 4)), data.draw(st.sampled_from(ZONES))
                world.put_node(f"n{row}", {"cpu": 64_000}, labels={ZONE: zone})
        column = world.fleet.label(ZONE)
        for selector, namespaces, tenant in asked:
            counts = tallies.counts(ZONE, (selector, namespaces, tenant)).tolist()
            expected = [0] * len(counts)
            for ((space, labels, whose), row), count in there.items():
                if space in namespaces and whose == tenant and matches(selector, dict(labels)):
                    expected[column.codes[row]] += count
            assert counts == expected


def test_those_who_came_and_went_are_not_remembered_by_every_tally() -> None:
    world = world_of(machine("a", cpu=64, zone="z0"))
    tallies, everybody = Tallies(world.fleet), ask("one", cpu=1)
    for number in range(500):
        crowd = (Selector((Term("app", Op.IN, (f"app{number}",)),)), ("n",), "t")
        tallies.of(ZONE, crowd)
    for number in range(TALLIES_MAX + 500):
        one = replace(everybody, labels={"app": f"app{number}"})
        tallies.come(one, kin_of(one), 0)
        tallies.come(one, kin_of(one), 0, -1)
    assert sum(len(tally._askers) for tally in tallies._tallies.values()) == 0
    assert len(tallies._tallies_of) <= TALLIES_MAX
