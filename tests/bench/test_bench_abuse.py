"""The benchmark of abuse, small: that it runs through, ends by itself, and that its figures are of one run."""

import json

from click.testing import CliRunner

from bursar.bench.main import bench


def test_the_command_prints_one_object_last() -> None:
    result = CliRunner().invoke(bench, ["abuse", "--seconds", "0.5", "--list-mb", "2", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["half_open"], figures["list_mb"]) == ("abuse", 200, 2)
    assert figures["strangers_open"] == 212
    for name in ("get", "submit"):
        assert figures[f"{name}_p99_ms_idle"] > 0
        assert figures[f"{name}_p99_ms_abused"] > 0
        assert figures[f"{name}_p99_ratio"] > 0
