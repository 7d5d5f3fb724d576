"""Credit when everybody is killed, cut off and lost, as real processes: what it cost is what ran, to the last digit.

API, controller, PostgreSQL and agents die at any moment while paid work runs and money moves. Then everything heals,
and the books are compared with what the nodes themselves have measured. With BURSAR_SOAK=1 there is more of it.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from bursar.client import Client
from bursar.client.errors import BursarError
from bursar.core.values.money import nanocredits
from bursar.ops.runtime.runtime import Runtime
from support.credit.credit_audit import audit, verify
from support.credit.flaky_payers import Teller, order_surely
from support.credit.sealings import unguarded
from support.process.agents import surely, until
from support.process.faults import (
    Fleet,
    Ledger,
    assert_nothing_left,
    kill,
    opened_fleet,
    opened_net,
    runtime_of,
    set_patience,
)
from support.process.server import OwnServer, free_port, migrated_directory, started
from support.runtime.postgres_proxy import Proxy
from support.runtime.runtime import opened

SOAK = bool(os.environ.get("BURSAR_SOAK"))
ROUNDS = 12 if SOAK else 1  # in each of which everybody is killed once
CUT_SECONDS = 120.0 if SOAK else 4.0  # in which connections to the database are cut at COMMIT
LOST = 3 if SOAK else 1  # how often a node is away until it is given up
SECONDS_MAX = 300.0 if SOAK else 90.0

WINDOW = 6  # seconds that are paid ahead
GRACE, CLOCK = 1, 2  # seconds: in which what is unpaid must die, and by which clocks may differ
PER_SECOND = "12.3456789"  # of a core
RATE = nanocredits("0.123456789")  # of the hundredth of one that each command asks for
STRICT, RESERVE, POOR = TENANTS = ("strict", "reserve", "poor")

pytestmark = pytest.mark.timeout(1800 if SOAK else 240)


@pytest.fixture
def seed() -> int:
    """Told with whatever fails."""
    number = int(os.environ.get("BURSAR_TEST_SEED") or random.randrange(10**6))
    sys.stderr.write(f"BURSAR_TEST_SEED={number}\n")
    return number


@dataclass(slots=True)
class PaidCluster:
    """Two nodes, three tenants that pay beforehand, and their work."""

    server: OwnServer
    client: Client
    fleet: Fleet
    teller: Teller
    home: Path
    dice: random.Random
    long: dict[str, Ledger] = field(default_factory=dict)
    short: list[str] = field(default_factory=list)

    @property
    def ran(self) -> Path:
        return self.home / "ran"

    def submit(self, tenant: str, name: str, command: list[str], **spec: Any) -> None:
        wants = {"requests": {"cpu": "10m"}}
        body = {"resources": wants, "nodeSelector": {"pool": self.fleet.pool}, "command": command, **spec}
        document = {"metadata": {"name": name}, "spec": body}
        surely(lambda: self.client.allocations(tenant).create(document), name)

    def begin(self) -> None:
        """Work that lasts, of each tenant: some of it moves when its node is lost, some does not heed SIGTERM."""
        for tenant in TENANTS:
            for number, spec in enumerate(({}, {"onNodeLost": "requeue"})):
                name = f"{tenant}-{number}"
                ledger = self.long[name] = Ledger(self.home / name)
                self.submit(tenant, name, ledger.command(stubborn=number == 0), **spec)
        until(lambda: all(one.lines() for one in self.long.values()), "everything running", SECONDS_MAX)

    def trickle(self) -> None:
        """Some work that soon ends by itself."""
        name = f"s-{len(self.short)}"
        script = f"echo {name}.$BURSAR_EPOCH >> {self.ran}; sleep {self.dice.uniform(0.05, 1.5):.2f}"
        self.submit(self.dice.choice(TENANTS), name, ["sh", "-c", script])
        self.short.append(name)

    def heal(self) -> None:
        """Everybody is there, everything may end, and there is credit for it."""
        self.fleet.mend()
        order_surely(self.teller, POOR, "1000", "relief")
        for one in self.long.values():
            one.finish()
        until(self._all_ended, "everything ending", SECONDS_MAX)
        assert_nothing_left(self.fleet)

    def _all_ended(self) -> bool:
        try:
            phases = [one["status"]["phase"] for one in self._work()]
        except BursarError:
            return False
        return len(phases) == len(self.long) + len(self.short) and set(phases) <= {"Succeeded", "Failed"}

    def _work(self) -> list[dict[str, Any]]:
        return [one for tenant in TENANTS for one in self.client.allocations(tenant).list()]

    def assert_ended_well(self) -> None:
        """Nothing failed but for want of credit, and nothing ran twice."""
        failed = [one for one in self._work() if one["status"]["phase"] != "Succeeded"]
        assert {one["metadata"]["namespace"] for one in failed} <= {POOR}
        assert {one["status"]["reason"] for one in failed} <= {"CreditExhausted"}
        for ledger in self.long.values():
            ledger.assert_never_two()
            epochs = [one.epoch for one in ledger.intervals()]
            assert len(set(epochs)) == len(epochs), "one placement, one run"
        ran = self.ran.read_text().split() if self.ran.exists() else []
        assert len(set(ran)) == len(ran), "one placement, one run"
        assert {line.partition(".")[0] for line in ran} == set(self.short)


@contextmanager
def opened_context(server: OwnServer, port: int, home: Path, dice: random.Random) -> Iterator[PaidCluster]:
    with server.client() as client, opened_net(port) as net:
        set_patience(client, killGraceSeconds=GRACE, clockSkewSeconds=CLOCK)
        credits_ = {"reserveSeconds": 2 * WINDOW, "reconcileSeconds": 1, "sealSeconds": 1}
        client.settings.patch("system", {"spec": {"credits": credits_}})
        client.request("POST", "/api/v1/prices", body={"resource": "cpu", "per_second": PER_SECOND})
        teller = Teller(server, TENANTS, dice)
        for tenant, mode, credit in ((STRICT, "strict", "1000"), (RESERVE, "reserve", "1000"), (POOR, "strict", "2.5")):
            billing = {"mode": "prepaid", "leaseMode": mode, **({"leaseSeconds": WINDOW} if mode == "strict" else {})}
            client.tenants.create({"metadata": {"name": tenant}, "spec": {"billing": billing}})
            client.namespaces.create({"metadata": {"name": tenant, "labels": {"bursar.io/tenant": tenant}}})
            order_surely(teller, tenant, credit, f"first-{tenant}")
        with opened_fleet(server, client, net, home, 2) as fleet:
            yield PaidCluster(server, client, fleet, teller, home, dice)


async def _audit(context: PaidCluster, runtime: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
    async with runtime() as one:
        await audit(one, context.fleet.agents.values(), context.teller, RATE, GRACE + CLOCK)


# Kills.


def test_whoever_is_killed_everything_costs_what_it_ran_and_every_request_counts_once(
    seed: int, tmp_path: Path
) -> None:
    dice, port = random.Random(seed), free_port()
    with (
        migrated_directory() as data,
        started(data, grpc_port=port) as server,
        opened_context(server, port, tmp_path, dice) as context,
    ):
        context.begin()
        with context.teller.at_work():
            for _ in range(ROUNDS):
                for victim in dice.sample(["agent", "api", "controller", "postgres"], 4):
                    context.trickle()
                    time.sleep(dice.uniform(0, 1.2))  # any moment may be the worst
                    kill(server, context.fleet, victim, dice)
            for _ in range(LOST):
                be_lost(context)
        context.heal()
        asyncio.run(_audit(context, lambda: runtime_of(server)))
        context.assert_ended_well()
        assert context.teller.cuts > 0
        assert verify(server)[0] == 0, verify(server)
        asyncio.run(assert_tampering_is_found(server, dice))


def be_lost(context: PaidCluster) -> None:
    """A node is away until all that it left is settled without it; then it comes back, and knows better."""
    name = context.dice.choice(sorted(context.fleet.agents))
    agent = context.fleet.agents[name]
    agent.kill()
    until(lambda: is_lost(context, name), f"{name} being lost", SECONDS_MAX)
    asyncio.run(await_given_up(context, name))
    agent.start()


def is_lost(context: PaidCluster, name: str) -> bool:
    try:
        return context.fleet.phase(name) == "Lost"
    except BursarError:
        return False


async def await_given_up(context: PaidCluster, name: str) -> None:
    """The leases of what ran there have ended, and those of what may run elsewhere by now are reconciled."""
    left = """
        SELECT (SELECT count(*) FROM lease WHERE node = $1 AND started_at > 0)
             + (SELECT count(*)
                  FROM lease_ended AS ended
                 WHERE node = $1 AND reconciled_at IS NULL
                   AND NOT EXISTS (SELECT FROM placement WHERE (uid, epoch) = (ended.uid, ended.epoch)))
    """
    async with runtime_of(context.server) as runtime:
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            async with runtime.database.reader() as db:
                if await db.fetchval(left, name) == 0:
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"what {name} left was not given up")


# Somebody who owns the database.


async def assert_tampering_is_found(server: OwnServer, dice: random.Random) -> None:
    async with runtime_of(server) as runtime:
        async with runtime.database.reader() as db:
            number = dice.randrange(1, await db.fetchval("SELECT last FROM ledger") + 1)
        async with unguarded(runtime) as db:
            await db.execute("UPDATE entry SET amount = amount + 1 WHERE number = $1", number)
            code, said = verify(server)
            assert (code, f"entry {number}" in said) == (1, True), said
            await db.execute("UPDATE entry SET amount = amount - 1 WHERE number = $1", number)
            assert verify(server)[0] == 0
            account = await db.fetchval("UPDATE account SET posted = posted + 1 WHERE tenant = 'strict' RETURNING id")
            code, said = verify(server)
            assert (code, f"account {account}" in said) == (1, True), said


# Connections to the database that are lost at COMMIT.


async def test_whatever_connections_are_cut_at_commit_everything_costs_what_it_ran(
    seed: int, database_url: str, tmp_path: Path
) -> None:
    """Those of the whole control plane: before the COMMIT, during it, and after it but before the answer."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Proxy(database_url)) as proxy:
        await asyncio.to_thread(cut_at_commit, proxy, seed, tmp_path)
        assert set(proxy.cuts) == {"before", "during", "after"}


def cut_at_commit(proxy: Proxy, seed: int, home: Path) -> None:
    dice, port = random.Random(seed), free_port()
    with (
        migrated_directory() as data,
        started(data, grpc_port=port, database_url=proxy.url) as server,
        opened_context(server, port, home, dice) as context,
    ):
        context.begin()
        plan = random.Random(seed)
        proxy.plan = iter(lambda: plan.choice(["pass"] * 6 + ["before", "during", "after"]), None)
        with context.teller.at_work():
            over_at = time.monotonic() + CUT_SECONDS
            while time.monotonic() < over_at:
                context.trickle()
                time.sleep(dice.uniform(0, 1))
        proxy.plan = iter(())
        context.heal()
        asyncio.run(_audit(context, lambda: opened(proxy.url)))
        context.assert_ended_well()
        assert verify(server)[0] == 0, verify(server)
