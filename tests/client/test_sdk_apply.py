"""Apply: the three-way merge as a table, and its flow through races."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.client import Conflict
from bursar.client.apply import apply, last_applied, three_way, with_last_applied
from bursar.core.values.patch import merge
from bursar.core.values.redaction import LAST_APPLIED
from support.client.driving import ALLOCATIONS, answer, drive, sent

NOT_FOUND = answer(404, b'{"message": "not found", "details": {"code": "not_found"}}')
EXISTS = answer(409, b'{"message": "exists", "details": {"code": "already_exists"}}')
WANTED = {"kind": "Allocation", "metadata": {"name": "a"}, "spec": {"priority": 1}}


@pytest.mark.parametrize(
    ("last", "wanted", "current", "patch"),
    [
        pytest.param({}, {"a": 1}, {"a": 1}, {}, id="nothing to do"),
        pytest.param({}, {"a": 2}, {"a": 1}, {"a": 2}, id="a changed value"),
        pytest.param({}, {"a": 1}, {"a": 1, "b": 2}, {}, id="what others set stays"),
        pytest.param({"b": 2}, {"a": 1}, {"a": 1, "b": 2}, {"b": None}, id="what was applied and is no longer, goes"),
        pytest.param({"b": 2}, {"a": 1}, {"a": 1}, {}, id="what is gone already is left so"),
        pytest.param({}, {"a": None}, {"a": 1}, {"a": None}, id="null removes"),
        pytest.param({}, {"a": None}, {}, {}, id="null of what is not there is nothing"),
        pytest.param({}, {"a": [1, 2]}, {"a": [1]}, {"a": [1, 2]}, id="lists are replaced"),
        pytest.param(
            {"s": {"x": 1, "y": 1}},
            {"s": {"x": 2}},
            {"s": {"x": 1, "y": 1, "z": 1}},
            {"s": {"x": 2, "y": None}},
            id="deep",
        ),
        pytest.param({"s": {"x": 1}}, {}, {"s": {"x": 1}}, {"s": None}, id="a whole part goes"),
        pytest.param({}, {"s": {"x": 1}}, {"s": 5}, {"s": {"x": 1}}, id="an object for a value"),
        pytest.param({}, {"a": 1}, {"a": True}, {"a": 1}, id="true is not 1"),
    ],
)
def test_three_way(last: Any, wanted: Any, current: Any, patch: Any) -> None:
    assert three_way(last, wanted, current) == patch


_values = st.recursive(
    st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
_documents = st.dictionaries(st.sampled_from("abc"), _values, max_size=3)


@given(_documents, _documents, _documents)
def test_after_the_patch_the_object_is_as_wanted(last: Any, wanted: Any, current: Any) -> None:
    result: Any = merge(current, three_way(last, wanted, current))
    assert three_way({}, wanted, result) == {}
    assert three_way(last, wanted, result) == {}


@given(_documents, _documents)
def test_what_was_never_applied_is_not_touched(wanted: Any, current: Any) -> None:
    result = merge(current, three_way({}, wanted, current))
    assert isinstance(result, dict)
    assert {field: current[field] for field in current if field not in wanted} == {
        field: result[field] for field in result if field not in wanted
    }


def test_the_annotation_is_kubectls_and_does_not_contain_itself() -> None:
    once = with_last_applied(WANTED)
    assert with_last_applied(once) == once
    assert last_applied(once) == {**WANTED, "metadata": {"name": "a", "annotations": {}}}
    assert once["metadata"]["annotations"][LAST_APPLIED].endswith("}\n")


@pytest.mark.parametrize("text", ["", "no json", "[]"])
def test_an_annotation_that_cannot_be_read_is_as_none(text: str) -> None:
    assert last_applied({"metadata": {"annotations": {LAST_APPLIED: text}}}) == {}


def test_what_is_not_there_is_created() -> None:
    steps, applied = drive(apply(ALLOCATIONS, WANTED), NOT_FOUND, answer(201, b'{"made": 1}'))
    assert applied == ({"made": 1}, "created")
    assert [request.method for request in sent(steps)] == ["GET", "POST"]


def test_what_is_as_wanted_is_left_alone() -> None:
    current = msgspec.json.encode(with_last_applied(WANTED))
    steps, applied = drive(apply(ALLOCATIONS, WANTED), answer(200, current))
    assert applied.outcome == "unchanged"
    assert len(sent(steps)) == 1


def test_only_the_difference_is_sent() -> None:
    before = with_last_applied({**WANTED, "spec": {"priority": 1, "ttl": "1h"}})
    steps, applied = drive(apply(ALLOCATIONS, WANTED), answer(200, msgspec.json.encode(before)), answer(200))
    assert msgspec.json.decode(sent(steps)[1].body)["spec"] == {"ttl": None}
    assert sent(steps)[1].headers["content-type"] == "application/merge-patch+json"
    # The answer has no revision and neither had the object: the server says that nothing changed.
    assert applied.outcome == "unchanged"


def test_whoever_creates_it_first_is_joined() -> None:
    current = answer(200, msgspec.json.encode({**WANTED, "spec": {}}))
    steps, _ = drive(apply(ALLOCATIONS, WANTED), NOT_FOUND, EXISTS, current, answer(200))
    assert [request.method for request in sent(steps)] == ["GET", "POST", "GET", "PATCH"]


def test_a_race_without_end_is_given_up() -> None:
    with pytest.raises(Conflict):
        drive(apply(ALLOCATIONS, WANTED), *[NOT_FOUND, EXISTS] * 3)
