"""How things are printed."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from bursar.cli.objects.describe import described
from bursar.cli.shell.output import (
    TableColumns,
    due,
    lines,
    moments,
    pairs,
    print_documents,
    print_rows,
    say,
    to_yaml,
    widths,
)
from bursar.cli.shell.resource_arg import ResourceType

ALLOCATION = ResourceType("Allocation", "allocations", True, ("alloc",))
TABLE: dict[str, Any] = {
    "kind": "Table",
    "columnDefinitions": [
        {"name": "Name", "priority": 0},
        {"name": "Phase", "priority": 0},
        {"name": "Age"},
        {"name": "Node", "priority": 1},
    ],
    "rows": [
        {
            "cells": ["train", "Running", "5m", "gpu-1"],
            "object": {"metadata": {"name": "train", "namespace": "ml-team", "labels": {"b": "2", "a": "1"}}},
        },
        {"cells": ["a-long-name", "Pending", "2d3h", None], "object": {"metadata": {"namespace": "x"}}},
    ],
}


def test_columns_are_aligned_and_nothing_trails(capsys: pytest.CaptureFixture[str]) -> None:
    columns = TableColumns()
    print_rows(columns.header(TABLE), columns.rows(TABLE))
    assert capsys.readouterr().out == (
        "NAME          PHASE     AGE\n"
        "train         Running   5m\n"
        "a-long-name   Pending   2d3h\n"
    )  # fmt: skip


def test_wide_namespace_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    columns = TableColumns(wide=True, with_namespace=True, with_labels=True)
    print_rows(columns.header(TABLE), columns.rows(TABLE))
    assert capsys.readouterr().out == (
        "NAMESPACE   NAME          PHASE     AGE    NODE     LABELS\n"
        "ml-team     train         Running   5m     gpu-1    a=1,b=2\n"
        "x           a-long-name   Pending   2d3h   <none>   <none>\n"
    )


def test_later_tables_of_a_watch_have_the_columns_of_the_first() -> None:
    columns = TableColumns()
    columns.header(TABLE)
    later = {"columnDefinitions": None, "rows": [{"cells": ["train", "Succeeded", "9m", "gpu-1"]}]}
    assert columns.rows(later) == [["train", "Succeeded", "9m"]]


def test_a_cell_is_one_line() -> None:
    assert TableColumns().rows({**TABLE, "rows": [{"cells": ["a\nb", "\t", 3, ""]}]}) == [["a b", "", "3"]]


def test_a_row_wider_than_the_others_is_not_cut() -> None:
    width = widths([["Name", "Age"], ["a", "5m"]])
    assert lines(["Name", "Age"], [["much-longer", "1s"]], width, with_header=False) == ["much-longer   1s"]


def test_yaml_comes_back_as_it_was() -> None:
    document = {"a": "1", "b": ["x", None, True], "c": {"d": "no"}, "e": "été 🎉", "f": "8000m"}
    assert yaml.safe_load(to_yaml(document)) == document
    assert "été" in to_yaml(document)


def test_several_objects_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    print_documents([{"a": 1}], "yaml", as_list=True)
    assert capsys.readouterr().out == "apiVersion: v1\nkind: List\nitems:\n- a: 1\n"
    print_documents([{"a": 1}], "json", as_list=False)
    assert capsys.readouterr().out == '{\n  "a": 1\n}\n'


@pytest.mark.parametrize(
    ("output", "dry_run", "said"),
    [
        ("table", False, "allocation/train created\n"),
        ("table", True, "allocation/train created (dry run)\n"),
        ("name", False, "allocation/train\n"),
    ],
)
def test_what_was_done_is_said(output: str, dry_run: bool, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(ALLOCATION, {"metadata": {"name": "train"}}, "created", output, dry_run=dry_run)
    assert capsys.readouterr().out == said


def test_pairs() -> None:
    assert pairs({"b": 2, "a": 1}) == "a=1,b=2"
    assert pairs(None) == "<none>"


def test_describing() -> None:
    document = {
        "metadata": {"name": "train", "namespace": "ml-team", "labels": {"app": "x", "team": "y"}},
        "spec": {
            "priority": 100,
            "exclusive": False,
            "resources": {"requests": {"nvidia.com/gpu": "4"}},
            "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "b"}],
            "args": ["a", "b"],
            "nothing": {},
        },
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "Scheduled", "status": "False", "reason": "Waiting", "message": "in\nline"}],
        },
    }
    events = [{"type": "Normal", "reason": "Created", "message": "accepted", "lastTimestamp": "never"}]
    assert list(described(ALLOCATION, document, events)) == [
        "Name:         train",
        "Namespace:    ml-team",
        "Kind:         Allocation",
        "Labels:       app=x",
        "              team=y",
        "Annotations:  <none>",
        "Created:      <none>",
        "Spec:",
        "  priority: 100",
        "  exclusive: false",
        "  resources:",
        "    requests:",
        "      nvidia.com/gpu: 4",
        "  tolerations:",
        "    - key: gpu",
        "      operator: Exists",
        "    - key: b",
        "  args:",
        "    - a",
        "    - b",
        "  nothing: <none>",
        "Status:",
        "  phase: Pending",
        "Conditions:",
        "  TYPE        STATUS   SINCE       REASON    MESSAGE",
        "  Scheduled   False    <unknown>   Waiting   in line",
        "Events:",
        "  TYPE     REASON    AGE         MESSAGE",
        "  Normal   Created   <unknown>   accepted",
    ]


def test_times_are_told_as_people_read_them() -> None:
    at = datetime.now(UTC) + timedelta(days=3)
    text, clock = f"{at:%Y-%m-%dT%H:%M:%SZ}", f"{at:%Y-%m-%d %H:%M} UTC"
    assert due(text) == f"in about 3 days ({clock})"
    assert moments(f"it tries again at {text}, after 1 failed") == (
        f"it tries again at {clock} (in about 3 days), after 1 failed"
    )
    assert due("soon") == "soon"
    assert due("2024-01-15T10:30:00Z") == "now"
