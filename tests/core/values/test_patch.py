"""Patches: merge, strategic merge and JSON Patch, on plain JSON values that they never change."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values import patch
from bursar.core.values.patch import Json, PatchError

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text("abc", max_size=3))
JSON: st.SearchStrategy[Json] = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc/~", max_size=2), inner, max_size=3)
    ),
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), JSON, max_size=4)

TAINTS = {"spec.taints": "key", "metadata.finalizers": "", "spec.groups": "name", "spec.groups.members": "name"}


def nested(levels: int) -> Json:
    value: Json = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


# --- JSON merge patch


@pytest.mark.parametrize(
    ("target", "change", "expected"),
    [
        pytest.param({"a": 1}, {"a": 2}, {"a": 2}, id="a field is replaced"),
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="a field is added"),
        pytest.param({"a": 1}, {"a": None}, {}, id="null removes a field"),
        pytest.param({"a": 1}, {"b": None}, {"a": 1}, id="null for a field that is not there does nothing"),
        pytest.param(
            {"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}, id="objects are merged at any depth"
        ),
        pytest.param({"a": [1, 2]}, {"a": [3]}, {"a": [3]}, id="arrays are replaced"),
        pytest.param({"a": [1]}, {"a": {"b": 1}}, {"a": {"b": 1}}, id="an object replaces an array"),
        pytest.param({}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}, id="nulls in a new object are dropped"),
        pytest.param({"a": 1}, {"a": [None]}, {"a": [None]}, id="nulls in an array are kept"),
        pytest.param({"a": 1}, [2], [2], id="a patch that is no object replaces everything"),
        pytest.param({"a": 1}, None, None, id="so does null"),
        pytest.param([1], {"a": 1}, {"a": 1}, id="an object patch of an array starts from nothing"),
    ],
)
def test_merge(target: Json, change: Json, expected: Json) -> None:
    assert patch.merge(target, change) == expected


@given(JSON, JSON)
def test_merging_again_changes_nothing_more(target: Json, change: Json) -> None:
    once = patch.merge(target, change)
    assert patch.merge(once, change) == once


@given(OBJECTS, OBJECTS)
def test_merges_leave_their_arguments_alone(target: dict[str, Json], change: dict[str, Json]) -> None:
    before = copy.deepcopy((target, change))
    patch.merge(target, change)
    patch.strategic(target, change, {})
    assert (target, change) == before


@given(OBJECTS, OBJECTS)
def test_without_directives_and_merge_keys_both_merges_agree(target: dict[str, Json], change: dict[str, Json]) -> None:
    assert patch.strategic(target, change, {}) == patch.merge(target, change)


# --- Strategic merge patch


@pytest.mark.parametrize(
    ("target", "change", "expected"),
    [
        pytest.param(
            {"spec": {"unschedulable": True}}, {"spec": {"unschedulable": None}}, {"spec": {}}, id="kubectl uncordon"
        ),
        pytest.param(
            {"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}, {"key": "b"}]}},
            {"spec": {"taints": [{"key": "a", "value": "x"}, {"key": "c"}]}},
            {"spec": {"taints": [{"key": "a", "effect": "NoSchedule", "value": "x"}, {"key": "b"}, {"key": "c"}]}},
            id="elements are merged by their key and new ones appended",
        ),
        pytest.param(
            {"spec": {"taints": [{"key": "a", "effect": "x"}, {"key": "b"}, {"key": "a", "effect": "y"}]}},
            {"spec": {"taints": [{"key": "a", "$patch": "delete"}]}},
            {"spec": {"taints": [{"key": "b"}]}},
            id="delete removes every element with the key",
        ),
        pytest.param(
            {"spec": {"taints": [{"key": "a"}]}},
            {"spec": {"taints": [{"$patch": "replace"}, {"key": "z"}]}},
            {"spec": {"taints": [{"key": "z"}]}},
            id="replace in a list replaces the list",
        ),
        pytest.param(
            {"spec": {"taints": [{"key": "a", "value": "x"}]}},
            {"spec": {"taints": [{"key": "a", "value": None}]}},
            {"spec": {"taints": [{"key": "a"}]}},
            id="null removes a field of an element",
        ),
        pytest.param(
            {},
            {"spec": {"taints": [{"key": "a", "value": None}, {"key": "b", "$patch": "delete"}]}},
            {"spec": {"taints": [{"key": "a"}]}},
            id="a new list holds neither nulls nor directives",
        ),
        pytest.param(
            {"spec": {"groups": [{"name": "g", "members": [{"name": "m", "x": 1}]}]}},
            {"spec": {"groups": [{"name": "g", "members": [{"name": "m", "y": 2}]}]}},
            {"spec": {"groups": [{"name": "g", "members": [{"name": "m", "x": 1, "y": 2}]}]}},
            id="merged lists can hold merged lists",
        ),
        pytest.param(
            {"spec": {"args": [1, 2]}}, {"spec": {"args": [3]}}, {"spec": {"args": [3]}}, id="others are replaced"
        ),
        pytest.param(
            {"spec": {"taints": [{"key": True}]}},
            {"spec": {"taints": [{"key": 1}]}},
            {"spec": {"taints": [{"key": True}, {"key": 1}]}},
            id="true and 1 are different keys",
        ),
        pytest.param(
            {"spec": {"a": 1, "b": {"c": 2}}},
            {"spec": {"$patch": "replace", "d": 3}},
            {"spec": {"d": 3}},
            id="replace in an object keeps only the patch",
        ),
        pytest.param(
            {"spec": {"a": {"b": 1}, "c": 2}},
            {"spec": {"a": {"$patch": "delete"}}},
            {"spec": {"a": {}, "c": 2}},
            id="delete in an object empties it",
        ),
        pytest.param(
            {"spec": {"type": "A", "a": 1, "keep": 2}},
            {"spec": {"$retainKeys": ["type", "b", "keep"], "type": "B", "b": 3}},
            {"spec": {"type": "B", "b": 3, "keep": 2}},
            id="retainKeys drops the fields it does not name",
        ),
        pytest.param(
            {"metadata": {"finalizers": ["a", "b"]}},
            {"metadata": {"finalizers": ["b", "c"]}},
            {"metadata": {"finalizers": ["a", "b", "c"]}},
            id="a list of plain values is merged as a set",
        ),
        pytest.param(
            {"metadata": {"finalizers": ["a", "b"]}},
            {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a", "x"], "finalizers": ["c"]}},
            {"metadata": {"finalizers": ["b", "c"]}},
            id="plain values are deleted before others are added",
        ),
        pytest.param(
            {"spec": {}},
            {"spec": {"$deleteFromPrimitiveList/args": ["a"], "$setElementOrder/taints": [{"key": "a"}]}},
            {"spec": {}},
            id="directives about lists that are not there do nothing",
        ),
        pytest.param(
            {"spec": {"taints": [{"key": "a"}, {"key": "server"}, {"key": "b"}]}},
            {"spec": {"$setElementOrder/taints": [{"key": "c"}, {"key": "b"}, {"key": "a"}], "taints": [{"key": "c"}]}},
            {"spec": {"taints": [{"key": "c"}, {"key": "server"}, {"key": "b"}, {"key": "a"}]}},
            id="elements take the order given and unknown ones keep their place",
        ),
        pytest.param(
            {"metadata": {"finalizers": ["a", "b"]}},
            {"metadata": {"$setElementOrder/finalizers": ["b", "a"]}},
            {"metadata": {"finalizers": ["b", "a"]}},
            id="plain values are ordered too",
        ),
    ],
)
def test_strategic(target: Json, change: Json, expected: Json) -> None:
    before = copy.deepcopy((target, change))
    assert patch.strategic(target, change, TAINTS) == expected
    assert (target, change) == before


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        pytest.param([], "must be objects", id="a patch that is no object"),
        pytest.param({"spec": {"$patch": "merge"}}, "must be delete or replace", id="another directive"),
        pytest.param(
            {"spec": {"taints": [{"key": "a", "$patch": 1}]}},
            "must be delete or replace",
            id="a directive that is no text",
        ),
        pytest.param({"spec": {"taints": [{"value": "x"}]}}, "merge key", id="an element without its key"),
        pytest.param({"spec": {"taints": [{"key": {}}]}}, "merge key", id="an object as key"),
        pytest.param({"spec": {"taints": ["a"]}}, "merge key", id="an element that is no object"),
        pytest.param(
            {"spec": {"args": [{"$patch": "delete"}]}}, "needs a merge key", id="delete where there is no key"
        ),
        pytest.param({"metadata": {"finalizers": [{}]}}, "plain values", id="an object in a set of plain values"),
        pytest.param({"spec": {"$retainKeys": ["a"], "b": 1}}, "not named", id="a field that retainKeys leaves out"),
        pytest.param({"spec": {"$retainKeys": "a"}}, "must be an array", id="retainKeys that is no array"),
        pytest.param({"spec": {"$setElementOrder/taints": [{}]}}, "merge key", id="an order without keys"),
    ],
)
def test_strategic_refuses(change: Json, fault: str) -> None:
    with pytest.raises(PatchError, match=fault):
        patch.strategic({"spec": {"taints": [{"key": "a"}]}}, change, TAINTS)


def test_an_object_without_a_merge_key_can_still_be_patched() -> None:
    stored: Json = {"spec": {"taints": [{"value": "odd"}, {"key": "a"}]}}
    assert patch.strategic(stored, {"spec": {"taints": [{"key": "b"}]}}, TAINTS) == {
        "spec": {"taints": [{"value": "odd"}, {"key": "a"}, {"key": "b"}]}
    }


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.lists(st.sampled_from("abcdef"), unique=True))
def test_ordering_is_a_permutation_in_the_order_given(present: list[str], order: list[str]) -> None:
    result = patch.strategic(
        {"metadata": {"finalizers": [*present]}}, {"metadata": {"$setElementOrder/finalizers": [*order]}}, TAINTS
    )
    assert isinstance(result, dict)
    assert isinstance(metadata := result["metadata"], dict)
    assert isinstance(finalizers := metadata["finalizers"], list)
    assert sorted(map(str, finalizers)) == sorted(present)
    assert [name for name in finalizers if name in order] == [name for name in order if name in present]


# --- JSON Patch


@pytest.mark.parametrize(
    ("target", "operation", "expected"),
    [
        pytest.param({"a": 1}, {"op": "add", "path": "/b", "value": 2}, {"a": 1, "b": 2}, id="add a field"),
        pytest.param({"a": 1}, {"op": "add", "path": "/a", "value": 2}, {"a": 2}, id="add replaces a field"),
        pytest.param([1, 3], {"op": "add", "path": "/1", "value": 2}, [1, 2, 3], id="add inserts an element"),
        pytest.param([1], {"op": "add", "path": "/1", "value": 2}, [1, 2], id="add just behind the last"),
        pytest.param([1], {"op": "add", "path": "/-", "value": [2]}, [1, [2]], id="add at the end"),
        pytest.param({"a": 1}, {"op": "add", "path": "", "value": [1]}, [1], id="add the whole document"),
        pytest.param({}, {"op": "add", "path": "/", "value": 1}, {"": 1}, id="a field with an empty name"),
        pytest.param({}, {"op": "add", "path": "/a", "value": None}, {"a": None}, id="null is a value"),
        pytest.param({}, {"op": "add", "path": "/a", "value": 1, "x": 0}, {"a": 1}, id="other members are ignored"),
        pytest.param({"a": 1, "b": 2}, {"op": "remove", "path": "/a"}, {"b": 2}, id="remove a field"),
        pytest.param([1, 2], {"op": "remove", "path": "/0"}, [2], id="remove an element"),
        pytest.param(
            {"a": {"b": 1}}, {"op": "replace", "path": "/a/b", "value": 2}, {"a": {"b": 2}}, id="replace a field"
        ),
        pytest.param([1, 2], {"op": "replace", "path": "/1", "value": 3}, [1, 3], id="replace an element"),
        pytest.param({"a": 1}, {"op": "replace", "path": "", "value": 3}, 3, id="replace the whole document"),
        pytest.param(
            {"a": {"b": 1}, "c": {}},
            {"op": "move", "from": "/a/b", "path": "/c/d"},
            {"a": {}, "c": {"d": 1}},
            id="move",
        ),
        pytest.param([1, 2, 3], {"op": "move", "from": "/0", "path": "/2"}, [2, 3, 1], id="move within an array"),
        pytest.param({"a": 1}, {"op": "move", "from": "/a", "path": "/a"}, {"a": 1}, id="move to where it is"),
        pytest.param(
            {"a": {"b": 1}}, {"op": "move", "from": "/a/b", "path": "/a"}, {"a": 1}, id="move over its parent"
        ),
        pytest.param({"a": [1]}, {"op": "copy", "from": "/a", "path": "/b"}, {"a": [1], "b": [1]}, id="copy"),
        pytest.param(
            {"a": [1, {"b": None}]},
            {"op": "test", "path": "/a", "value": [1, {"b": None}]},
            {"a": [1, {"b": None}]},
            id="test",
        ),
        pytest.param({"a": 1}, {"op": "test", "path": "/a", "value": 1.0}, {"a": 1}, id="numbers are equal by value"),
        pytest.param({"a/b": {"~": 1}}, {"op": "remove", "path": "/a~1b/~0"}, {"a/b": {}}, id="escapes"),
        pytest.param({"~1": 1}, {"op": "remove", "path": "/~01"}, {}, id="an escaped tilde does not begin an escape"),
        pytest.param({"0": 1}, {"op": "remove", "path": "/0"}, {}, id="a digit can be a field"),
    ],
)
def test_json_patch(target: Json, operation: Json, expected: Json) -> None:
    before = copy.deepcopy((target, operation))
    assert patch.json_patch(target, [operation]) == expected
    assert (target, operation) == before


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        pytest.param("add", "must be an object", id="an operation as text"),
        pytest.param({"path": "/a"}, "op must be one of add, remove", id="no op"),
        pytest.param({"op": "merge", "path": "/a"}, "op must be one of", id="an unknown op"),
        pytest.param({"op": ["add"], "path": "/a"}, "op must be one of", id="an op that is no text"),
        pytest.param({"op": "remove"}, "path is missing", id="no path"),
        pytest.param({"op": "add", "path": "/a"}, "value is missing", id="no value"),
        pytest.param({"op": "copy", "path": "/a"}, "from is missing", id="no from"),
        pytest.param({"op": "remove", "path": "a"}, "begin with '/'", id="a path without a slash"),
        pytest.param({"op": "remove", "path": "/a~2"}, "'~0'", id="an unknown escape"),
        pytest.param({"op": "remove", "path": "/a~"}, "'~0'", id="an unfinished escape"),
        pytest.param({"op": "remove", "path": "/x"}, "does not exist", id="remove what is not there"),
        pytest.param({"op": "remove", "path": ""}, "whole document", id="remove everything"),
        pytest.param({"op": "replace", "path": "/x", "value": 1}, "does not exist", id="replace what is not there"),
        pytest.param({"op": "add", "path": "/x/y", "value": 1}, "does not exist", id="add below what is not there"),
        pytest.param({"op": "add", "path": "/n/y", "value": 1}, "neither object nor array", id="add below a number"),
        pytest.param({"op": "add", "path": "/l/3", "value": 1}, "beyond the end", id="add beyond the end"),
        pytest.param({"op": "remove", "path": "/l/2"}, "beyond the end", id="remove beyond the end"),
        pytest.param({"op": "remove", "path": "/l/-"}, "not an index", id="remove behind the end"),
        pytest.param({"op": "remove", "path": "/l/01"}, "not an index", id="an index with a leading zero"),
        pytest.param({"op": "remove", "path": "/l/-1"}, "not an index", id="a negative index"),
        pytest.param({"op": "remove", "path": "/l/١"}, "not an index", id="an Arabic index"),
        pytest.param({"op": "remove", "path": "/l/" + "9" * 5000}, "not an index", id="an index too long to read"),
        pytest.param({"op": "move", "from": "/o", "path": "/o/a"}, "into itself", id="move into itself"),
        pytest.param({"op": "add", "path": "/a" * 65, "value": 1}, "deeper than", id="a deep path"),
    ],
)
def test_json_patch_refuses(operation: Json, fault: str) -> None:
    with pytest.raises(PatchError, match=fault):
        patch.json_patch({"n": 1, "l": [1, 2], "o": {}}, [operation])


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(1, 2), (True, 1), (0, False), ("1", 1), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2}), (None, False), ([], {})],
)
def test_a_failed_test_is_told_apart(actual: Json, expected: Json) -> None:
    with pytest.raises(patch.TestFailed, match=r"operation 1 \(test\)"):
        patch.json_patch(
            {"a": actual}, [{"op": "add", "path": "/b", "value": 1}, {"op": "test", "path": "/a", "value": expected}]
        )


def test_a_test_of_what_is_not_there_is_a_plain_fault() -> None:
    with pytest.raises(PatchError) as refused:
        patch.json_patch({}, [{"op": "test", "path": "/a", "value": 1}])
    assert not isinstance(refused.value, patch.TestFailed)


def test_an_added_value_is_not_shared_with_the_patch() -> None:
    operations: Json = [
        {"op": "add", "path": "/a", "value": {"b": 1}},
        {"op": "replace", "path": "/a/b", "value": 2},
    ]
    before = copy.deepcopy(operations)
    assert patch.json_patch({}, operations) == {"a": {"b": 2}}
    assert operations == before


def test_a_copy_lives_its_own_life() -> None:
    assert patch.json_patch(
        {"a": {"x": 1}}, [{"op": "copy", "from": "/a", "path": "/b"}, {"op": "remove", "path": "/a/x"}]
    ) == {"a": {}, "b": {"x": 1}}


@given(OBJECTS, OBJECTS)
def test_replacing_field_by_field_reaches_any_object(target: dict[str, Json], wanted: dict[str, Json]) -> None:
    operations: list[Json] = [{"op": "remove", "path": f"/{field}"} for field in target]
    operations += [{"op": "add", "path": f"/{field}", "value": value} for field, value in wanted.items()]
    operations += [{"op": "test", "path": "", "value": wanted}]
    assert patch.json_patch(target, operations) == wanted


# --- Bounds


def test_an_object_of_the_greatest_depth_can_be_patched() -> None:
    assert patch.merge(nested(64), {}) == nested(64)
    assert patch.json_patch({}, [{"op": "add", "path": "/a", "value": nested(63)}]) == nested(64)


@pytest.mark.parametrize("levels", [65, 100_000])
def test_what_is_deeper_is_refused(levels: int) -> None:
    with pytest.raises(PatchError, match="nested deeper"):
        patch.merge(nested(levels), {})
    with pytest.raises(PatchError, match="nested deeper"):
        patch.merge({}, nested(levels))
    with pytest.raises(PatchError, match="nested deeper"):
        patch.strategic({}, nested(levels), {})
    with pytest.raises(PatchError, match="nested deeper"):
        patch.json_patch(nested(levels), [])
    with pytest.raises(PatchError, match="nested deeper"):
        patch.json_patch({}, [{"op": "add", "path": "/a", "value": nested(levels - 1)}])


def test_moves_cannot_build_what_is_too_deep() -> None:
    operations: list[Json] = [
        {"op": "add", "path": "/a", "value": nested(40)},
        {"op": "add", "path": "/b", "value": nested(40)},
        {"op": "move", "from": "/b", "path": "/a" * 40 + "/b"},
    ]
    with pytest.raises(PatchError, match="nested deeper"):
        patch.json_patch({}, operations)


def test_the_number_of_operations_is_bounded() -> None:
    operation: Json = {"op": "test", "path": "", "value": {}}
    assert patch.json_patch({}, [operation] * 10_000) == {}
    with pytest.raises(PatchError, match="at most 10000"):
        patch.json_patch({}, [operation] * 10_001)
    with pytest.raises(PatchError, match="must be an array"):
        patch.json_patch({}, operation)


def test_copies_cannot_multiply_for_ever() -> None:
    doubling: Json = [{"op": "copy", "from": "/a", "path": "/a/-"}] * 60
    with pytest.raises(PatchError, match="copies more than"):
        patch.json_patch({"a": ["x" * 100]}, doubling)


def test_long_lists_are_merged_quickly() -> None:
    taints: list[Json] = [{"key": str(index)} for index in range(20_000)]
    assert patch.strategic({"spec": {"taints": taints}}, {"spec": {"taints": taints}}, TAINTS) == {
        "spec": {"taints": taints}
    }
