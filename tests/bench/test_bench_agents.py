"""The benchmark of agents, small: that it runs through, and that its figures are of one run."""

import json

import pytest
from click.testing import CliRunner

from bursar.bench.crowd import percentile_ms
from bursar.bench.main import bench


@pytest.mark.parametrize(
    ("waits", "fraction", "expected"),
    [([], 0.5, 0.0), ([0.001, 0.002, 0.003], 0.5, 2.0), ([0.001] * 99 + [1.0], 0.99, 1000.0)],
)
def test_percentiles(waits: list[float], fraction: float, expected: float) -> None:
    assert percentile_ms(waits, fraction) == expected


def test_the_command_prints_one_object_last() -> None:
    options = ["--agents", "12", "--heartbeat", "0.2", "--seconds", "1", "--secure", "3", "--binds", "4", "--json"]
    result = CliRunner().invoke(bench, ["agents", *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["agents"], figures["mtls_agents"]) == ("agents", 12, 3)
    assert (figures["directives"], figures["directives_missing"]) == (4, 0)
    assert 0 < figures["directive_p50_ms"] <= figures["directive_p99_ms"]
    assert figures["heartbeats_per_s"] > 0
    assert figures["max_heartbeats_per_s"] > 0
    assert figures["mtls_max_heartbeats_per_s"] > 0
    assert {"beat_p50_ms", "beat_p99_ms", "kb_per_agent", "missed_beats", "cores"} <= figures.keys()
