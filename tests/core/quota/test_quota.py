"""Quota arithmetic: what is let in, what is refused, and how counters follow the tree."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.core.objects.charge import Charge, Facts, deferred, fallen_due, unbound
from bursar.core.quota.quota import (
    Counter,
    Counters,
    Exceeded,
    Move,
    count_quota,
    deltas,
    needs_recount,
    overrun,
    recount,
    recounted_dimensions,
)
from bursar.core.quota.tenant_tree import (
    Enforcement,
    Namespace,
    ResourceQuota,
    Row,
    ScopeTerm,
    Tenant,
    Tier,
    Tree,
    hard_of,
    limits_of,
    lineage,
    rows_of,
    with_quota,
    with_system,
    with_tenant,
    with_tier,
)
from bursar.core.values.quantity import AMOUNT_MAX, UNLIMITED

SCOPED = Facts(scoped=True)


def charge(facts: Facts = SCOPED, /, **accepted: int) -> Charge:
    return Charge(facts, accepted)


def bound(one: Charge) -> Charge:
    return replace(one, bound=one.accepted)


def standing(tree: Tree, charges: Sequence[tuple[str, Charge]]) -> dict[Row, Counter]:
    """All counters of a tree, computed from scratch from everything that is charged."""
    sums = deltas(tree, [Move(namespace, after=one) for namespace, one in charges])
    return {row: Counter(hard_of(tree, row), None, delta.accepted, delta.bound) for row, delta in sums.items()}


def fresh(tree: Tree, *charges: Charge, namespace: str = "n") -> Counters:
    """Counters at zero for everything that these charges touch."""
    rows = {row for one in charges for row in rows_of(tree, namespace, one)}
    return Counters(tree, {row: Counter(hard_of(tree, row)) for row in rows})


LAB = Tree(
    tenants={
        "root": Tenant("root", limits={"gpu": 10}),
        "lab": Tenant("lab", parent="root", limits={"cpu": 4, "gpu": 4}),
    },
    namespaces={"n": Namespace("n", "lab")},
    quotas={"n": (ResourceQuota("n", "q", hard={"cpu": 2, "gpu": 2}),)},
    system={"gpu": 20},
)


# At admission.


def test_the_limit_is_exact() -> None:
    counters = fresh(LAB, charge(gpu=1))
    assert counters.move([Move("n", after=charge(gpu=2))]) == []
    assert counters.move([Move("n", after=charge(gpu=1))]) == [Exceeded("quota:n/q", "gpu", 2, 2, 1)]


def test_every_limit_without_capacity_is_told_nearest_scope_first_then_by_dimension() -> None:
    counters = fresh(LAB, charge(gpu=1, cpu=1))
    assert counters.move([Move("n", after=charge(gpu=25, cpu=5))]) == [
        Exceeded("quota:n/q", "cpu", 2, 0, 5),
        Exceeded("quota:n/q", "gpu", 2, 0, 25),
        Exceeded("tenant:lab", "cpu", 4, 0, 5),
        Exceeded("tenant:lab", "gpu", 4, 0, 25),
        Exceeded("tenant:root", "gpu", 10, 0, 25),
        Exceeded("system", "gpu", 20, 0, 25),
    ]


def test_the_order_of_causes_holds_for_a_gang_of_unlike_members() -> None:
    short = replace(LAB, quotas={"n": (ResourceQuota("n", "s", hard={"gpu": 1}, terms=(TERMINATING,)),)})
    endless, ending = charge(gpu=9), charge(Facts(scoped=True, terminating=True), gpu=9)
    counters = fresh(short, endless, ending)
    told = [(one.scope, one.dimension) for one in counters.move([Move("n", after=endless), Move("n", after=ending)])]
    assert told == [("quota:n/s", "gpu"), ("tenant:lab", "gpu"), ("tenant:root", "gpu")]


def test_the_order_of_causes_holds_for_members_that_ask_for_unlike_things() -> None:
    counters = fresh(LAB, charge(gpu=9), charge(cpu=9))
    faults = counters.move([Move("n", after=charge(gpu=9)), Move("n", after=charge(cpu=9))])
    told = [(one.scope, one.dimension) for one in faults]
    assert told == [("quota:n/q", "cpu"), ("quota:n/q", "gpu"), ("tenant:lab", "cpu"), ("tenant:lab", "gpu")]


TERMINATING = ScopeTerm("Terminating", "Exists")


def test_a_refused_move_leaves_no_trace() -> None:
    counters = fresh(LAB, charge(cpu=1, gpu=1))
    assert counters.move([Move("n", after=charge(cpu=1)), Move("n", after=charge(gpu=9))]) != []
    assert counters.changes() == {}
    assert counters["tenant:lab", "cpu"].accepted == 0


def test_moves_are_charged_together_so_what_is_given_back_makes_capacity() -> None:
    counters = fresh(LAB, charge(gpu=2))
    counters.move([Move("n", after=charge(gpu=2))])
    assert counters.move([Move("n", charge(gpu=2), charge(gpu=1)), Move("n", after=charge(gpu=1))]) == []
    assert counters["quota:n/q", "gpu"].accepted == 2


def test_what_ended_where_it_began_is_not_a_change() -> None:
    counters = fresh(LAB, charge(gpu=1))
    counters.move([Move("n", after=charge(gpu=1))])
    counters.move([Move("n", before=charge(gpu=1))])
    assert counters.changes() == {}


def test_queue_admits_at_submission_and_checks_when_placed() -> None:
    quota = ResourceQuota("n", "q", hard={"gpu": 2}, enforcement=Enforcement.QUEUE)
    tree = with_quota(replace(LAB, tenants={"lab": Tenant("lab")}, system={}), quota)
    counters = fresh(tree, charge(gpu=1))
    two = charge(gpu=2)
    assert counters.move([Move("n", after=two)]) == []
    assert counters.move([Move("n", after=two)]) == []
    assert counters.move([Move("n", two, bound(two))]) == []
    assert counters.move([Move("n", two, bound(two))]) == [Exceeded("quota:n/q", "gpu", 2, 2, 2)]
    assert counters.move([Move("n", bound(two), unbound(two))]) == []
    assert counters.move([Move("n", two, bound(two))]) == []
    assert counters["quota:n/q", "gpu"] == Counter(2, None, 4, 2)


def test_reject_at_submission_still_checks_what_is_bound() -> None:
    """A limit lowered after acceptance refuses the placing."""
    tree = Tree(tenants={"lab": Tenant("lab", limits={"gpu": 1})}, namespaces={"n": Namespace("n", "lab")})
    two = charge(gpu=2)
    counters = Counters(tree, {("tenant:lab", "gpu"): Counter(1, None, 2, 0)})
    assert counters.move([Move("n", two, bound(two))]) == [Exceeded("tenant:lab", "gpu", 1, 0, 2)]


def test_usage_above_a_lowered_limit_may_fall_and_stay_but_not_grow() -> None:
    tree = Tree(tenants={"lab": Tenant("lab", limits={"gpu": 2})}, namespaces={"n": Namespace("n", "lab")})
    counters = Counters(tree, {("tenant:lab", "gpu"): Counter(2, None, 6, 6)})
    three = bound(charge(gpu=3))
    assert counters.move([Move("n", three, three)]) == []
    assert counters.move([Move("n", three, bound(charge(gpu=1)))]) == []
    assert counters["tenant:lab", "gpu"] == Counter(2, None, 4, 4)
    assert counters.move([Move("n", after=charge(gpu=1))]) == [Exceeded("tenant:lab", "gpu", 2, 4, 1)]
    assert counters.move([Move("n", after=charge(gpu=0))]) == []


def test_unlimited_counters_still_cannot_run_over() -> None:
    tree = Tree(tenants={"lab": Tenant("lab")}, namespaces={"n": Namespace("n", "lab")})
    counters = fresh(tree, charge(gpu=1))
    assert counters.move([Move("n", after=charge(gpu=AMOUNT_MAX))]) == []
    assert counters.move([Move("n", after=charge(gpu=2))]) == [Exceeded("tenant:lab", "gpu", UNLIMITED, AMOUNT_MAX, 2)]


def test_a_deferred_charge_counts_nowhere_until_it_falls_due() -> None:
    one = charge(gpu=2)
    assert deltas(LAB, [Move("n", after=deferred(one))]) == {}
    assert fallen_due(deferred(one)) == one
    assert fallen_due(one) is one


def test_a_new_quota_counts_what_its_scopes_match() -> None:
    quota = ResourceQuota("n", "q", {"gpu": 5}, {"cpu": 1}, (TERMINATING,))
    ending = Facts(scoped=True, terminating=True)
    charges = [charge(gpu=1), charge(ending, gpu=2, cpu=3), bound(charge(ending, gpu=4)), charge(Facts(), gpu=8)]
    assert count_quota(quota, charges, {}) == {
        ("quota:n/q", "gpu"): Counter(5, None, 14, 4),
        ("quota:n/q", "cpu"): Counter(UNLIMITED, 1, 3, 0),
    }


# When the tree changes.

DIMENSIONS = ("cpu", "gpu")
NAMES = ("a", "b", "c", "d", "e")
LIMITS = st.dictionaries(st.sampled_from(DIMENSIONS), st.integers(0, 20))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Tenants under earlier ones, tiers, a namespace each, and perhaps limits of the system."""
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    tenants = {
        name: Tenant(
            name,
            parent=draw(st.sampled_from(("", *names[:index]))),
            tier=draw(st.sampled_from(("", "gold"))),
            limits=draw(LIMITS),
        )
        for index, name in enumerate(names)
    }
    tiers = {"gold": Tier("gold", draw(LIMITS))}
    return Tree(tenants, tiers, {name: Namespace(name, name) for name in names}, {}, draw(LIMITS))


