"""When a client wants a table, and what is in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.api.objects.table import UNKNOWN_AGE, age, table, wants_table
from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.priorityclass import PRIORITY_CLASS

V1 = "application/json;as=Table;v=v1;g=meta.k8s.io"
V1BETA1 = "application/json;as=Table;v=v1beta1;g=meta.k8s.io"

NOW = 1_705_314_600.0  # 2024-01-15T10:30:00Z
DOCUMENT: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Allocation",
    "metadata": {"name": "job-1", "namespace": "ml-team", "creationTimestamp": "2024-01-15T10:25:00Z"},
    "spec": {"resources": {"requests": {"nvidia.com/gpu": "4"}}, "priorityClass": "high"},
    "status": {"phase": "Running", "nodeName": "gpu-1"},
}


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (f"{V1},{V1BETA1},application/json", True),  # kubectl get
        ("application/json", False),
        ("", False),
        ("*/*", False),
        (f"application/json,{V1}", False),
        (f"application/json;q=0.5, {V1};q=0.9", True),
        (f"{V1};q=0.1,*/*;q=0.8", False),
        (f"{V1};q=0", False),
        (f"{V1};q=nonsense,{V1};q=nan", False),
        (f"{V1BETA1},application/json", False),
        ("application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json", False),
        (f"application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io,{V1}", True),
        ("application/json; as=Table ; g=meta.k8s.io; v=v1", True),
    ],
)
def test_wants_table(accept: str, wanted: bool) -> None:
    assert wants_table(accept) is wanted


@given(st.text(max_size=100))
def test_any_accept_header_is_read(accept: str) -> None:
    wants_table(accept)


def test_a_row_has_a_cell_for_each_column() -> None:
    shown = table(ALLOCATION, [DOCUMENT], now_seconds=NOW, list_meta={"resourceVersion": "7"})
    names = [column["name"] for column in shown["columnDefinitions"]]
    cells = dict(zip(names, shown["rows"][0]["cells"], strict=True))
    assert (shown["kind"], shown["apiVersion"]) == ("Table", "meta.k8s.io/v1")
    assert shown["metadata"] == {"resourceVersion": "7"}
    assert cells["Name"] == "job-1"
    assert cells["GPU"] == "4"
    assert cells["Age"] == "5m"


def test_name_comes_first_and_wide_columns_come_after_the_age() -> None:
    columns = table(ALLOCATION, [], now_seconds=NOW)["columnDefinitions"]
    assert (columns[0]["name"], columns[0]["format"]) == ("Name", "name")
    narrow = [column["name"] for column in columns if column["priority"] == 0]
    assert narrow[-1] == "Age"
    wide = [column["name"] for column in columns if column["priority"] == 1]
    assert wide == ["Priority", "Priority-Class", "Message"]


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Failed", "exitCode": 3}, "exit code 3"),
        ({"phase": "Failed", "exitCode": 137, "reason": "OutOfMemory"}, "OutOfMemory"),
        ({"phase": "Failed"}, ""),
        ({"phase": "Succeeded", "exitCode": 0}, ""),
        ({"phase": "Pending", "reason": "gang_incomplete"}, "gang_incomplete"),
    ],
)
def test_a_failure_without_a_reason_tells_its_exit_code(status: dict[str, Any], shown: str) -> None:
    one = table(ALLOCATION, [{**DOCUMENT, "status": status}], now_seconds=NOW)
    names = [column["name"] for column in one["columnDefinitions"]]
    assert one["rows"][0]["cells"][names.index("Reason")] == shown


def test_work_on_several_nodes_shows_how_many_and_what_each_gives() -> None:
    status = {"phase": "Running", "nodeName": "a", "nodes": [{"name": name} for name in "abcd"]}
    spec = {"resources": {"requests": {"nvidia.com/gpu": "8"}}, "nodes": 4}
    document = {**DOCUMENT, "spec": spec, "status": status}
    (row,) = table(ALLOCATION, [document], now_seconds=NOW, list_meta={})["rows"]
    assert {"4x8", "a +3"} <= set(row["cells"])


def test_rows_carry_what_the_client_asks_for() -> None:
    (metadata_only,) = table(ALLOCATION, [DOCUMENT], now_seconds=NOW)["rows"]
    assert metadata_only["object"] == {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": DOCUMENT["metadata"],
    }
    (whole,) = table(ALLOCATION, [DOCUMENT], now_seconds=NOW, include_object="Object")["rows"]
    assert whole["object"] == DOCUMENT
    (bare,) = table(ALLOCATION, [DOCUMENT], now_seconds=NOW, include_object="None")["rows"]
    assert set(bare) == {"cells"}


def test_later_events_of_a_watch_leave_the_columns_out() -> None:
    assert table(ALLOCATION, [DOCUMENT], now_seconds=NOW, with_columns=False)["columnDefinitions"] is None


def test_integers_are_numbers() -> None:
    one = {"metadata": {"name": "high"}, "value": 100}
    assert 100 in table(PRIORITY_CLASS, [one], now_seconds=NOW)["rows"][0]["cells"]


@pytest.mark.parametrize(
    ("timestamp", "shown"),
    [
        ("2024-01-15T10:29:55Z", "5s"),
        ("2024-01-13T10:30:00Z", "2d"),
        ("2024-01-15T10:29:55", UNKNOWN_AGE),
        ("yesterday", UNKNOWN_AGE),
        (None, UNKNOWN_AGE),
    ],
)
def test_age(timestamp: object, shown: str) -> None:
    assert age(timestamp, NOW) == shown
