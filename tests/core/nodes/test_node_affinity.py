"""Labels against requirements, taints against tolerations, and requirements against each other."""

from collections.abc import Iterator, Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.nodes.node_affinity import contradiction, holds, integer, tolerates, untolerated
from bursar.core.objects.ask import Effect, Operator, Requirement, Requirements, Taint, Toleration, Where

GPU = {"gpu-type": "a100", "gpu-memory": "80", "zone": "a"}


def is_wanted(where: Where, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels has what the nodeSelector names, and what one of the terms requires."""
    terms = [bool(term) and all(holds(one, labels) for one in term) for term in where.required]
    return all(labels.get(key) == value for key, value in where.node_labels) and (not terms or any(terms))


def asked(key: str, operator: str, *values: str) -> Requirement:
    return Requirement(key, Operator(operator), values)


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        (asked("gpu-type", "In", "a100", "h100"), True),
        (asked("gpu-type", "In", "h100"), False),
        (asked("rack", "In", "r1"), False),
        (asked("gpu-type", "NotIn", "h100"), True),
        (asked("gpu-type", "NotIn", "a100"), False),
        (asked("rack", "NotIn", "r1"), True),
        (asked("zone", "Exists"), True),
        (asked("rack", "Exists"), False),
        (asked("rack", "DoesNotExist"), True),
        (asked("zone", "DoesNotExist"), False),
        (asked("gpu-memory", "Gte", "80"), True),
        (asked("gpu-memory", "Gt", "80"), False),
        (asked("gpu-memory", "Gt", "9"), True),
        (asked("gpu-memory", "Lt", "100"), True),
        (asked("gpu-memory", "Lt", "80"), False),
        (asked("gpu-memory", "Lte", "80"), True),
        (asked("gpu-memory", "Lte", "79"), False),
        (asked("gpu-memory", "Gt", "-1"), True),
        (asked("zone", "Gt", "0"), False),
        (asked("rack", "Lt", "10"), False),
        (asked("rack", "Gte", "0"), False),
    ],
)
def test_what_holds_for_a_nodes_labels(requirement: Requirement, expected: bool) -> None:
    assert holds(requirement, GPU) is expected


def test_integers_are_plain_digits_that_fit_into_64_bits() -> None:
    assert [integer(text) for text in ("80", "-3", "007", "9" * 18)] == [80, -3, 7, 10**18 - 1]
    for text in ("", "-", "--1", "+1", "8.0", "8Gi", " 8", "٣", "9" * 19, "a"):
        assert integer(text) is None, text


def test_the_node_selector_must_hold_beside_the_terms() -> None:
    where = Where(node_labels=(("gpu-type", "a100"),), required=((asked("zone", "In", "a"),),))
    assert is_wanted(where, GPU)
    assert not is_wanted(where, {**GPU, "gpu-type": "h100"})
    assert not is_wanted(where, {**GPU, "zone": "b"})
    assert not is_wanted(where, {"zone": "a"})


# Taints.


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        (Toleration("gpu-only", exists=True), True),
        (Toleration("gpu-only", value="yes"), True),
        (Toleration("gpu-only", value="no"), False),
        (Toleration("gpu-only"), False),
        (Toleration("other", exists=True), False),
        (Toleration(exists=True), True),
        (Toleration("gpu-only", exists=True, effect="NoSchedule"), True),
        (Toleration("gpu-only", exists=True, effect="NoExecute"), False),
        (Toleration(exists=True, effect="NoExecute"), False),
    ],
)
def test_what_tolerates_a_taint(toleration: Toleration, expected: bool) -> None:
    assert tolerates((toleration,), Taint("gpu-only", "yes")) is expected


def test_taints_that_only_prefer_keep_nothing_off() -> None:
    hard, run = Taint("hard"), Taint("run", effect=Effect.NO_EXECUTE)
    taints = (hard, Taint("rather-not", effect=Effect.PREFER_NO_SCHEDULE), run)
    assert untolerated((), taints) == (hard, run)
    assert untolerated((Toleration("hard", exists=True),), taints) == (run,)
    assert untolerated((Toleration(exists=True),), taints) == ()


# Contradictions.


@pytest.mark.parametrize(
    "term",
    [
        (asked("zone", "In", "a"), asked("zone", "In", "b", "c")),
        (asked("zone", "Exists"), asked("zone", "DoesNotExist")),
        (asked("zone", "In", "a"), asked("zone", "DoesNotExist")),
        (asked("zone", "Gt", "1"), asked("zone", "DoesNotExist")),
        (asked("zone", "In", "a", "b"), asked("zone", "NotIn", "b", "a", "c")),
        (asked("memory", "Gt", "80"), asked("memory", "Lt", "81")),
        (asked("memory", "Gte", "81"), asked("memory", "Lte", "80")),
        (asked("memory", "In", "40", "64"), asked("memory", "Gte", "80")),
        (asked("memory", "In", "large"), asked("memory", "Gte", "0")),
        (),
    ],
)
def test_what_can_never_hold_together(term: Requirements) -> None:
    assert contradiction(Where(required=(term,)))


@pytest.mark.parametrize(
    "term",
    [
        (asked("zone", "In", "a", "b"), asked("zone", "In", "b", "c")),
        (asked("zone", "NotIn", "a"), asked("zone", "DoesNotExist")),
        (asked("zone", "In", "a"), asked("rack", "DoesNotExist")),
        (asked("memory", "Gt", "79"), asked("memory", "Lt", "81")),
        (asked("memory", "Gt", "79"), asked("memory", "Lt", "81"), asked("memory", "NotIn", "80")),
        (asked("memory", "In", "40", "80"), asked("memory", "Gte", "80")),
        (asked("memory", "Exists"), asked("memory", "NotIn", "80")),
    ],
)
def test_what_some_node_could_meet(term: Requirements) -> None:
    assert contradiction(Where(required=(term,))) == ""


def test_all_terms_must_contradict_before_it_is_one() -> None:
    zone = (("zone", "a"),)
    impossible, possible = (asked("zone", "In", "b"),), (asked("zone", "Exists"),)
    assert contradiction(Where(node_labels=zone, required=(impossible, possible))) == ""
    assert contradiction(Where(node_labels=zone)) == ""
    assert contradiction(Where(node_labels=zone, required=(impossible,))) == (
        "no label zone can be all of: nodeSelector a, In (b)"
    )
    both = contradiction(Where(node_labels=zone, required=(impossible, ())))
    assert both == "none of the 2 terms can ever hold; the first: no label zone can be all of: nodeSelector a, In (b)"


def test_a_contradiction_is_told_in_a_bounded_sentence() -> None:
    many = tuple("v" * 200 + str(index) for index in range(1000))
    told = contradiction(Where(required=((asked("zone", "In", *many), asked("zone", "In", "b")),)))
    assert "and 996 more" in told
    assert len(told) < 500


KEYS = ("k", "l")
# More than requirements can name: a node may have any label, and write a number in more ways than one.
VALUES = ("x", "y", "z", "1", "2", "3", "4", "01", "02", "03", "04", "5", "-1", "0")


def universe() -> Iterator[Mapping[str, str]]:
    for chosen in product((None, *VALUES), repeat=len(KEYS)):
        yield {key: value for key, value in zip(KEYS, chosen, strict=True) if value is not None}


_words = st.sampled_from(("x", "y", "1", "2", "3"))
_sets = st.builds(
    Requirement,
    st.sampled_from(KEYS),
    st.sampled_from((Operator.IN, Operator.NOT_IN)),
    st.lists(_words, min_size=1, max_size=3, unique=True).map(tuple),
)
_presence = st.builds(Requirement, st.sampled_from(KEYS), st.sampled_from((Operator.EXISTS, Operator.ABSENT)))
_comparisons = st.builds(
    Requirement,
    st.sampled_from(KEYS),
    st.sampled_from((Operator.ABOVE, Operator.BELOW, Operator.AT_LEAST, Operator.AT_MOST)),
    st.sampled_from(("0", "1", "2", "3", "4")).map(lambda value: (value,)),
)
_terms = st.lists(st.one_of(_sets, _presence, _comparisons), max_size=4).map(tuple)
_wheres = st.builds(
    Where,
    node_labels=st.dictionaries(st.sampled_from(KEYS), _words, max_size=2).map(lambda one: tuple(sorted(one.items()))),
    required=st.lists(_terms, max_size=3).map(tuple),
)


@given(_wheres)
def test_a_contradiction_is_exactly_what_no_label_set_satisfies(where: Where) -> None:
    assert bool(contradiction(where)) is not any(is_wanted(where, labels) for labels in universe())
