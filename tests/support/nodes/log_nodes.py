"""Nodes that keep logs: the agent's real log server with real certificates, over a directory that the test writes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bursar.agent.control.identity import AgentIdentity
from bursar.agent.control.server import Snapshot, opened_app
from bursar.agent.machine.types import Directive, Place
from bursar.ops.nodes.node_ca import enrol
from bursar.ops.nodes.x509 import Issued
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import heartbeat
from bursar.store.nodes.heartbeat import NodeSession
from support.nodes.certificates import new_key, pem_of, request_for


@dataclass(slots=True)
class Logbook:
    """What a node keeps, by uid and epoch; a placement is live until it is ended."""

    name: str
    home: Path
    ended: set[Place] = field(default_factory=set)
    address: str = ""

    def write(self, uid: str, epoch: int, data: bytes, at: int = 0) -> None:
        folder = self.home / f"{uid}.{epoch}"
        folder.mkdir(exist_ok=True)
        with (folder / f"output.{at}").open("ab") as file:
            file.write(data)

    def end(self, uid: str, epoch: int) -> None:
        self.ended.add((uid, epoch))

    def log(self, place: Place) -> tuple[Path, Callable[[], bool]] | None:
        folder = self.home / f"{place[0]}.{place[1]}"
        return (folder, lambda: place in self.ended) if folder.exists() else None

    def tell(self, directive: Directive) -> None:
        raise AssertionError(directive)

    def snapshot(self) -> Snapshot:
        raise AssertionError("nobody asks for it here")


@asynccontextmanager
async def kept(
    runtime: Runtime, name: str, home: Path, *, insecure: bool = False, shows: str = ""
) -> AsyncIterator[Logbook]:
    """A registered node whose agent can be called. `shows`: the node whose certificate it shows instead of its own."""
    key = new_key()
    issued = await enrol(runtime.database, shows or name, request_for(key))
    assert isinstance(issued, Issued)
    identity = AgentIdentity(
        name=shows or name, key=pem_of(key), certificate=issued.certificate, authority=issued.authority, addresses=(),
        begins=now(), expires=issued.expires_at,
    )  # fmt: skip
    ledger = Logbook(name, home)
    async with opened_app(ledger, "127.0.0.1:0", identity=None if insecure else lambda: identity) as port:
        ledger.address = f"127.0.0.1:{port}"
        await advertise(runtime, name, ledger.address)
        yield ledger


async def advertise(runtime: Runtime, name: str, address: str) -> None:
    """As its first heartbeat would have reported."""
    async with runtime.database.reader() as db:
        heard = await heartbeat.save_first(db, [NodeSession(name, f"session-{address}", 0, 0, address, "test")])
    assert name in heard
