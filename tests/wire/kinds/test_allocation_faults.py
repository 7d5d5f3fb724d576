"""Faults of allocations: contradicting fields, a gang without a name, and counts as resources."""

from typing import Any

import msgspec
import pytest

from bursar.wire.kinds.allocation import ALLOCATION, CHECKPOINT_INTERVAL, DATA_READY, GANG_SIZE, Allocation
from bursar.wire.kinds.job import JOB, Job

TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
NODES = {"nodeSelectorTerms": [TERM]}
PODS = {"topologyKey": "rack"}


def faults(spec: dict[str, Any], annotations: dict[str, str] | None = None) -> list[tuple[str, str]]:
    document = {"metadata": {"name": "a", "annotations": annotations or {}}, "spec": spec}
    return [(one.field, one.message) for one in ALLOCATION.check(msgspec.convert(document, Allocation))]


def job_faults(template: dict[str, Any]) -> list[tuple[str, str]]:
    document = {"metadata": {"name": "a"}, "spec": {"parallelism": 8, "template": {"spec": template}}}
    return [(one.field, one.message) for one in JOB.check(msgspec.convert(document, Job))]


@pytest.mark.parametrize(
    ("part", "field", "one", "other"),
    [
        ("nodeAffinity", "requiredDuringScheduling", NODES, {"nodeSelectorTerms": [TERM, TERM]}),
        (
            "nodeAffinity", "preferredDuringScheduling", [{"weight": 1, "preference": TERM}],
            [{"weight": 2, "preference": TERM}],
        ),
        ("podAffinity", "requiredDuringScheduling", [PODS], [{"topologyKey": "zone"}]),
        ("podAntiAffinity", "requiredDuringScheduling", [PODS], [PODS, {"topologyKey": "zone"}]),
        (
            "podAffinity", "preferredDuringScheduling", [{"weight": 1, "podAffinityTerm": PODS}],
            [{"weight": 2, "podAffinityTerm": PODS}],
        ),
        ("podAntiAffinity", "preferredDuringScheduling", [], [{"weight": 2, "podAffinityTerm": PODS}]),
    ],
)  # fmt: skip
def test_what_is_said_under_both_names_is_the_same(part: str, field: str, one: Any, other: Any) -> None:
    long = f"{field}IgnoredDuringExecution"

    def said(short_one: Any, long_one: Any) -> list[tuple[str, str]]:
        return faults({"scheduling": {"affinity": {part: {field: short_one, long: long_one}}}})

    assert said(one, other) == [(f"spec.scheduling.affinity.{part}.{field}", f"contradicts {long}: set only one")]
    assert said(other, other) == []


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"gangScheduling": {"minMembers": 5}}, "spec.gangScheduling.groupId"),
        ({"gangScheduling": {"minMembers": 5, "groupId": ""}}, "spec.gangScheduling.groupId"),
        ({"scheduling": {"gangScheduling": {"minMembers": 5}}}, "spec.scheduling.gangScheduling.groupId"),
    ],
)
def test_a_member_names_its_gang_unless_a_job_does(spec: dict[str, Any], field: str) -> None:
    named = [one for one in faults(spec) if one[1].startswith("is required")]
    assert named == [(field, "is required with minMembers: all members of a gang name the same groupId")]
    assert [one for one in job_faults(spec) if "is required" in one[1]] == []


@pytest.mark.parametrize(
    ("gang", "annotations"),
    [
        ({"minMembers": 1}, {}),
        ({}, {}),
        ({"minMembers": 5, "groupId": "ring"}, {}),
        ({"groupId": "ring"}, {GANG_SIZE: "5"}),
    ],
)
def test_what_names_its_gang_or_is_alone_is_fine(gang: dict[str, Any], annotations: dict[str, str]) -> None:
    assert faults({"gangScheduling": gang}, annotations) == []


def test_a_gang_of_the_annotations_needs_a_name_as_well() -> None:
    (fault,) = faults({}, {GANG_SIZE: "5"})
    assert fault[0] == "spec.gangScheduling.groupId"
    assert GANG_SIZE in fault[1]


@pytest.mark.parametrize("said", ["0", "1", "0.25", "1.000", "0.123456789"])
def test_the_part_of_the_data_that_is_in_place(said: str) -> None:
    assert faults({}, {DATA_READY: said}) == []


@pytest.mark.parametrize("said", ["", "1.1", "2", "-0", "+1", ".5", "1e-3", "nan", "50%", "0.5 ", "٠", "0." + "1" * 10])
def test_of_the_data_only_a_part_can_be_in_place(said: str) -> None:
    assert faults({}, {DATA_READY: said}) == [
        ("metadata.annotations[bursar.io/data-ready]", "must be a part from 0 to 1, such as 0.25")
    ]


def test_how_often_work_is_saved_is_a_duration() -> None:
    assert faults({}, {CHECKPOINT_INTERVAL: "10m"}) == []
    ((field, _),) = faults({}, {CHECKPOINT_INTERVAL: "often"})
    assert field == "metadata.annotations[bursar.io/checkpoint-interval]"


@pytest.mark.parametrize("part", ["requests", "limits"])
@pytest.mark.parametrize(
    ("name", "helps"),
    [("nodes", "set spec.nodes"), ("pods", "each allocation counts as one"), ("allocations", "each allocation counts")],
)
def test_what_is_counted_is_no_resource(part: str, name: str, helps: str) -> None:
    ((field, message),) = faults({"resources": {part: {name: "7", "cpu": "1"}}})
    assert field == f"spec.resources.{part}[{name}]"
    assert helps in message


def test_in_a_job_the_nodes_are_those_of_its_template() -> None:
    ((field, message),) = job_faults({"resources": {"requests": {"nodes": "7"}}})
    assert field == "spec.template.spec.resources.requests[nodes]"
    assert "set spec.template.spec.nodes" in message
