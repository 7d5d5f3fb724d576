"""What a node can be told to run, and what it cannot."""

from typing import Any

import msgspec
import pytest

from bursar.wire.kinds.allocation import ALLOCATION, Allocation
from bursar.wire.kinds.job import JOB, Job


def faults(spec: dict[str, Any]) -> dict[str, str]:
    one = msgspec.convert({"metadata": {"name": "a"}, "spec": spec}, Allocation)
    return {cause.field: cause.message for cause in ALLOCATION.check(one)}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"command": ["sh", "-c", "echo 'ü' \n", ""], "env": {"A": "", "_b.c-D1": "x=y\n"}, "workingDir": "/"},
        {"env": [{"name": "A"}, {"name": "B", "value": "1"}]},
        {"command": ["x" * 100_000], "env": {"A": "x" * 100_000}, "workingDir": "/" + "x" * 4094},
        {"command": ["x"] * 10_000, "workingDir": ""},
    ],
)
def test_what_can_be_started_is_accepted(spec: dict[str, Any]) -> None:
    assert faults(spec) == {}


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"command": ["", "x"]}, "spec.command[0]", "must name a program"),
        ({"command": ["a", "b\0"]}, "spec.command[1]", "NUL"),
        ({"command": ["a", "x" * 100_001]}, "spec.command[1]", "100001 bytes"),
        ({"command": ["a", "ü" * 50_001]}, "spec.command[1]", "100002 bytes"),
        ({"command": ["x"] * 10_001}, "spec.command", "at most 10000 entries"),
        ({"command": ["x" * 90_000] * 12}, "spec.command", "at most 1000000 fit"),
        ({"command": ["x" * 90_000] * 6, "env": {f"A{n}": "x" * 90_000 for n in range(6)}}, "spec.command", "fit"),
        ({"env": {"1A": "x"}}, "spec.env[1A]", "not the name of a variable"),
        ({"env": {"A=B": "x"}}, "spec.env[A]", "not the name of a variable"),
        ({"env": {"": "x"}}, "spec.env[]", "not the name of a variable"),
        ({"env": {"Ä": "x"}}, "spec.env[Ä]", "not the name of a variable"),
        ({"env": {"A\n": "x"}}, "spec.env[A\n]", "not the name of a variable"),
        ({"env": {"A": "x\0"}}, "spec.env[A]", "NUL"),
        ({"env": {"A": "x" * 100_001}}, "spec.env[A]", "100001 bytes"),
        ({"env": [{"name": "A B"}]}, "spec.env[0].name", "not the name of a variable"),
        ({"env": [{"name": "A", "value": "\0"}]}, "spec.env[0].value", "NUL"),
        ({"env": [{"name": "A"}, {"name": "A"}]}, "spec.env", "A more than once"),
        ({"env": {f"A{n}": "" for n in range(1001)}}, "spec.env", "at most 1000 entries"),
        ({"workingDir": "data"}, "spec.workingDir", "absolute"),
        ({"workingDir": "~/data"}, "spec.workingDir", "absolute"),
        ({"workingDir": "/a\0"}, "spec.workingDir", "NUL"),
        ({"workingDir": "/" + "x" * 4095}, "spec.workingDir", "4095 bytes"),
    ],
)
def test_what_cannot_be_started_is_refused(spec: dict[str, Any], field: str, words: str) -> None:
    found = faults(spec)
    assert list(found) == [field]
    assert words in found[field]


def test_a_jobs_template_is_looked_at_in_the_same_way() -> None:
    spec = {"template": {"spec": {"command": ["true"], "env": {"1A": ""}, "workingDir": "here"}}}
    one = msgspec.convert({"metadata": {"name": "a"}, "spec": spec}, Job)
    fields = [cause.field for cause in JOB.check(one)]
    assert [field.rpartition("spec.")[2] for field in fields] == ["env[1A]", "workingDir"]
