"""Values of a body are counted without reading it, and a key that comes twice is found."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.wire.kinds.allocation import Allocation
from bursar.wire.shared import protobuf, yaml_text
from bursar.wire.shared.bounds import (
    VALUES_MAX,
    RepeatedKey,
    TooManyValues,
    has_more_values,
    has_more_values_json,
    require_unique_keys,
)
from bursar.wire.shared.faults import VALUES_COMPARED_MAX, all_faults
from bursar.wire.shared.yaml_text import YamlError

TEXT = st.text(alphabet='ab,:[]{}" \\\n\u00e9', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=40,
)


def count(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inside))


@given(VALUES, st.sampled_from([None, 1]))
def test_values_are_counted_exactly(value: Any, indent: int | None) -> None:
    raw, values = json.dumps(value, indent=indent).encode(), count(value)
    padded = raw + b" " * (2 * values + 2)  # A short text is not counted at all.
    assert not has_more_values_json(padded, values)
    assert has_more_values_json(padded, values - 1)
    assert not has_more_values(value, values)
    assert has_more_values(value, values - 1)


@pytest.mark.parametrize(
    "piece", [b'"', b'\\"', b"[]", b"{ ", b"[[", b",", b'"":', b"\\", b'"\\', b'{"a":[', b'""', b"1,"]
)
def test_what_is_no_json_is_looked_at_once(piece: bytes) -> None:
    """Whatever is answered: each of these would take hours if the text were looked at again from each of its bytes."""
    for begin in (b"", b'"', b"["):
        assert has_more_values_json(begin + piece * (1_400_000 // len(piece))) in (True, False)


@given(VALUES)
def test_documents_without_repetition_pass(value: Any) -> None:
    raw = json.dumps(value).encode()
    require_unique_keys(raw, msgspec.json.decode(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"a" :2}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":1,"a":":"}',
        b'{"a":1,"a":"\\u003a"}',
        b'[{"b":{"a":[],"c":1,"a":[]}}]',
        b'{"a":{"b":1},"a":{"c":1}}',
    ],
)
def test_a_key_that_comes_twice_is_found(raw: bytes) -> None:
    with pytest.raises(RepeatedKey):
        require_unique_keys(raw, msgspec.json.decode(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"metadata":{"name":"a","name":"b"},"spec":{}}',
        b'{"metadata":{"name":"a"},"spec":{},"spec":{}}',
        b'{"metadata":{"labels":{"a":"b","a":"b"}},"spec":{}}',
        b'{"metadata":{},"spec":{"priority":0,"priority":0}}',
        b'{"metadata":{},"spec":{"resources":{"requests":{"cpu":1,"cpu":2}}}}',
    ],
)
def test_a_field_that_comes_twice_is_found_in_the_object_that_was_read(raw: bytes) -> None:
    with pytest.raises(RepeatedKey):
        require_unique_keys(raw, msgspec.json.Decoder(Allocation).decode(raw))


def test_bodies_with_many_values_are_not_held_against_the_schema() -> None:
    few: dict[str, list[int]] = {str(index): [] for index in range(100)}
    assert all_faults(Allocation, {"spec": {"resources": {"requests": few}}})
    many: dict[str, list[int]] = {str(index): [] for index in range(VALUES_COMPARED_MAX)}
    assert all_faults(Allocation, {"spec": {"resources": {"requests": many}}}) == []


def test_protobuf_has_no_more_fields_than_a_body_has_values() -> None:
    with pytest.raises(TooManyValues):
        protobuf.decode(protobuf.MAGIC + b"\x28\x00" * (VALUES_MAX + 1))


# YAML.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: 1\nb: [x, 2.5, true, ~, '3', \"4\", off, 0x1f, 1:30, 2020-01-01]\n",
         {"a": 1, "b": ["x", 2.5, True, None, "3", "4", False, "0x1f", "1:30", "2020-01-01"]}),
        ("!!map {a: !!str 1, b: !!int '2', c: !!float 1.5, d: !!bool yes, e: !!null '', f: !!seq [! 1]}",
         {"a": "1", "b": 2, "c": 1.5, "d": True, "e": None, "f": ["1"]}),
        ("a: |\n  x\n  y\nb: >\n  x\n  y\n", {"a": "x\ny\n", "b": "x y\n"}),
        ("# nothing\n", None),
        ("---\na: b\n...\n", {"a": "b"}),
        ("- {}\n- []\n- -\n- .\n", [{}, [], [None], "."]),
    ],
)  # fmt: skip
def test_yaml_is_read_as_json_would_be(text: str, wanted: Any) -> None:
    assert yaml_text.decode(text.encode()) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "!!map [a]", "!!map a", "!!seq {a: b}", "!!seq a", "!!str [a]", "!!str {a: b}", "!!int [1]", "!!int a",
        "!!float 1", "!!bool maybe", "!!null x", "!!set {a}", "!!omap [a: b]", "!!pairs [a: b]", "!!binary aGk=",
        "!!timestamp 2020-01-01", "!!python/object:os.system {}", "!own x", "!!merge x", "!!value x", "a: !!map [b]",
        "? [a]\n: b", "? {a: b}\n: c", "1: a", "~: a", "a: &x 1\nb: *x", "a: *x", "<<: {a: b}", "a: b\n---\nc: d",
        "a: [", "a: b: c", "\t- a", "a: 1.0e+999", "{a, b", "%YAML 9.9\n---\na", "\x01", "a: !!int 1:59",
    ],
)  # fmt: skip
def test_yaml_that_json_could_not_say_is_refused(text: str) -> None:
    with pytest.raises(YamlError):
        yaml_text.decode(text.encode())


@pytest.mark.parametrize(
    "value",
    [
        "!!int hunter2", "!!float hunter2", "!!bool hunter2", "!!null hunter2", "!hunter2", "!!hunter2 x",
        "!hunter2 [a]", "!hunter2 {a: b}", "{[hunter2]: a}",
    ],
)  # fmt: skip
def test_yaml_that_is_refused_is_not_quoted(value: str) -> None:
    with pytest.raises(YamlError, match=r"\Aline 2: ") as refused:
        yaml_text.decode(f"env:\n  A: {value}".encode())
    assert "hunter2" not in str(refused.value), "it may be a secret"


@pytest.mark.parametrize("text", ["a: 1\na: 2", "{a: 1, 'a': 2}", '- {b: {a: 1, c: 2, "a": 1}}'])
def test_a_key_that_comes_twice_in_yaml_is_found(text: str) -> None:
    with pytest.raises(RepeatedKey):
        yaml_text.decode(text.encode())


def test_a_key_that_comes_twice_is_named_without_what_follows_its_equals_sign() -> None:
    """Who writes variables as NAME=VALUE has the value in the key."""
    with pytest.raises(RepeatedKey, match="'PASSWORD' is given twice"):
        yaml_text.decode(b"{PASSWORD=hunter2: a, PASSWORD=hunter2: a}")


def test_yaml_is_bounded_before_it_is_built() -> None:
    for text in ("[" * 100_000, "- a\n" * 300_000, "[a" + ",a" * 500_000 + "]"):
        with pytest.raises(YamlError, match="64 levels and 20000 parts"):
            yaml_text.decode(text.encode())
