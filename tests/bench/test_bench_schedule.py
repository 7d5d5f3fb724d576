"""The benchmark of the scheduler, small: that it runs through, and that all of it was placed."""

import json

import click
import pytest
from click.testing import CliRunner

from bursar.bench import schedule
from bursar.bench.main import bench
from bursar.bench.schedule import TooMuch, _bind_backlog, measure_decisions, require_capacity
from bursar.bench.server import register
from bursar.ops.runtime.runtime import Runtime
from bursar.sim.shape import NodeShape
from support.runtime.runtime import namespace


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--nodes", "500", "--allocations", "4000"], "at most 3200 --allocations"),
        (["--nodes", "30", "--allocations", "81", "--mix", "gang"], "a multiple of 8"),
        (["--nodes", "10", "--allocations", "8", "--singles", "50"], "fewer --singles"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_what_would_wait_for_ever_is_refused_at_once(options: list[str], told: str) -> None:
    result = CliRunner().invoke(bench, ["schedule", *options])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())


def test_what_just_fits_is_not_refused() -> None:
    require_capacity(nodes=500, allocations=3200, mix="basic", singles=300)
    with pytest.raises(TooMuch):
        require_capacity(nodes=500, allocations=3201, mix="basic", singles=300)


def test_deciding_on_more_than_fits_ends() -> None:
    for mix in ("basic", "preempt", "spread"):
        assert measure_decisions(nodes=2, allocations=200, mix=mix)["decided"] < 200


@pytest.mark.parametrize(
    "options",
    [["api", "--watchers", "0"], ["api", "--seconds", "0"], ["leases", "--delta", "0"], ["agents", "--binds", "0"]],
)
def test_what_cannot_be_measured_is_refused(options: list[str]) -> None:
    assert CliRunner().invoke(bench, options).exit_code == 2


async def test_a_backlog_that_does_not_fit_is_given_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "STALL_SECONDS", 0.0)
    await register(runtime, NodeShape(1))
    for index in range(schedule.TENANTS):
        await namespace(runtime, f"team-{index}")
    with pytest.raises(TooMuch, match="nothing more was"):
        await _bind_backlog(runtime, 9, "basic")


def test_every_count_of_a_benchmark_has_a_maximum() -> None:
    """Without one, a benchmark of a mistyped number fills the disk or the memory before it ends."""
    counts = [
        (name, option.opts[0], option.type)
        for name, command in bench.commands.items()
        for option in command.params
        if isinstance(option.type, click.types.IntParamType)
    ]
    assert len(counts) > 10
    assert [one[:2] for one in counts if not isinstance(one[2], click.IntRange) or one[2].max is None] == []
