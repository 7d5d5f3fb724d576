"""The benchmark of the scheduler, small: that it runs through, and that all of it was placed."""

import json

import pytest
from click.testing import CliRunner

from bursar.bench.main import bench
from bursar.bench.schedule import measure_decisions


@pytest.mark.parametrize("mix", ["basic", "affinity", "spread", "gang", "preempt"])
def test_every_mix_is_decided(mix: str) -> None:
    figures = measure_decisions(nodes=20, allocations=40, mix=mix)
    assert figures["decided"] == 40
    assert figures["decide_per_s"] > 0
    assert figures["loop_per_s"] > 0


def test_the_command_prints_one_object_last() -> None:
    options = ["--nodes", "30", "--allocations", "80", "--mix", "gang", "--singles", "3", "--json"]
    result = CliRunner().invoke(bench, ["schedule", *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["nodes"], figures["mix"]) == ("schedule", 30, "gang")
    assert (figures["decided"], figures["bound"], figures["singles"]) == (80, 80, 3)
    assert figures["bound_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert 0 < figures["served_p50_ms"] <= figures["served_p99_ms"]


def test_no_submission_cannot_be_measured() -> None:
    result = CliRunner().invoke(bench, ["schedule", "--singles", "0"])
    assert result.exit_code == 2
    assert "--singles" in result.output
