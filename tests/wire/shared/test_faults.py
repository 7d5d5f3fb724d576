"""Every fault of a body is listed, in words, and the schema agrees with msgspec on what a fault is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.wire.kinds.allocation import Allocation
from bursar.wire.kinds.job import Job
from bursar.wire.kinds.node import Node
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.faults import FAULTS_MAX, VALUE_CHARS_MAX, all_faults, dotted, told_by


def test_every_fault_is_listed_at_once() -> None:
    faults = all_faults(
        Allocation,
        {
            "metadata": {"labels": {"team": 3}},
            "specc": 1,
            "spec": {
                "nodes": "two",
                "ttl": [],
                "resorces": {},
                "resources": {"requests": {"nvidia.com/gpu": True}},
                "env": [{"value": "x"}],
                "command": "sleep",
                "scheduling": None,
            },
        },
    )
    assert faults == [
        ("metadata.labels.team", "must be a string, got the number 3"),
        ("spec.command", "must be a list, got the string 'sleep'"),
        ("spec.env[0].name", "is required"),
        ("spec.nodes", "must be an integer, got the string 'two'"),
        ("spec.resorces", "unknown field; did you mean resources?"),
        ("spec.resources.requests[nvidia.com/gpu]", "must be a string or a number, got the boolean true"),
        ("spec.scheduling", "must be an object, got null"),
        ("spec.ttl", "must be a string or an integer, got a list"),
        ("specc", "unknown field; did you mean spec?"),
    ]


CASES: list[tuple[type, Any, list[tuple[str, str]]]] = [
    (Allocation, {}, [("metadata", "is required"), ("spec", "is required")]),
    (Allocation, [], [("", "must be an object, got a list")]),
    (Allocation, None, [("", "must be an object, got null")]),
    (Allocation, {"metadata": {}, "spec": {}}, []),
    (Node, {"metadata": {}, "spec": {"taints": [{"key": "a"}, {}]}}, [("spec.taints[1].key", "is required")]),
    (Node, {"metadata": {}, "zzz": {}}, [("zzz", "unknown field")]),
]


@pytest.mark.parametrize(("kind_type", "document", "faults"), CASES)
def test_faults(kind_type: type, document: Any, faults: list[tuple[str, str]]) -> None:
    assert all_faults(kind_type, document) == faults


@pytest.mark.parametrize("env", [
    {"A": 4711}, {"A": 4711.5}, {"A": ["4711"]}, {"A=4711": 1}, [{"name": "A", "value": 4711}], ["A=4711"], [4711],
    [{"name": 4711}], [{"name": "A", "value": {"4711": 1}}], "A=4711", 4711, True,
])  # fmt: skip
def test_values_of_environment_variables_are_not_quoted(env: Any) -> None:
    for kind_type, spec in ((Allocation, {"env": env}), (Job, {"template": {"spec": {"env": env}}})):
        faults = all_faults(kind_type, {"metadata": {}, "spec": spec})
        assert [fault for fault in faults if ".env" in fault[0]]
        assert "4711" not in str(faults)


def test_labels_called_env_are_none() -> None:
    faults = all_faults(Allocation, {"metadata": {"labels": {"env": "prod", "tier": 3}}, "spec": {}})
    assert faults == [("metadata.labels.tier", "must be a string, got the number 3")]


def test_the_list_is_bounded() -> None:
    labels = {f"label-{index}": index for index in range(500)}
    assert len(all_faults(Allocation, {"metadata": {"labels": labels}, "spec": {}})) == FAULTS_MAX
    unknown = {f"field-{index}": index for index in range(500)}
    assert len(all_faults(Allocation, {"metadata": {}, "spec": unknown})) == FAULTS_MAX


def test_long_values_and_names_are_shortened() -> None:
    long = "x" * 10_000
    faults = all_faults(Allocation, {"metadata": {}, "spec": {"nodes": long, long: 1}})
    assert len(faults) == 2
    assert all(len(path) + len(message) < 4 * VALUE_CHARS_MAX for path, message in faults)


def test_hostile_documents_do_no_harm() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"spec": deep}
    all_faults(Allocation, deep)
    all_faults(Allocation, {"metadata": {}, "spec": {"nodes": 10**6000, "command": 10**6000}})
    all_faults(Allocation, {"metadata": {}, "spec": {"nodes": float("nan"), "ttl": float("inf")}})


def test_names_with_dots_stand_in_brackets() -> None:
    assert dotted(["spec", "hard", "nvidia.com/gpu"]) == "spec.hard[nvidia.com/gpu]"
    assert dotted(["spec", "taints", 0, "key"]) == "spec.taints[0].key"


REQUESTS: dict[str, Any] = {"metadata": {}, "spec": {"template": {"spec": {"resources": {"requests": {"cpu": []}}}}}}
OF_A_MAP = "Expected `int | float | str`, got `array` - at `$.spec.template.spec.resources.requests[...]`"


@pytest.mark.parametrize(
    ("kind_type", "document", "path", "message"),
    [
        (Job, {"metadata": {"name": 1}}, "metadata.name", "expected str, got int"),
        (
            Job,
            {"metadata": {"ownerReferences": [{}]}},
            "metadata.ownerReferences[0]",
            "object missing required field kind",
        ),
        (Node, {"metadata": {}, "spec": {"taints": [{"key": 1}]}}, "spec.taints[0].key", "expected str, got int"),
        (Node, {"metadata": {}, "spec": {"a-b": 1}}, "spec", "object contains unknown field a-b"),
        (Node, {"metadata": {}, "x - at `$.y": 1}, "y", "object contains unknown field x"),
        (Node, {"metadata": {}, "spec": {"x - at `$.y!": 1}}, "spec", "object contains unknown field x - at $.y!"),
        (Job, [], "", "Expected `object`, got `array`"),
        (Node, {"metadata": {}, "x": 1}, "", "Object contains unknown field `x`"),
        (Job, REQUESTS, "", OF_A_MAP),
        (Job, {"metadata": {"labels": {1: "a"}}}, "", "Expected `str`, got `int` - at `key` in `$.metadata.labels`"),
    ],
)
def test_the_path_is_read_from_what_msgspec_says(kind_type: type, document: Any, path: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, kind_type)
    assert told_by(str(caught.value)) == (path, message)


@pytest.mark.parametrize(
    "error",
    ["`", "", " - at `$", " - at `$.a", "a - at `$.b` ", "a - at `$.b c`", "a - at `$.b[]`", "a - at `$.b[x]`", "$.a`"],
)
def test_what_ends_in_no_path_is_left_as_it_is(error: str) -> None:
    assert told_by(error) == ("", error)


def test_no_message_takes_long_to_read() -> None:
    """The work is linear. It is done in a process of its own, since nothing else runs while a pattern is matched; a
    pattern that tries each step in every way takes minutes for the shortest of these."""
    errors = [
        OF_A_MAP,
        f"Object contains unknown field `x - at `$.{'a' * 1_000_000}!` - at `$.spec[...]`",
        f"Object contains unknown field `{' - at `$.aaaaaaaa.aaaaaaaa!' * 50_000}` - at `$.spec[...]`",
        f"a - at `${'.aaaaaaaa[0]' * 100_000}!`",
    ]
    read = "import sys, json; from bursar.wire.shared.faults import told_by; list(map(told_by, json.load(sys.stdin)))"
    subprocess.run([sys.executable, "-c", read], input=json.dumps(errors), text=True, timeout=5, check=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["spec", "key", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ["metadata", "spec", "status", "labels", "hard", "taints", "resources", "requests", "nodes", "ttl", "env", "x"]
documents = st.dictionaries(
    st.sampled_from(FIELDS), st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4) | json_values, max_size=4
)


@given(st.sampled_from(KINDS), documents)
def test_faults_are_found_exactly_where_msgspec_refuses(kind: Any, document: dict[str, Any]) -> None:
    try:
        msgspec.convert(document, kind.type)
    except msgspec.ValidationError:
        assert all_faults(kind.type, document)
    else:
        assert not all_faults(kind.type, document)
