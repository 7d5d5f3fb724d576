"""`bursar serve` with a Waldur on loopback: its figure counts for the scheduler while it answers, else ours."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest

from bursar.client import Client
from bursar.config import ConfigError, WaldurSettings, waldur_from_environment
from support.process.server import migrated_directory, started
from support.process.waldurs import TOKEN, WaldurServer, serving

SOAK = bool(os.environ.get("BURSAR_SOAK"))
WAIT_SECONDS_MAX = 90.0
OFFERING = "6c0b9d7e-6e0a-4f6e-9d0e-3c7f4f5d7a11"
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def waldur(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WaldurServer]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with serving() as server:
        monkeypatch.setenv("BURSAR_WALDUR_URL", f"{server.url}/api/")
        monkeypatch.setenv("BURSAR_WALDUR_TOKEN_FILE", str(token))
        monkeypatch.setenv("BURSAR_WALDUR_OFFERINGS", str(server.offering))
        monkeypatch.setenv("BURSAR_WALDUR_POLL_SECONDS", "1")
        yield server
        assert server.faults == []


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.2)


def test_waldurs_figure_reaches_the_scheduler_while_it_answers_and_ours_when_it_does_not(waldur: WaldurServer) -> None:
    resource = waldur.resource("physics", limits={"gpu_hours": 1000}, limit_usage={"gpu_hours": 1000})
    with migrated_directory() as data, started(data) as server, server.client() as client:
        client.tenants.create({"metadata": {"name": "physics"}, "spec": {"gpuHoursBudget": 1000}})
        client.namespaces.create({"metadata": {"name": "physics", "labels": {"bursar.io/tenant": "physics"}}})
        client.allocations("physics").create(
            {"metadata": {"name": "a"}, "spec": {"resources": {"requests": {"cpu": 1}}}}
        )
        until(lambda: usage(client) == ("waldur", 1.0))
        until(lambda: penalty(client) == pytest.approx(0.05))
        assert 'bursar_budget_source_answers{source="waldur"} 1.0' in client.request("GET", "/metrics")

        waldur.plan = [503] * 1000
        until(lambda: usage(client) == ("internal", 0.0))
        until(lambda: penalty(client) == 1.0)
        assert 'bursar_budget_source_answers{source="waldur"} 0.0' in client.request("GET", "/metrics")

        waldur.plan, resource.limit_usage["gpu_hours"] = [], 500.0  # type: ignore[index]
        until(lambda: usage(client) == ("waldur", 0.5))
        if not SOAK:
            return
        (reader,) = readers(server.process.pid)
        reader.kill()
        until(lambda: [one.pid for one in readers(server.process.pid)] not in ([], [reader.pid]))
        resource.limit_usage["gpu_hours"] = 600.0  # type: ignore[index]
        until(lambda: usage(client) == ("waldur", 0.6))


def usage(client: Client) -> tuple[str, float]:
    found = client.tenant_usage("physics")
    return found["source"], found["utilization"]


def penalty(client: Client) -> Any:
    return client.allocations("physics").explain("a")["share"]["budgetPenalty"]


def readers(parent: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(parent).children():
        try:
            if one.cmdline()[-1:] == ["waldur"]:
                found.append(one)
        except psutil.NoSuchProcess:
            continue
    return found


# Waldur's client is not installed: said by a None where modules are looked for.
WITHOUT = """
import sys
for name in ("waldur_api_client", "waldur_site_agent", "httpx"):
    sys.modules[name] = None
import bursar.bench.main, bursar.bridges.budget, bursar.bridges.waldur_tenant, bursar.serve
from bursar.main import main
main()
"""


def without_client(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, env={**environment, **settings}, capture_output=True, text=True, timeout=60)


def test_without_waldurs_client_everything_else_starts(tmp_path: Path) -> None:
    assert without_client("serve", "--help").returncode == 0
    wanted = {"BURSAR_WALDUR_URL": "https://waldur.example.com", "BURSAR_WALDUR_TOKEN_FILE": str(tmp_path / "token"),
              "BURSAR_WALDUR_OFFERINGS": OFFERING}  # fmt: skip
    for command in (("serve", "--data", str(tmp_path)), ("waldur", "--database-url", "postgresql://nowhere")):
        refused = without_client(*command, **wanted)
        assert (refused.returncode, "pip install 'bursar[waldur]'" in refused.stderr) == (1, True), refused.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"URL": "waldur.example.com"}, "must be a URL"),
        ({"URL": "http://waldur.example.com"}, "must use https"),
        ({"TOKEN_FILE": ""}, "needs BURSAR_WALDUR_TOKEN_FILE"),
        ({"OFFERINGS": "mine"}, "must be the offerings' UUIDs"),
        ({"GPU_HOURS": "gpu:many"}, "BURSAR_WALDUR_GPU_HOURS must be a number above 0"),
        ({"POLL_SECONDS": "0"}, "BURSAR_WALDUR_POLL_SECONDS must be a number above 0"),
    ],
)
def test_settings_that_cannot_be_used_are_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], said: str
) -> None:
    usable = {"URL": "https://waldur.example.com", "TOKEN_FILE": "token", "OFFERINGS": OFFERING}
    for name, value in {**usable, **settings}.items():
        monkeypatch.setenv(f"BURSAR_WALDUR_{name}", value)
    with pytest.raises(ConfigError, match=said):
        waldur_from_environment()


def test_settings_are_read_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waldur_from_environment() is None
    given = {"URL": "https://waldur.example.com/api/", "TOKEN_FILE": "token", "OFFERINGS": f"{OFFERING}, {OFFERING}",
             "GPU_HOURS": "kgpu:1000", "CA_FILE": "ca.pem"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"BURSAR_WALDUR_{name}", value)
    assert waldur_from_environment() == WaldurSettings(
        "https://waldur.example.com", Path("token"), (UUID(OFFERING),) * 2, ("kgpu", 1000.0), ("node_hours", 1.0),
        Path("ca.pem"), 20.0,
    )  # fmt: skip
