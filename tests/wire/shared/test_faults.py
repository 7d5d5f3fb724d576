"""Every fault of a body is listed, in words, and the schema agrees with msgspec on what a fault is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.wire.kinds.allocation import Allocation
from bursar.wire.kinds.job import Job
from bursar.wire.kinds.node import Node
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.faults import FAULTS_MAX, VALUE_CHARS_MAX, all_faults, dotted


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
