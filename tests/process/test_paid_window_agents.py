"""Paid work on real agents: keys that change while it runs, and agents that are killed within and after paid time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from joserfc import jws

from bursar.agent.executor.journal import Journal
from bursar.agent.machine.paid_window import PaidWindow
from bursar.agent.shim.clock import boot_seconds
from bursar.client import Client
from bursar.core.values.money import nanocredits
from support.process.agents import Agent, await_phase, joined_agent, living, submit, until
from support.process.faults import set_patience
from support.process.server import OwnServer, migrated_directory, started

pytestmark = pytest.mark.timeout(240)

PAID_SECONDS = 8
GRACE_SECONDS = 1
SLACK_SECONDS = 5  # for a machine that is busy with other tests
PER_SECOND = "0.01"  # of a whole core: a tenth of one costs a nanocredit for each microsecond


@pytest.fixture(scope="module")
def context() -> Iterator[OwnServer]:
    with migrated_directory() as data, started(data) as running:
        yield running


@pytest.fixture(scope="module")
def client(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        set_patience(one, killGraceSeconds=GRACE_SECONDS)
        one.request("POST", "/api/v1/prices", body={"resource": "cpu", "per_second": PER_SECOND, "request_id": "p"})
        topup = {"account": "default", "amount": "1000", "request_id": "t"}
        one.request("POST", "/api/v1/topups", body=topup)
        billing = {"mode": "prepaid", "leaseSeconds": PAID_SECONDS}
        one.tenants.patch("default", {"spec": {"billing": billing}})
        one.settings.patch("system", {"spec": {"credits": {"reconcileSeconds": 1}}})
        yield one


@pytest.fixture
def agent(context: OwnServer, client: Client, tmp_path: Path) -> Iterator[Agent]:
    name = f"n-{uuid.uuid4().hex[:8]}"
    with joined_agent(context, client, name, tmp_path) as one:
        yield one


@dataclass(frozen=True, slots=True)
class Work:
    """Paid work that lasts until somebody ends it."""

    client: Client
    agent: Agent
    name: str
    uid: str
    pid: int

    @property
    def folder(self) -> Path:
        (found,) = (self.agent.data / "work" / "placements").glob(f"{self.uid}.*")
        return found

    @property
    def paid_window(self) -> PaidWindow:
        """What the agent's journal says of it, as another life would read it."""
        copy = self.agent.data.with_name(f"{uuid.uuid4().hex}.journal")
        copy.write_bytes((self.agent.data / "work" / "journal").read_bytes())
        journal = Journal(copy)
        journal.close()
        return journal.known.paid_windows[self.uid, 1]

    @property
    def ran_micros(self) -> int:
        """For how long, as what watched over it has written down."""
        status = until(lambda: _read(self.folder / "status"), "its end being written down")
        return round(float(json.loads(status)["seconds"]) * 1_000_000)

    @property
    def lease(self) -> dict[str, Any]:
        query = {"job_id": self.uid, "account": "default"}
        # It may end between the two questions: the later answer counts.
        found = {one["epoch"]: one for state in ("open", "ended") for one in self._leases(**query, state=state)}
        return found[1]

    def _leases(self, **query: str) -> list[dict[str, Any]]:
        return list(self.client.request("GET", "/api/v1/leases", query=query)["items"])

    def lives(self) -> bool:
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def await_more(self, what: str) -> None:
        """It is paid beyond what was granted until now."""
        granted = boot_seconds() + PAID_SECONDS
        until(lambda: self.paid_window.paid.until > granted, what)

    def await_true_cost(self) -> None:
        """A nanocredit for each microsecond, and for not one more."""
        ran = self.ran_micros
        until(lambda: nanocredits(self.lease["cost"]) == ran, f"a cost of {ran} nanocredits")
        assert (self.lease["state"] != "open", nanocredits(self.lease["held"])) == (True, 0)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def begun(client: Client, agent: Agent) -> Work:
    number = uuid.uuid4().int % 10**9
    name, mark = f"w-{number}", f"1000.{number:09}"
    submit(client, name, agent.name, "sleep", mark)
    await_phase(client, name, "Running")
    (pid,) = until(lambda: living(mark), f"{name} running")
    return Work(client, agent, name, client.allocations("default").get(name)["metadata"]["uid"], pid)


def key_of(one: PaidWindow) -> str:
    return str(jws.extract_compact(one.token.encode()).headers()["kid"])


def test_keys_change_while_paid_work_runs_and_nothing_is_disturbed(client: Client, agent: Agent) -> None:
    work = begun(client, agent)
    for overlap_seconds in (3600, 0):
        made = client.request("POST", "/api/v1/ledger/keys", body={"overlapSeconds": overlap_seconds})["key"]
        until(lambda key=made: key_of(work.paid_window) == key, "a token by the new key")  # type: ignore[misc]
        work.await_more("more time by the new key")
    published = client.request("GET", "/.well-known/jwks.json")["keys"]
    assert [one["kid"] for one in published] == [made]
    assert work.lives()
    assert "lease_token_rejected" not in agent.said
    client.allocations("default").delete(work.name)
    work.await_true_cost()


def test_an_agent_that_is_killed_and_comes_back_within_paid_time_goes_on_where_it_was(
    client: Client, agent: Agent
) -> None:
    work = begun(client, agent)
    agent.kill()
    left = work.paid_window
    assert left.paid.until > boot_seconds(), "the test was too slow to tell anything"
    agent.start()
    work.await_more("more paid time in the next life")
    assert work.lives()
    assert work.paid_window.paid.used_seconds >= left.paid.used_seconds
    assert work.paid_window.paid.lease == left.paid.lease
    client.allocations("default").delete(work.name)
    work.await_true_cost()


def test_what_a_killed_agent_leaves_ends_with_paid_time_and_costs_what_it_ran(client: Client, agent: Agent) -> None:
    work = begun(client, agent)
    agent.kill()
    paid_until = work.paid_window.paid.until
    until(lambda: not work.lives(), "its end without an agent")
    ended_at = float((work.folder / "started").read_bytes().split()[2]) + work.ran_micros / 1_000_000
    assert ended_at <= paid_until + GRACE_SECONDS + SLACK_SECONDS
    agent.start()
    work.await_true_cost()
