"""What gRPC proves itself with, in both directions: all of it is signed by our own authority, and so is whoever calls.

The certificates are made for this process, and their keys are never written anywhere. Each is made anew, with another
key, long before it ends: a process may run for as long as it likes. Connections that are open keep what they were
opened with, and notice nothing.
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
# Addresses to listen on that nobody can call.
ANY_HOST = frozenset({"0.0.0.0", "::", ""})  # noqa: S104
RENEW_AFTER = 2 / 3  # of its life


@dataclass(slots=True)
class ServerCredentials:
    """A certificate of this process and its key. The authority's key is at hand, so nobody is asked for the next one:
    whoever wants to show it gets one that is good, also after the machine has slept or its clock was set."""

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
            log.info("a certificate of this process was renewed", expires=(at + self.life).isoformat())
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
    """For a server that agents call at these hosts. Who calls must show a certificate of our authority."""
    authority = await ensure_authority(database)
    credentials = ServerCredentials(lambda at, lasting: sign_server(authority, _names(hosts), at, lasting), life, clock)
    shown = credentials.newest()

    def configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], authority.pem)

    def changed() -> Any:
        """Asked at every connection, in a thread of gRPC's; None is no change."""
        nonlocal shown
        if (pair := credentials.newest()) is shown:
            return None
        shown = pair
        return configuration(pair)

    return grpc.dynamic_ssl_server_credentials(configuration(shown), changed, require_client_authentication=True)


def _names(hosts: Sequence[str]) -> set[str]:
    """What the server may be called by. One that listens everywhere is called by any address of the machine."""
    named = {*ALWAYS, socket.gethostname(), *hosts}
    if named & ANY_HOST:
        there = (one for addresses in psutil.net_if_addrs().values() for one in addresses)
        named |= {one.address.partition("%")[0] for one in there if one.family in (socket.AF_INET, socket.AF_INET6)}
    return named - ANY_HOST


class Calling:
    """What agents are called with. Open a channel with `channel_options(node)`, or its certificate is not believed.

    A channel shows what it was opened with whenever it connects again: it is not kept when there is something newer.
    """

    def __init__(self, authority: bytes, credentials: ServerCredentials) -> None:
        self._authority = authority
        self._credentials = credentials
        self._pair: KeyPair | None = None
        self._made: grpc.ChannelCredentials | None = None

    def newest(self) -> grpc.ChannelCredentials:
        """The same until there is something newer."""
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
    """Whatever address the node gave, the one who answers there must be this node."""
    return (("grpc.ssl_target_name_override", server_name(node)),)