@st.composite
def changed(draw: st.DrawFn, tree: Tree) -> Tree:
    """One change of the tree, such as an administrator makes."""
    name = draw(st.sampled_from(sorted(tree.tenants)))
    tenant = tree.tenants[name]
    match draw(st.sampled_from(["parent", "limits", "tier", "tier limits", "system", "both", "new"])):
        case "parent":
            return with_tenant(tree, replace(tenant, parent=draw(_parents(tree, name))))
        case "limits":
            return with_tenant(tree, replace(tenant, limits=draw(LIMITS)))
        case "both":
            return with_tenant(tree, replace(tenant, limits=draw(LIMITS), parent=draw(_parents(tree, name))))
        case "tier":
            return with_tenant(tree, replace(tenant, tier=draw(st.sampled_from(("", "gold")))))
        case "tier limits":
            return with_tier(tree, Tier("gold", draw(LIMITS)))
        case "new":
            return with_tenant(tree, Tenant("new", parent=name, limits=draw(LIMITS)))
    return with_system(tree, draw(LIMITS))


def _parents(tree: Tree, name: str) -> st.SearchStrategy[str]:
    """Wherever a tenant may go without closing a circle."""
    return st.sampled_from(["", *(other for other in sorted(tree.tenants) if name not in lineage(tree, other))])


