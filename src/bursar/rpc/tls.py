"""TLS credentials of the control plane for gRPC: server and client certificates signed by the node CA.

Each process creates its own certificates; their keys are never written to disk. A certificate is replaced, with a new
key, after two thirds of its life. Open connections keep the certificate they were opened with.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc
import psutil
import structlog

from bursar.core.values.certificate import server_name
from bursar.ops.nodes.node_ca import ensure_authority
from bursar.ops.nodes.x509 import OUR_LIFE, KeyPair, sign_client, sign_server
from bursar.ops.runtime.clock import now
from bursar.store.db.database import Database

log = structlog.get_logger()

ALWAYS = ("localhost", "127.0.0.1", "::1")
# Wildcard addresses, which cannot be called.
ANY_HOST = frozenset({"0.0.0.0", "::", ""})  # noqa: S104
RENEW_AFTER = 2 / 3  # of its life


@dataclass(slots=True)
class ServerCredentials:
    """A certificate of this process and its key. It signs a new one itself when the old one is due, also after suspend
    or a clock change."""

    sign: Callable[[datetime, timedelta], KeyPair]
    life: timedelta
    clock: Callable[[], datetime]
    _begun: datetime = field(init=False)
    _pair: KeyPair = field(init=False)

    def __post_init__(self) -> None:
        self._make(self.clock())

    def newest(self) -> KeyPair:
        at = self.clock()
        if not self._begun <= at < self._begun + self.life * RENEW_AFTER:
            self._make(at)
            log.info(
                "server_certificate_renewed", message="a certificate of this process was renewed",
                expires=(at + self.life).isoformat(),
            )  # fmt: skip
        return self._pair

    def _make(self, at: datetime) -> None:
        self._begun, self._pair = at, self.sign(at, self.life)


async def server_credentials(
    database: Database,
    hosts: Sequence[str],
    *,
    life: timedelta = OUR_LIFE,
    clock: Callable[[], datetime] = now,
) -> grpc.ServerCredentials:
    """Server credentials for these host names; clients must present a certificate of the node CA."""
    authority = await ensure_authority(database)
    credentials = ServerCredentials(lambda at, lasting: sign_server(authority, _names(hosts), at, lasting), life, clock)
    shown = credentials.newest()

    def configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], authority.pem)

    def changed() -> Any:
        """Called by gRPC at each connection, in its own thread; None means no change."""
        nonlocal shown
        if (pair := credentials.newest()) is shown:
            return None
        shown = pair
        return configuration(pair)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), changed, require_client_authentication=True)


def _names(hosts: Sequence[str]) -> set[str]:
    """The names of the server certificate. For a wildcard address they include all addresses of the machine."""
    named = {*ALWAYS, socket.gethostname(), *hosts}
    if named & ANY_HOST:
        there = (one for addresses in psutil.net_if_addrs().values() for one in addresses)
        named |= {one.address.partition("%")[0] for one in there if one.family in (socket.AF_INET, socket.AF_INET6)}
    return named - ANY_HOST


class Calling:
    """Client credentials for calling agents. Open channels with `channel_options(node)`, which checks the node's name.

    A channel reconnects with the credentials it was opened with, so it is replaced when there are newer ones.
    """

    def __init__(self, authority: bytes, credentials: ServerCredentials) -> None:
        self._authority = authority
        self._credentials = credentials
        self._pair: KeyPair | None = None
        self._made: grpc.ChannelCredentials | None = None

    def newest(self) -> grpc.ChannelCredentials:
        """The current credentials; the same object until they are renewed."""
        pair = self._credentials.newest()
        if self._made is None or pair is not self._pair:
            self._pair = pair
            self._made = grpc.ssl_channel_credentials(
                root_certificates=self._authority, private_key=pair.key, certificate_chain=pair.certificate
            )
        return self._made


async def calling(database: Database, *, life: timedelta = OUR_LIFE, clock: Callable[[], datetime] = now) -> Calling:
    authority = await ensure_authority(database)
    return Calling(
        authority.pem, ServerCredentials(lambda at, lasting: sign_client(authority, at, lasting), life, clock)
    )


def channel_options(node: str) -> tuple[tuple[str, str], ...]:
    """Verify the certificate by the node's name, whatever address the node advertised."""
    return (("grpc.ssl_target_name_override", server_name(node)),)
