"""What work of a tenant may ask for, by tables and properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.nodes.node import NodeGate
from bursar.core.nodes.node_affinity import is_reserved, tolerates, untolerated
from bursar.core.objects.ask import Effect, Shape, Taint, Toleration, Where
from bursar.core.objects.charge import Charge, Facts
from bursar.core.quota.permit import (
    Asking,
    Permit,
    beyond,
    is_granted,
    kept_out,
    may_name,
    missing_classes,
    permit_of,
    permitted,
    priority_in_force,
    together,
    too_small,
)
from bursar.core.quota.tenant_tree import (
    Namespace,
    PermitPolicy,
    PriorityClass,
    ResourceQuota,
    ScopeTerm,
    Tenant,
    Tier,
    Tree,
    matches,
    rows_of,
    with_class,
    with_system,
    with_tenant,
    without_class,
)
from bursar.core.values.refusal import Code

CLASSES = {
    "critical": PriorityClass("critical", 1_000_000, admin_only=True),
    "high": PriorityClass("high", 1000),
    "higher": PriorityClass("higher", 1001),
    "granted": PriorityClass("granted", 5000, allowed_tenants=frozenset({"acme"})),
    "theirs": PriorityClass("theirs", 1, allowed_tenants=frozenset({"rival"})),
}
TREE = Tree(
    tenants={
        "acme": Tenant("acme", tolerations=(Toleration("tenant", value="acme"),)),
        "child": Tenant("child", "acme", tolerations=(Toleration("bursar.io/lab", exists=True, effect="NoSchedule"),)),
        "gold": Tenant("gold", "acme", tier="gold"),
        "own": Tenant("own", "gold", tier="gold", user_priority_max=7),
        "below": Tenant("below", "own"),
        "rival": Tenant("rival"),
    },
    tiers={"gold": Tier("gold", user_priority_max=2000)},
    classes=CLASSES,
)


@pytest.mark.parametrize(
    ("tenant", "most"),
    [
        pytest.param("rival", 1000, id="nobody says anything: the system's"),
        pytest.param("gold", 2000, id="its tier's"),
        pytest.param("own", 7, id="its own comes before its tier's"),
        pytest.param("below", 7, id="its parent's"),
        pytest.param("nobody", 1000, id="a tenant that is not there"),
    ],
)
def test_the_nearest_that_is_said_is_the_highest_priority(tenant: str, most: int) -> None:
    assert permit_of(TREE, tenant).priority_max == most


@pytest.mark.parametrize(
    ("tenant", "named", "may"),
    [
        ("rival", "high", True),
        ("rival", "higher", False),
        ("gold", "higher", True),
        ("rival", "critical", False),
        ("gold", "critical", False),
        ("acme", "granted", True),
        ("child", "granted", True),
        ("own", "granted", True),
        ("rival", "granted", False),
        ("acme", "theirs", False),
    ],
)
def test_who_may_name_a_class(tenant: str, named: str, may: bool) -> None:
    assert may_name(permit_of(TREE, tenant), CLASSES[named]) is may
    refusal = beyond(TREE, tenant, Asking(classes=(("spec.priorityClass", named),)))
    assert (refusal is None) is may
    if refusal is not None:
        assert refusal.code is Code.FORBIDDEN
        assert refusal.causes[0].field == "spec.priorityClass"


def test_a_number_above_what_is_allowed_is_refused_with_both_numbers() -> None:
    refusal = beyond(TREE, "rival", Asking(priorities=(("spec.priority", 1001),)))
    assert refusal is not None
    assert (refusal.causes[0].limit, refusal.causes[0].requested_delta) == ("1000", "1001")
    assert beyond(TREE, "rival", Asking(priorities=(("spec.priority", 1000),))) is None
    assert beyond(TREE, "rival", Asking(priorities=(("spec.priority", -5),))) is None


def test_classes_that_are_not_there_are_named() -> None:
    asking = Asking(classes=(("spec.priorityClass", "none"), ("spec.template.spec.priorityClass", "high")))
    assert missing_classes(TREE, asking) == [("spec.priorityClass", "none")]


@pytest.mark.parametrize(("amount", "fine"), [(99, False), (100, True), (999, True), (1, False)])
def test_parts_of_a_device_have_a_least_size(amount: int, fine: bool) -> None:
    asking = Asking(fractions=(("spec.resources.requests[g]", "g", amount),))
    refusal = too_small(TREE, asking)
    assert (refusal is None) is fine
    assert refusal is None or refusal.code is Code.INVALID


def test_what_several_ask_for_is_asked_once() -> None:
    one, other = Asking(priorities=(("a", 1),)), Asking(priorities=(("a", 1), ("b", 2)), classes=(("c", "high"),))
    assert together([one, one]) is one
    assert together([one, other]) == Asking(priorities=(("a", 1), ("b", 2)), classes=(("c", "high"),))


# In force.


NUMBERS = st.none() | st.integers(-2000, 10**9)


@given(NUMBERS, st.sampled_from([None, *CLASSES.values()]), st.sampled_from(sorted(TREE.tenants)))
def test_nothing_counts_with_more_than_it_may_ask_for(number: int | None, one: PriorityClass | None, name: str) -> None:
    permit = permit_of(TREE, name)
    force = priority_in_force(permit, number, one, 0)
    granted = one is not None and one.allowed_tenants and may_name(permit, one)
    assert force <= permit.priority_max or granted or (number is None and one is None)
    asked = number if number is not None else one.value if one is not None else 0
    asking = Asking(
        (("p", number),) if number is not None else (), (("c", one.name),) if one is not None and number is None else ()
    )
    if beyond(TREE, name, asking) is None:
        assert force == asked


# Taints.


@pytest.mark.parametrize(
    ("key", "reserved"),
    [
        ("tenant", True),
        ("tenant.acme", True),
        ("tenants", False),
        ("bursar.io/lab", True),
        ("bursar.io", False),
        ("bursar.io/simulated", False),
        ("nvidia.com/gpu", False),
        ("dedicated", False),
    ],
)
def test_which_keys_are_reserved(key: str, reserved: bool) -> None:
    assert is_reserved(PermitPolicy().reserved, key) is reserved


def test_a_toleration_without_a_key_never_tolerates_a_reserved_taint() -> None:
    every = (Toleration(exists=True),)
    assert tolerates(every, Taint("dedicated", "x"), PermitPolicy().reserved)
    assert not tolerates(every, Taint("tenant", "acme"), PermitPolicy().reserved)


@pytest.mark.parametrize(
    ("tenant", "asked", "granted"),
    [
        ("acme", Toleration("tenant", value="acme"), True),
        ("child", Toleration("tenant", value="acme"), True),
        ("acme", Toleration("tenant", value="rival"), False),
        ("acme", Toleration("tenant", exists=True), False),
        ("rival", Toleration("tenant", value="acme"), False),
        ("rival", Toleration("dedicated", exists=True), True),
        ("rival", Toleration(exists=True), True),
        ("child", Toleration("bursar.io/lab", value="x", effect="NoSchedule"), True),
        ("child", Toleration("bursar.io/lab", exists=True), False),
        ("acme", Toleration("bursar.io/lab", exists=True, effect="NoSchedule"), False),
    ],
)
def test_reserved_taints_are_tolerated_where_it_was_granted(tenant: str, asked: Toleration, granted: bool) -> None:
    permit = permit_of(TREE, tenant)
    assert is_granted(permit, asked) is granted
    assert (beyond(TREE, tenant, Asking(tolerations=(("t", asked),))) is None) is granted
    shape = permitted(Shape((), where=Where(tolerations=(asked,))), permit, False)
    assert (asked in shape.where.tolerations) is granted
    assert asked in permitted(Shape((), where=Where(tolerations=(asked,))), permit, True).where.tolerations


TAINTS = st.builds(
    Taint, st.sampled_from(["tenant", "tenant.x", "dedicated"]), st.sampled_from(["acme", "rival", ""]),
    st.sampled_from([Effect.NO_SCHEDULE, Effect.NO_EXECUTE]),
)  # fmt: skip
TOLERATIONS = st.builds(
    Toleration, st.sampled_from(["", "tenant", "tenant.x", "dedicated"]), st.booleans(),
    st.sampled_from(["acme", "rival", ""]), st.sampled_from(["", "NoSchedule"]),
)  # fmt: skip


@given(TAINTS, st.lists(TOLERATIONS, max_size=4), st.sampled_from(sorted(TREE.tenants)))
def test_scheduler_and_bind_agree_and_only_grants_open_reserved_taints(
    taint: Taint, asked: list[Toleration], name: str
) -> None:
    permit, gate = permit_of(TREE, name), NodeGate(((taint.key, taint.value, taint.effect),))
    where = permitted(Shape((), where=Where(tolerations=tuple(asked))), permit, False).where
    placed = not untolerated(where.tolerations, [taint], where.reserved)
    bound = kept_out("n", gate, permit, asked, exempt=False, fractional=False) is None
    assert placed is bound
    if bound and is_reserved(permit.reserved, taint.key):
        assert tolerates(permit.tolerations, taint)


# Nodes that are kept for tenants.


@pytest.mark.parametrize(
    ("tenant", "gate", "fractional", "fine"),
    [
        ("acme", None, True, True),
        ("acme", NodeGate(tenants=("acme",)), False, True),
        ("child", NodeGate(tenants=("acme",)), False, True),
        ("acme", NodeGate(tenants=("child",)), False, False),
        ("rival", NodeGate(tenants=("acme", "child")), False, False),
        ("rival", NodeGate(whole_only=True), True, False),
        ("rival", NodeGate(whole_only=True), False, True),
        ("rival", NodeGate(whole_only=False), True, True),
    ],
)
def test_whom_a_node_takes(tenant: str, gate: NodeGate | None, fractional: bool, fine: bool) -> None:
    refusal = kept_out("n", gate, permit_of(TREE, tenant), (), exempt=True, fractional=fractional)
    assert (refusal is None) is fine
    assert refusal is None or "acme" not in refusal.message


@pytest.mark.parametrize(
    ("gate", "fractional", "fine"),
    [
        (None, True, False),
        (None, False, True),
        (NodeGate(isolated=True), True, False),
        (NodeGate(whole_only=True), True, False),
        (NodeGate(whole_only=False), True, True),
    ],
)
def test_nodes_that_do_not_say_take_no_parts_where_the_system_refuses_them(
    gate: NodeGate | None, fractional: bool, fine: bool
) -> None:
    permit = permit_of(with_system(TREE, {}, permits=PermitPolicy(whole_only=True)), "rival")
    assert (kept_out("n", gate, permit, (), exempt=True, fractional=fractional) is None) is fine


def test_a_permit_is_of_the_tree_it_was_read_in() -> None:
    assert permit_of(TREE, "rival") == Permit(("rival",), 1000, (), PermitPolicy().reserved)
    changed = with_tenant(TREE, Tenant("rival", user_priority_max=3))
    assert permit_of(changed, "rival").priority_max == 3
    assert permit_of(TREE, "rival").priority_max == 1000


# Scopes of quotas.


def quota(operator: str, *values: str) -> ResourceQuota:
    return ResourceQuota("n", "q", {"allocations": 0}, terms=(ScopeTerm("PriorityClass", operator, frozenset(values)),))


@pytest.mark.parametrize(
    ("operator", "values", "name", "number", "counted"),
    [
        ("In", ["critical"], "critical", None, True),
        ("In", ["critical"], "", 1_000_000, True),
        ("In", ["critical"], "", 10**9, True),
        ("In", ["critical"], "", 999_999, False),
        ("In", ["critical", "high"], "", 1000, True),
        ("In", ["gone"], "", 10**9, False),
        ("In", ["high"], "", None, False),
        ("NotIn", ["high"], "high", None, False),
        ("NotIn", ["high"], "high", 1000, False),
        ("NotIn", ["high"], "high", 1001, True),
        ("NotIn", ["high"], "", 5, True),
        ("Exists", [], "", 5, True),
        ("Exists", [], "", None, False),
        ("DoesNotExist", [], "", 5, True),
    ],
)
def test_a_number_counts_in_the_scopes_of_the_classes_that_it_reaches(
    operator: str, values: list[str], name: str, number: int | None, counted: bool
) -> None:
    facts = Facts(scoped=True, priority_class=name, priority=number)
    assert matches(quota(operator, *values), facts, CLASSES) is counted


def test_another_value_of_a_class_is_another_tree() -> None:
    tree = Tree(
        tenants={"acme": Tenant("acme")}, namespaces={"n": Namespace("n", "acme")}, classes=CLASSES,
        quotas={"n": (quota("In", "high"),)},
    )  # fmt: skip
    charge = Charge(Facts(scoped=True, priority=900), {"allocations": 1000})
    scope = ("quota:n/q", "allocations")
    assert scope not in rows_of(tree, "n", charge)
    assert scope in rows_of(with_class(tree, PriorityClass("high", 900)), "n", charge)
    assert scope not in rows_of(without_class(tree, "high"), "n", charge)