AMOUNTS = st.fixed_dictionaries({}, optional={name: st.integers(0, 9) for name in DIMENSIONS})


@st.composite
def charged(draw: st.DrawFn, tree: Tree) -> list[tuple[str, Charge]]:
    holdings = draw(st.lists(st.tuples(st.sampled_from(sorted(tree.namespaces)), AMOUNTS, AMOUNTS), max_size=6))
    return [(namespace, Charge(SCOPED, accepted, placed)) for namespace, accepted, placed in holdings]


def usage(rows: Mapping[Row, Counter]) -> dict[Row, tuple[int, int]]:
    return {row: (one.accepted, one.bound) for row, one in rows.items() if (one.accepted, one.bound) != (0, 0)}


def kept(tree: Tree, charges: Sequence[tuple[str, Charge]]) -> dict[Row, Counter]:
    """The rows that stand in the database: what is used, and every limit of a tenant or the system."""
    rows = standing(tree, charges)
    limited = [(f"tenant:{name}", dimension) for name in tree.tenants for dimension in limits_of(tree, name)]
    for row in (*limited, *(("system", dimension) for dimension in tree.system)):
        rows.setdefault(row, Counter(hard_of(tree, row)))
    return rows


@given(st.data())
@settings(max_examples=300)
def test_recounting_is_counting_from_scratch_for_any_tree_and_any_change(data: st.DataObject) -> None:
    old = data.draw(trees())
    charges = data.draw(charged(old))
    new = data.draw(changed(old))
    dimensions = recounted_dimensions(old, new)
    whole_before, whole_after = kept(old, charges), kept(new, charges)
    before = {row: one for row, one in whole_before.items() if row[1] in dimensions}
    after = {row: one for row, one in whole_after.items() if row[1] in dimensions}
    result = recount(old, new, before)
    assert usage(result) == usage(after)
    untouched = {row: pair for row, pair in usage(whole_before).items() if row[1] not in dimensions}
    assert untouched == {row: pair for row, pair in usage(whole_after).items() if row[1] not in dimensions}
    assert after.keys() <= result.keys()
    assert all(counter.hard == hard_of(new, row) for row, counter in result.items())
    if not needs_recount(old, new):
        assert usage(before) == usage(after)


