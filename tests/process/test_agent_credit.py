"""Prepaid work with real agents: paid by each heartbeat, warned, frozen, ended, and never unpaid for long."""

import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bursar.client import Client
from bursar.client.errors import NotFound
from support.process.agents import Agent, joined_agent, until
from support.process.faults import Fleet, Ledger, Net, assert_nothing_left, opened_net, set_patience
from support.process.server import OwnServer, free_port, migrated_directory, started

pytestmark = pytest.mark.timeout(240)

GPU = "nvidia.com/gpu"
WINDOW = 6  # seconds that each heartbeat pays ahead
GRACE = 1  # in which what has no more time must die
SLACK = 2.0  # what a busy machine may need to notice something


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def context(port: int) -> Iterator[OwnServer]:
    with migrated_directory() as data, started(data, grpc_port=port) as running:
        yield running


@pytest.fixture(scope="module")
def client(context: OwnServer) -> Iterator[Client]:
    """A second of a GPU costs one credit."""
    with context.client() as one:
        set_patience(one, killGraceSeconds=GRACE)
        one.settings.patch("system", {"spec": {"credits": {"throttleSecondsMax": 60, "reconcileSeconds": 0}}})
        order = {"resource": GPU, "class": "h100", "per_second": "1", "request_id": uuid.uuid4().hex}
        one.request("POST", "/api/v1/prices", body=order)
        yield one


@pytest.fixture(scope="module")
def net(port: int) -> Iterator[Net]:
    with opened_net(port) as one:
        yield one


