"""Parts of everything are killed under load, and the whole control plane is away: nothing is lost, nothing runs twice.

With BURSAR_SOAK=1 there is more of it: many kills, hundreds of simulated nodes, and two minutes without anybody.
"""

import asyncio
import itertools
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bursar.client import AsyncClient, Client
from bursar.client.errors import BursarError
from bursar.sim.fake_executor import FakeBehaviour
from bursar.sim.shape import NodeShape
from bursar.sim.stream import AgentNodes
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
from support.scheduling.evictions import assert_books_balance

SOAK = bool(os.environ.get("BURSAR_SOAK"))
COMMANDS = 600 if SOAK else 48
ROUNDS = 8 if SOAK else 2  # in each of which everybody is killed once
CROWD = 300 if SOAK else 12
LOST_SECONDS = 15  # far above the time that a busy machine holds a heartbeat up: nobody may be lost while all are there
AWAY_SECONDS = 120.0 if SOAK else 1.5 * LOST_SECONDS
SECONDS_MAX = 300.0 if SOAK else 90.0

pytestmark = pytest.mark.timeout(1800 if SOAK else 240)


# Kills under load.


@pytest.fixture
def context() -> Iterator[tuple[OwnServer, int]]:
    port = free_port()
    with migrated_directory() as data, started(data, grpc_port=port) as running:
        yield running, port


def test_whoever_is_killed_under_load_everything_ends_once_and_as_it_should(
    context: tuple[OwnServer, int], tmp_path: Path
) -> None:
    server, port = context
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    victims = [dice.sample(["agent", "api", "controller", "postgres"], 4) for _ in range(ROUNDS)]
    kills = dict(zip(sorted(dice.sample(range(COMMANDS), 4 * ROUNDS)), itertools.chain(*victims), strict=True))
    with server.client() as client, opened_net(port) as net:
        set_patience(client)
        with opened_fleet(server, client, net, tmp_path) as fleet:
            codes = {f"c-{number}": dice.choice([0, 0, 1, 77]) for number in range(COMMANDS)}
            for number, (name, code) in enumerate(codes.items()):
                script = f"echo {name} >> {tmp_path}/ran; sleep {dice.uniform(0.05, 1):.2f}; exit {code}"
                submit_surely(fleet, name, script)
                if number in kills:
                    kill(server, fleet, kills[number], dice)
            until(lambda: all_ended(client, codes), f"everything ending, with seed {seed}", SECONDS_MAX)
            assert ends(client) == codes, f"with seed {seed}"
            ran = (tmp_path / "ran").read_text().split()
            assert sorted(ran) == sorted(codes), "each once"
            fleet.mend()
            assert_nothing_left(fleet)
            asyncio.run(assert_nothing_placed(server))


def submit_surely(fleet: Fleet, name: str, script: str) -> None:
    surely(lambda: fleet.submit(name, "sh", "-c", script), name)


def all_ended(client: Client, codes: dict[str, int]) -> bool:
    try:
        phases = [one["status"]["phase"] for one in client.allocations("default").list()]
    except BursarError:
        return False
    return len(phases) == len(codes) and set(phases) <= {"Succeeded", "Failed"}


def ends(client: Client) -> dict[str, int | None]:
    return {one["metadata"]["name"]: one["status"].get("exitCode") for one in client.allocations("default").list()}


async def assert_nothing_placed(server: OwnServer) -> None:
    async with runtime_of(server) as runtime:
        await assert_books_balance(runtime)
        async with runtime.database.reader() as db:
            assert await db.fetchval("SELECT count(*) FROM placement") == 0


# Nobody is there.


async def test_nothing_is_given_up_when_the_control_plane_was_away_for_long(tmp_path: Path) -> None:
    """Killed, all of it, for longer than it takes a node to be lost. Work ended meanwhile; the rest goes on."""
    http, port = free_port(), free_port()
    ledgers = {f"w-{index}": Ledger(tmp_path / f"w-{index}") for index in range(6)}
    with (
        migrated_directory() as data,
        opened_net(port) as net,
        started(data, http, grpc_port=port) as first,
        first.client() as client,
    ):
        set_patience(client, runLeaseSeconds=3600, lostSeconds=LOST_SECONDS)
        async with crowd(first, f"127.0.0.1:{port}") as nodes:
            with opened_fleet(first, client, net, tmp_path) as fleet:
                await asyncio.to_thread(begin, fleet, ledgers, nodes)
                first.process.kill()
                first.process.wait()
                await asyncio.to_thread(be_away, ledgers, nodes)
                with started(data, http, grpc_port=port) as second:
                    await asyncio.to_thread(come_back, second, ledgers, nodes)
                    await assert_nobody_was_lost(second)


