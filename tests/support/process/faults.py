"""What can go wrong between nodes and their control plane, at a test's word; and work that tells when it ran."""

import asyncio
import os
import random
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import psutil
from anyio.from_thread import start_blocking_portal

from bursar.client import Client
from bursar.ops.runtime.runtime import Runtime
from support.process.agents import Agent, joined_agent, part, status_of, until, users_of
from support.process.server import OwnServer
from support.runtime.runtime import opened

# As short as a busy machine allows: a heartbeat that comes two seconds late must not be a fault.
SHORT = {
    "heartbeatSeconds": 1,
    "notReadySeconds": 4,
    "lostSeconds": 6,
    "runLeaseSeconds": 5,
    "killGraceSeconds": 1,
    "clockSkewSeconds": 1,
}


def set_patience(client: Client, **seconds: int) -> None:
    client.settings.patch("system", {"spec": {"nodes": {**SHORT, **seconds}}})


# The network.


class Link:
    """Loopback between one agent and the server. It can be cut, or let nothing through for a while."""

    def __init__(self, port: int) -> None:
        self.address = ""
        self._port = port
        self._cut = False
        self._flowing = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._flowing.set()
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        await self.cut()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def cut(self) -> None:
        """Every connection is reset, and every new one."""
        self._cut = True
        for writer in list(self._writers):
            _reset(writer)

    async def stall(self) -> None:
        """Connections stay, nothing arrives; what was sent arrives when that is over."""
        self._flowing.clear()

    async def heal(self) -> None:
        self._cut = False
        self._flowing.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        if self._cut:
            _reset(writer)
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            _reset(writer)
            return
        self._writers.add(back)
        for source, sink in ((reader, back), (there, writer)):
            pump = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        await self._flowing.wait()
        sink.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    if (line := writer.get_extra_info("socket")) is not None and not writer.transport.is_closing():
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Net:
    """A link for each node, kept by an event loop in a thread of its own."""

    def __init__(self, portal: Any, port: int) -> None:
        self._portal = portal
        self._port = port
        self._links: dict[str, Link] = {}

    def link(self, node: str) -> str:
        """The address at which this node finds the server."""
        link = self._links[node] = Link(self._port)
        self._portal.call(link.open)
        return link.address

    def cut(self, node: str) -> None:
        self._portal.call(self._links[node].cut)

    def stall(self, node: str) -> None:
        self._portal.call(self._links[node].stall)

    def heal(self) -> None:
        for link in self._links.values():
            self._portal.call(link.heal)

    def close(self) -> None:
        self.heal()
        for link in self._links.values():
            self._portal.call(link.close)


@contextmanager
def opened_net(port: int) -> Iterator[Net]:
    with start_blocking_portal() as portal:
        net = Net(portal, port)
        try:
            yield net
        finally:
            net.close()


# Nodes.


@dataclass(slots=True)
class Fleet:
    """A few nodes with agents, each behind a link of its own. Work asks for them by their common label."""

    client: Client
    net: Net
    agents: dict[str, Agent]
    pool: str

    def phase(self, node: str) -> str:
        return str(self.client.nodes.get(node)["status"].get("phase", ""))

    def await_phase(self, node: str, phase: str) -> None:
        until(lambda: self.phase(node) == phase, f"node {node} being {phase}")

    def mend(self) -> None:
        """All nodes are there and ready, as a test may expect."""
        self.net.heal()
        for agent in self.agents.values():
            if agent.process is None or agent.process.poll() is not None:
                agent.kill()
                agent.start()
        for name in self.agents:
            self.await_phase(name, "Ready")

    def clear(self) -> None:
        """Whatever a test left here goes."""
        allocations = self.client.allocations("default")
        for one in allocations.list():
            allocations.delete(one["metadata"]["name"], grace_period_seconds=0)
        until(lambda: not list(allocations.list()), "everything being gone")

    def submit(self, name: str, *command: str, **spec: Any) -> None:
        requests = {"requests": {"cpu": "10m", "memory": "16Mi"}}
        body = {"resources": requests, "nodeSelector": {"pool": self.pool}, "command": list(command), **spec}
        self.client.allocations("default").create({"metadata": {"name": name}, "spec": body})

    def where(self, name: str) -> str:
        return str(status_of(self.client, name).get("nodeName", ""))