@pytest.fixture(scope="module")
def fleet(context: OwnServer, client: Client, net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = ("--grpc", net.link("gpu-1"), "--label", "gpu-type=h100", "--fake-gpus", "4")
    with joined_agent(context, client, "gpu-1", tmp_path_factory.mktemp("agents"), *options) as agent:
        one = Fleet(client, net, {"gpu-1": agent}, "")
        one.mend()
        yield one


@dataclass(slots=True)
class Lab:
    """A tenant that pays for each window before it begins, and has one GPU's work to do."""

    client: Client
    fleet: Fleet
    name: str
    ledger: Ledger

    @property
    def agent(self) -> Agent:
        return self.fleet.agents["gpu-1"]

    def top_up(self, amount: str) -> None:
        order = {"amount": amount, "account": self.name, "request_id": uuid.uuid4().hex}
        self.client.request("POST", "/api/v1/topups", body=order)

    def limit(self, **limits: Any) -> None:
        self.client.request("PUT", f"/api/v1/limits/{self.name}", body=limits)

    def balance(self) -> tuple[Decimal, Decimal]:
        """What is there, and what of it is held."""
        found = self.client.request("GET", f"/api/v1/balance?account={self.name}")
        return Decimal(found["posted"]), Decimal(found["holds"])

    def submit(self, *, code: int = 0, stubborn: bool = False, **spec: Any) -> None:
        body = {
            "resources": {"requests": {"cpu": "10m", GPU: "1"}},
            "command": self.ledger.command(code=code, stubborn=stubborn),
            **spec,
        }
        self.client.allocations(self.name).create({"metadata": {"name": "work"}, "spec": body})

    def begin(self, **spec: Any) -> None:
        self.submit(**spec)
        self.await_phase("Running")
        until(self.ledger.is_alive, "the command running")

    def status(self) -> dict[str, Any]:
        try:
            return dict(self.client.allocations(self.name).get("work")["status"])
        except NotFound:
            return {}

    def await_phase(self, *phases: str) -> dict[str, Any]:
        def arrived() -> dict[str, Any] | None:
            status = self.status()
            return status if status.get("phase") in phases else None

        found: dict[str, Any] = until(arrived, f"the work becoming {' or '.join(phases)}")
        return found

    def output(self) -> str:
        folders = self.agent.data / "work" / "placements"
        files = sorted(folders.glob(f"{self.uid()}.*/output.*"))
        return "".join(one.read_text(errors="replace") for one in files)

    def uid(self) -> str:
        return str(self.client.allocations(self.name).get("work")["metadata"]["uid"])

    def events(self) -> list[str]:
        """The reasons of the work's events, the last one last."""
        path = f"/api/v1/namespaces/{self.name}/events?fieldSelector=involvedObject.name=work"
        return [str(one["reason"]) for one in self.client.request("GET", path)["items"]]

    def seconds_run(self) -> float:
        """As far as the work itself says."""
        return sum((one.last - one.began) / 1e9 for one in self.ledger.intervals())


@pytest.fixture
def lab(fleet: Fleet, client: Client, tmp_path: Path) -> Iterator[Lab]:
    fleet.mend()
    name = f"t-{uuid.uuid4().hex[:8]}"
    billing = {"mode": "prepaid", "leaseSeconds": WINDOW}
    client.tenants.create({"metadata": {"name": name}, "spec": {"billing": billing}})
    client.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    one = Lab(client, fleet, name, Ledger(tmp_path / "ledger"))
    yield one
    fleet.mend()
    if one.status():
        client.allocations(name).delete("work", grace_period_seconds=0)
        until(lambda: not one.status(), "the work being gone")
    assert_nothing_left(fleet)


def assert_paid_for(lab: Lab, credit: str) -> None:
    """Exactly what ran was paid for: nothing is held any more, and what is gone is the time that it ran."""
    posted, held = lab.balance()
    spent = float(Decimal(credit) - posted)
    assert held == 0
    assert lab.seconds_run() <= spent <= lab.seconds_run() + SLACK


def test_work_is_paid_for_heartbeat_by_heartbeat_and_settled_to_what_it_ran(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin(code=3)
    until(lambda: lab.balance()[0] < 97, "three seconds being posted")
    posted, held = lab.balance()
    assert 0 < held <= WINDOW, "one window is held ahead, and no more"
    lab.ledger.finish()
    status = lab.await_phase("Succeeded", "Failed")
    assert status["exitCode"] == 3
    assert lab.balance()[0] <= posted
    assert_paid_for(lab, "100")


def test_who_has_no_credit_does_not_start(lab: Lab) -> None:
    lab.top_up("1")
    lab.submit()
    until(lambda: lab.status().get("reason") == "insufficient_credit", "being told why")
    assert not lab.ledger.lines()
    lab.top_up("100")
    lab.await_phase("Running")
    lab.ledger.finish()
    lab.await_phase("Succeeded")


@pytest.mark.parametrize("stubborn", [False, True])
def test_when_credit_is_exhausted_it_is_warned_asked_and_ended(lab: Lab, stubborn: bool) -> None:
    lab.top_up(str(WINDOW + 2))
    lab.begin(stubborn=stubborn)
    until(lambda: "out of credit: stopping in" in lab.output(), "the warning")
    assert lab.ledger.is_alive(1.0), "it has the rest of what is paid"
    status = lab.await_phase("Failed", "Succeeded", "Pending")
    assert (status["phase"], status["reason"]) == ("Failed", "CreditExhausted")
    assert status["message"] == "stopped: its account ran out of credit"
    assert "asked" in {line[0] for line in lab.ledger.lines()}
    posted, held = lab.balance()
    assert held == 0
    assert 0 <= posted < 2, "all that was paid for was used"
    # Never unpaid for longer than the grace.
    assert lab.seconds_run() <= WINDOW + 2 + GRACE + SLACK


def test_topped_up_in_the_last_window_it_goes_on(lab: Lab) -> None:
    lab.top_up(str(WINDOW + 2))
    lab.begin(code=4)
    until(lambda: "out of credit: stopping in" in lab.output(), "the warning")
    lab.top_up("100")
    until(lambda: "paid again" in lab.output(), "the relief")
    until(lambda: lab.balance()[0] < 98, "it running for longer than there was credit")
    lab.ledger.finish()
    status = lab.await_phase("Succeeded", "Failed")
    assert status["exitCode"] == 4
    assert len(lab.ledger.intervals()) == 1
    assert "asked" not in {line[0] for line in lab.ledger.lines()}
    assert "reason" not in status
    assert [one for one in lab.events() if "Credit" in one] == ["OutOfCredit", "CreditRestored"]
    assert_paid_for(lab, str(WINDOW + 2 + 100))


def test_what_spends_too_fast_is_frozen_and_thawed(lab: Lab) -> None:
    lab.top_up("1000")
    lab.limit(spend_rate="0.5", spend_burst=str(WINDOW))
    lab.begin(code=5)
    until(lambda: "over the spend rate limit: freezing in" in lab.output(), "the warning")
    until(lambda: "frozen: over the spend rate limit" in lab.output(), "being frozen")
    until(lambda: not lab.ledger.is_alive(1.0), "standing still")
    lines = len(lab.ledger.lines())
    until(lambda: lab.status().get("reason") == "SpendRateExceeded", "saying so")
    assert lab.status()["phase"] == "Running"
    until(lambda: len(lab.ledger.lines()) > lines, "going on")
    until(lambda: "reason" not in lab.status(), "saying so no more")
    lab.ledger.finish()
    status = lab.await_phase("Succeeded", "Failed")
    assert status["exitCode"] == 5
    # Nobody pays for the time in which it stood still.
    posted, held = lab.balance()
    wall = lab.seconds_run()
    stood = max(late - early for early, late in breaths(lab.ledger))
    assert stood > 2.0
    assert held == 0
    assert float(1000 - posted) <= wall - stood + SLACK


def breaths(ledger: Ledger) -> Iterator[tuple[float, float]]:
    times = [int(line[4]) / 1e9 for line in ledger.lines()]
    return pairwise(times)


def test_work_of_a_killed_agent_stops_by_itself_when_its_paid_time_is_over(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin(stubborn=True)
    lab.agent.kill()
    killed_at = time.monotonic_ns()
    until(lambda: not lab.ledger.is_alive(2.0), "it ending by itself")
    assert (lab.ledger.intervals()[0].last - killed_at) / 1e9 <= WINDOW + GRACE + SLACK
    lab.agent.start()
    # It was nobody's wish that it ends: it waits again, is paid for again, and runs again.
    until(lambda: len(lab.ledger.intervals()) == 2, "it running again")
    lab.ledger.finish()
    assert lab.await_phase("Succeeded", "Failed")["phase"] == "Succeeded"
    lab.ledger.assert_never_two()
    # Should its lease have lapsed before the agent was back, its grace is charged when that is reconciled.
    until(lambda: float(100 - lab.balance()[0]) >= lab.seconds_run(), "all of it being charged")
    assert_paid_for(lab, "100")


def test_an_agent_that_is_back_in_time_loses_nothing(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin(code=6)
    lab.agent.kill()
    lab.agent.start()
    until(lambda: lab.seconds_run() > WINDOW + GRACE, "it running for longer than was paid when it was killed")
    lab.ledger.finish()
    assert lab.await_phase("Succeeded", "Failed")["exitCode"] == 6
    assert len(lab.ledger.intervals()) == 1
    assert_paid_for(lab, "100")


def test_work_stops_when_the_control_plane_is_away_for_longer_than_is_paid(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin()
    lab.fleet.net.cut("gpu-1")
    cut_at = time.monotonic_ns()
    until(lambda: not lab.ledger.is_alive(2.0), "it ending by itself")
    assert (lab.ledger.intervals()[0].last - cut_at) / 1e9 <= WINDOW + GRACE + SLACK
    until(lambda: lab.balance()[1] == 0, "what was held being settled")
    assert 0 < Decimal(100) - lab.balance()[0] <= round(lab.seconds_run()) + WINDOW
    lab.fleet.net.heal()
    until(lambda: len(lab.ledger.intervals()) == 2, "it running again")
    lab.ledger.finish()
    lab.await_phase("Succeeded")
    lab.ledger.assert_never_two()


def test_a_short_absence_of_the_control_plane_is_nobodys_end(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin(code=7)
    lab.fleet.net.cut("gpu-1")
    lab.fleet.net.heal()
    until(lambda: lab.seconds_run() > WINDOW + GRACE, "it running for longer than was paid when it was cut off")
    lab.ledger.finish()
    assert lab.await_phase("Succeeded", "Failed")["exitCode"] == 7
    assert len(lab.ledger.intervals()) == 1
    assert_paid_for(lab, "100")


def test_a_paused_agent_cannot_let_work_run_unpaid(lab: Lab) -> None:
    lab.top_up("100")
    lab.begin(stubborn=True)
    process = lab.agent.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    paused_at = time.monotonic_ns()
    try:
        until(lambda: not lab.ledger.is_alive(2.0), "it ending by itself")
        assert (lab.ledger.intervals()[0].last - paused_at) / 1e9 <= WINDOW + GRACE + SLACK
    finally:
        process.send_signal(signal.SIGCONT)
    until(lambda: len(lab.ledger.intervals()) == 2, "it running again")
    lab.ledger.finish()
    lab.await_phase("Succeeded")
    lab.ledger.assert_never_two()