@asynccontextmanager
async def crowd(server: OwnServer, address: str) -> AsyncIterator[AgentNodes]:
    """Simulated nodes with certificates, in an event loop that nothing of the test holds up."""
    async with AsyncClient(server.url, server.token) as client:
        shape = NodeShape(CROWD, prefix=f"crowd-{uuid.uuid4().hex[:4]}", labels={"kind": "crowd"})
        nodes = AgentNodes(client, shape, address, FakeBehaviour(), insecure=False)
        await nodes.open()
        task = asyncio.create_task(nodes.run())
        try:
            yield nodes
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def begin(fleet: Fleet, ledgers: dict[str, Ledger], nodes: AgentNodes) -> None:
    """Of both kinds of work: on leases, and without."""
    for index, (name, ledger) in enumerate(ledgers.items()):
        fleet.submit(name, *ledger.command(code=index), **({"onNodeLost": "requeue"} if index % 2 else {}))
    for index in range(2 * CROWD):
        submit_to_crowd(fleet.client, f"s-{index}", **({"onNodeLost": "requeue"} if index % 2 else {}))
    until(lambda: all(ledger.is_alive(5.0) for ledger in ledgers.values()), "real work running", SECONDS_MAX)
    until(lambda: nodes.running == 2 * CROWD, "pretended work running", SECONDS_MAX)
    until(lambda: len(running(fleet.client)) == 2 * CROWD + len(ledgers), "all of it being known", SECONDS_MAX)


def submit_to_crowd(client: Client, name: str, **spec: Any) -> None:
    body = {"resources": {"requests": {"cpu": "1"}}, "nodeSelector": {"kind": "crowd"}, **spec}
    client.allocations("default").create({"metadata": {"name": name}, "spec": body})


def running(client: Client) -> dict[str, int]:
    """What runs, and of which placement."""
    found = client.allocations("default").list()
    return {one["metadata"]["name"]: one["status"]["epoch"] for one in found if one["status"]["phase"] == "Running"}


def be_away(ledgers: dict[str, Ledger], nodes: AgentNodes) -> None:
    back_at = time.monotonic() + AWAY_SECONDS
    for name in ("w-0", "w-1"):
        ledgers[name].finish()
    until(lambda: time.monotonic() > back_at, "the time passing", AWAY_SECONDS + 5)
    assert nodes.running == 2 * CROWD
    assert [name for name, ledger in ledgers.items() if ledger.is_alive(5.0)] == ["w-2", "w-3", "w-4", "w-5"]


def come_back(server: OwnServer, ledgers: dict[str, Ledger], nodes: AgentNodes) -> None:
    with server.client() as client:
        until(lambda: {"w-0", "w-1"}.isdisjoint(running(client)), "what ended being told", SECONDS_MAX)
        until(lambda: set(phases(client).values()) == {"Ready"}, "all nodes being ready", SECONDS_MAX)
        # For as long as somebody who counts from the wrong moment would take to give them up.
        over_at = time.monotonic() + 1.3 * LOST_SECONDS
        until(lambda: time.monotonic() > over_at or "Lost" in phases(client).values(), "the time passing")
        assert "Lost" not in phases(client).values()
        assert nodes.running == 2 * CROWD
        now = running(client)
        assert set(now) == {f"s-{index}" for index in range(2 * CROWD)} | {"w-2", "w-3", "w-4", "w-5"}
        assert set(now.values()) == {1}, "nothing was placed again"
        for ledger in ledgers.values():
            ledger.finish()
        until(lambda: not [name for name in running(client) if name.startswith("w-")], "the rest ending", SECONDS_MAX)
        told = ends(client)
        assert [told[name] for name in ledgers] == list(range(len(ledgers)))
        assert [len(ledger.intervals()) for ledger in ledgers.values()] == [1] * len(ledgers)


def phases(client: Client) -> dict[str, str]:
    return {one["metadata"]["name"]: one["status"].get("phase", "") for one in client.nodes.list()}


async def assert_nobody_was_lost(server: OwnServer) -> None:
    async with runtime_of(server) as runtime:
        await assert_books_balance(runtime)
        async with runtime.database.reader() as db:
            lost = "SELECT count(*) FROM change WHERE kind = 'Node' AND fields ->> 'status.phase' = 'Lost'"
            ended = "SELECT count(*) FROM change WHERE kind = 'Allocation' AND actor = 'system:nodes' AND verb = 'end'"
            assert (await db.fetchval(lost), await db.fetchval(ended)) == (0, 0)
