"""The benchmark of leases, small: that it runs through, and that its figures are of one run."""

import json

import click
import pytest
from click.testing import CliRunner

from bursar.bench.main import bench


def test_the_command_prints_one_object_last() -> None:
    options = ["--jobs", "40", "--delta", "0.5", "--seconds", "1", "--accounts", "4", "--json"]
    result = CliRunner().invoke(bench, ["leases", *options])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["jobs"], figures["hot_jobs"]) == ("leases", 40, 20)
    assert figures["offered_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["max_per_s"] > 0
    assert figures["hot_max_per_s"] > 0
    assert figures["max_vs_baseline"] == round(figures["max_per_s"] / figures["baseline_tx_per_s"], 2)
    assert {"extended_per_s", "max_p99_ms", "hot_p99_ms", "baseline_connections", "cores"} <= figures.keys()


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_no_float_option_of_a_benchmark_takes_what_is_no_number(text: str) -> None:
    floats = [
        (command, option)
        for command in bench.commands.values()
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(floats) > 4
    for command, option in floats:
        with pytest.raises(click.BadParameter):
            option.type.convert(text, option, click.Context(command))
    assert CliRunner().invoke(bench, ["leases", "--seconds", text]).exit_code == 2
