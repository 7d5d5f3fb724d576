"""The benchmark of reports, small: that it runs through, that what it made is right, and its figures are of one run."""

import json

import pytest
from click.testing import CliRunner

from bursar.bench import usage
from bursar.bench.main import bench


def test_the_command_prints_one_object_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "RUNS_AT_ONCE", 2000)  # one tenant after the other
    options = ["--records", "5000", "--tenants", "3", "--users", "2", "--reports", "4", "--json"]
    result = CliRunner().invoke(bench, ["usage", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["rows"], figures["tenants"]) == ("usage", 5000, 3)
    assert 0 < figures["tenant_year_ms"] <= figures["tenant_year_p99_ms"]
    assert 0 < figures["user_year_ms"] <= figures["user_year_p99_ms"]
    assert figures["scan_vs_report"] == round(figures["scan_ms"] / figures["tenant_year_ms"], 1)
    assert {"fill_s", "cores"} <= figures.keys()
