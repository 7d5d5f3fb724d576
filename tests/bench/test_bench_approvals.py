"""The benchmark of the quota service, small: that it runs through, and that its figures are of one run."""

import json

import pytest
from click.testing import CliRunner

from bursar.bench.main import bench


@pytest.mark.timeout(180)
def test_the_command_prints_one_object_last() -> None:
    result = CliRunner().invoke(bench, ["approvals", "--requests", "40", "--tenants", "4", "--raises", "4", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["requests"], figures["tenants"]) == ("approvals", 40, 4)
    assert figures["submitted_per_s"] > 0
    assert figures["decided_per_s"] == pytest.approx(40 / figures["seconds"], abs=1)
    assert 0 < figures["raise_ms"] <= figures["raise_p99_ms"]
    assert figures["cores"] > 0