@given(st.data())
@settings(max_examples=200)
def test_only_growing_above_a_standing_limit_is_an_overrun(data: st.DataObject) -> None:
    old = data.draw(trees())
    charges = data.draw(charged(old))
    new = data.draw(changed(old))
    before, after = kept(old, charges), kept(new, charges)
    expected = {
        row
        for row, counter in after.items()
        if hard_of(old, row) != UNLIMITED
        for was in (before.get(row, Counter()),)
        if (counter.accepted > was.accepted and counter.accepted > counter.hard)
        or (counter.bound > was.bound and counter.bound > counter.hard)
    }
    assert {(one.scope, one.dimension) for one in overrun(old, new, before, after)} == expected


def test_a_move_under_a_parent_without_capacity_is_an_overrun_with_its_numbers() -> None:
    old = Tree(
        tenants={"big": Tenant("big", limits={"gpu": 5}), "lab": Tenant("lab"), "own": Tenant("own", parent="big")},
        namespaces={"n": Namespace("n", "lab"), "o": Namespace("o", "own")},
    )
    new = with_tenant(old, Tenant("lab", parent="big"))
    charges = [("n", charge(gpu=4)), ("o", charge(gpu=2))]
    before = kept(old, charges)
    assert overrun(old, new, before, recount(old, new, before)) == [Exceeded("tenant:big", "gpu", 5, 2, 4)]


def test_a_move_that_meets_several_full_ancestors_names_the_nearest_first() -> None:
    old = Tree(
        tenants={
            "a-top": Tenant("a-top", limits={"gpu": 1}),
            "z-near": Tenant("z-near", parent="a-top", limits={"gpu": 1}),
            "lab": Tenant("lab"),
        },
        namespaces={"n": Namespace("n", "lab")},
    )
    new = with_tenant(old, Tenant("lab", parent="z-near"))
    before = kept(old, [("n", charge(gpu=4))])
    faults = overrun(old, new, before, recount(old, new, before))
    assert [one.scope for one in faults] == ["tenant:z-near", "tenant:a-top"]


def test_moving_under_a_queueing_parent_asks_only_about_what_is_bound() -> None:
    old = Tree(
        tenants={"big": Tenant("big", limits={"gpu": 1}, enforcement=Enforcement.QUEUE), "lab": Tenant("lab")},
        namespaces={"n": Namespace("n", "lab")},
    )
    new = with_tenant(old, Tenant("lab", parent="big"))
    waiting, running = kept(old, [("n", charge(gpu=4))]), kept(old, [("n", bound(charge(gpu=4)))])
    assert overrun(old, new, waiting, recount(old, new, waiting)) == []
    assert overrun(old, new, running, recount(old, new, running)) == [Exceeded("tenant:big", "gpu", 1, 0, 4)]


@given(st.data())
@settings(max_examples=200)
def test_taking_and_giving_back_returns_every_counter_to_where_it_was(data: st.DataObject) -> None:
    tree = data.draw(trees())
    namespace = data.draw(st.sampled_from(sorted(tree.namespaces)))
    charges = [Charge(SCOPED, data.draw(AMOUNTS), data.draw(AMOUNTS)) for _ in range(4)]
    counters = fresh(tree, *charges, namespace=namespace)
    taken = [one for one in charges if not counters.move([Move(namespace, after=one)])]
    assert all(counter.accepted <= counter.hard for counter in (counters[row] for row in counters.changes()))
    for one in taken:
        assert counters.move([Move(namespace, before=one)]) == []
    assert counters.changes() == {}
