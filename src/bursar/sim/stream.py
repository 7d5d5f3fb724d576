"""Simulated nodes over gRPC: enrolment of simulated agents, and their streams.

An administrator's token enrols them. Each gets a key and a certificate of its own, and is registered if it is new. With
a server that runs `--grpc-insecure`, on loopback, they are only registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bursar.agent.control.identity import certificate_request, reachable
from bursar.client.calls import ROOT, segment
from bursar.client.errors import Conflict, NotFound
from bursar.rlimit import allow_open_files
from bursar.sim.agents import AgentCrowd
from bursar.sim.fake_executor import FakeBehaviour
from bursar.sim.registry import SimRegistry, several
from bursar.sim.shape import NodeShape, documents
from bursar.sim.transport import PlainTransport, SecureTransport, SimCredentials, Transport

if TYPE_CHECKING:
    from bursar.client import AsyncClient

# Before the end of a certificate's 24 hours.
RENEW_BEFORE = timedelta(hours=8)


class _Signed(msgspec.Struct):
    """The server's answer to a certificate signing request."""

    certificate: str
    authority: str
    expires: str


class _Authority(msgspec.Struct):
    address: str = ""


async def find_address(client: AsyncClient) -> str:
    """The gRPC address for agents; empty if the server serves none or does not know it."""
    try:
        answer = msgspec.convert(await client.request("GET", f"{ROOT}/authority"), _Authority)
    except NotFound:
        return ""
    return reachable(answer.address, client.context.url) if answer.address else ""


class Enroller:
    """Enrols nodes through the public API, and registers new ones."""

    def __init__(self, client: AsyncClient, nodes: Mapping[str, dict[str, Any]]) -> None:
        self._client = client
        self._nodes = nodes
        self._fresh: dict[str, SimCredentials] = {}

    async def enrol_all(self) -> None:
        self._fresh = dict(zip(self._nodes, await several(self._enrol, self._nodes), strict=True))

    async def credentials(self, name: str) -> SimCredentials:
        """The credentials of the enrolment, once; then new ones."""
        return self._fresh.pop(name, None) or await self._enrol(name)

    async def _enrol(self, name: str) -> SimCredentials:
        key = new_key()
        order = {"certificateRequest": certificate_request(key, name).decode(), "node": self._nodes[name]}
        answer = await self._client.request("POST", f"{ROOT}/nodes/{segment(name)}/certificates", body=order)
        signed = msgspec.convert(answer, _Signed)
        renew_at = datetime.fromisoformat(signed.expires) - RENEW_BEFORE
        return SimCredentials(signed.certificate.encode(), signed.authority.encode(), renew_at, key)


class AgentNodes:
    """`open` enrols the nodes, `run` simulates them until cancelled, `remove` deletes those without work.

    It needs an administrator's token."""

    def __init__(
        self, client: AsyncClient, shape: NodeShape, address: str, manner: FakeBehaviour, *, insecure: bool
    ) -> None:
        allow_open_files()
        self._client = client
        self._roll = SimRegistry(client, shape)
        self._documents = {one["metadata"]["name"]: one for one in documents(shape)}
        self._enroller = Enroller(client, self._documents)
        self._insecure = insecure
        self._line: Transport = (
            PlainTransport(address) if insecure else SecureTransport(address, self._enroller.credentials)
        )
        capacity: Mapping[str, str] = next(iter(self._documents.values()))["spec"]["capacity"]
        self._crowd = AgentCrowd(shape.names, self._line, manner=manner, capacity=capacity)

    @property
    def running(self) -> int:
        return self._crowd.running

    @property
    def ended(self) -> int:
        return self._crowd.ended

    async def open(self) -> None:
        """Enrol or register the nodes, and adopt those of an earlier run."""
        await self._roll.check()
        if self._insecure:
            ours = await self._roll.registered()
            await several(self._register, [one for name, one in self._documents.items() if name not in ours])
        else:
            await self._enroller.enrol_all()

    async def run(self) -> None:
        try:
            await self._crowd.run()
        finally:
            await self._line.close()

    async def remove(self) -> int:
        return await self._roll.remove()

    async def _register(self, document: dict[str, Any]) -> None:
        try:
            await self._client.nodes.create(document)
        except Conflict:
            await self._roll.check()


def new_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