@contextmanager
def opened_fleet(server: OwnServer, client: Client, net: Net, home: Path, count: int = 3) -> Iterator[Fleet]:
    pool = f"p-{uuid.uuid4().hex[:6]}"
    with ExitStack() as stack:
        agents = {}
        for number in range(count):
            name = f"{pool}-{number}"
            options = ("--grpc", net.link(name), "--label", f"pool={pool}", "--fake-gpus", "0")
            agents[name] = stack.enter_context(joined_agent(server, client, name, home, *options))
        fleet = Fleet(client, net, agents, pool)
        fleet.mend()
        yield fleet


# Kills.


def kill(server: OwnServer, fleet: Fleet, victim: str, dice: random.Random) -> None:
    if victim == "agent":
        agent: Agent = dice.choice(list(fleet.agents.values()))
        agent.kill()
        agent.start()
    else:
        os.kill(until(lambda: found(server, victim), f"{victim} being there"), signal.SIGKILL)


def found(server: OwnServer, victim: str) -> int:
    try:
        return part(server, victim)
    except (ValueError, psutil.Error):
        return 0


@asynccontextmanager
async def runtime_of(server: OwnServer) -> AsyncIterator[Runtime]:
    """A runtime of our own on the server's database."""
    elsewhere = server.data / "socket-dir"
    socket = Path(elsewhere.read_text().strip()) if elsewhere.exists() else server.data / "run"
    async with opened(f"postgresql:///bursar?user=bursar&host={quote(str(socket), safe='')}") as one:
        yield one


# Work that tells when it runs.

WORK = """
import fcntl, os, signal, sys, time
path, code, manner = os.path.expandvars(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o644)
who = "%s %s %d" % (os.environ["BURSAR_NODE"], os.environ["BURSAR_EPOCH"], os.getpid())

def say(what):
    os.write(ledger, ("%s %s %d\\n" % (what, who, time.monotonic_ns())).encode())

def asked(number, frame):
    say("asked")
    if manner != "stubborn":
        say("end")
        os._exit(143)

signal.signal(signal.SIGTERM, asked)
say("start")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    say("beside")
while not os.path.exists(path + ".go"):
    time.sleep(0.02)
    say("alive")
say("end")
sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class Interval:
    node: str
    epoch: int
    pid: int
    began: int  # nanoseconds of the machine's monotonic clock
    last: int
    ended: bool = field(compare=False)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every run of one command writes when it began, that it lives, and when it ended."""

    path: Path

    def command(self, *, code: int = 0, stubborn: bool = False) -> list[str]:
        """Runs until `finish`. Who is stubborn does not heed SIGTERM."""
        manner = "stubborn" if stubborn else "polite"
        return [sys.executable, "-I", "-S", "-c", WORK, str(self.path), str(code), manner]

    def finish(self) -> None:
        self.path.with_name(f"{self.path.name}.go").touch()

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def intervals(self) -> list[Interval]:
        """In the order in which they began."""
        found: dict[tuple[str, str, str], list[list[str]]] = {}
        for line in self.lines():
            found.setdefault((line[1], line[2], line[3]), []).append(line)
        return sorted(
            (
                Interval(node, int(epoch), int(pid), int(some[0][4]), int(some[-1][4]), some[-1][0] == "end")
                for (node, epoch, pid), some in found.items()
            ),
            key=lambda one: one.began,
        )

    def nodes(self) -> list[str]:
        return [one.node for one in self.intervals()]

    def is_alive(self, seconds: float = 0.5) -> bool:
        """Whether it was heard just now."""
        some = self.intervals()
        return bool(some) and not some[-1].ended and time.monotonic_ns() - some[-1].last < seconds * 1e9

    def assert_never_two(self, *, frozen: bool = False) -> None:
        """Nobody did anything beside another; nor was there anybody, unless it was `frozen`."""
        assert frozen or not [line for line in self.lines() if line[0] == "beside"], "two ran at once"
        intervals = self.intervals()
        for one, other in pairwise(intervals):
            assert one.last < other.began, f"{one} and {other} ran at once"


def assert_nothing_left(fleet: Fleet) -> None:
    """Of what ran there, on any node."""
    for agent in fleet.agents.values():
        until(lambda agent=agent: _is_empty(agent), f"{agent.name} being empty")  # type: ignore[misc]


def _is_empty(agent: Agent) -> bool:
    return set(users_of(agent.data)) <= ({agent.process.pid} if agent.process is not None else set())


def metric(server: OwnServer, name: str) -> float:
    headers = {"authorization": f"Bearer {server.token}"}
    text = httpx2.get(f"{server.url}/metrics", headers=headers, timeout=30, trust_env=False).text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))
