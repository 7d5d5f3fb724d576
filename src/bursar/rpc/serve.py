"""The two gRPC servers: one for node agents, one for administrators and tenants, each with the gRPC health service.

Agents authenticate with mutual TLS by the node CA; with `--grpc-insecure` without TLS, on loopback only. Administrators
and tenants authenticate with tokens and have no client certificate, so they have a server of their own, which presents
the HTTPS certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bursar.ops.nodes.x509 import OUR_LIFE
from bursar.ops.runtime.feed import Feed
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.admin import AdminService, AsgiApp
from bursar.rpc.agent import AgentService
from bursar.rpc.hub import Hub
from bursar.rpc.tls import server_credentials
from bursar.store.db.database import AWAY, Database
from bursar.wire.scheduler.v1 import admin_pb2_grpc, node_agent_pb2_grpc

log = structlog.get_logger()

CHECK_SECONDS = 1.0
GRACE_SECONDS = 2.0

HANDSHAKE_MS = 10_000
CONNECTIONS_MAX = 20_000

OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    # A whole wanted set is one message, so the send limit is higher.
    ("grpc.max_send_message_length", 64 << 20),
    # Keepalive detects a dead node, and releases what is queued for it.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class AddressTaken(Exception):
    """The address cannot be listened on."""


@asynccontextmanager
async def opened_grpc(
    runtime: Runtime,
    feed: Feed,
    address: str,
    *,
    hosts: Sequence[str] = (),
    insecure: bool = False,
    shared: bool = False,
    life: timedelta = OUR_LIFE,
) -> AsyncIterator[int]:
    """Serve agents while the block runs; yields the port. `hosts` are names for the server certificate, `life` is its
    validity. With `shared`, other processes serve at the same address (SO_REUSEPORT), and any of them may hold a node's
    stream."""
    server = grpc.aio.server(options=_options(shared=shared))
    hub = Hub(runtime, feed)
    service = AgentService(runtime, hub, insecure=insecure)
    node_agent_pb2_grpc.add_NodeAgentServicer_to_server(service, server)
    credentials = None if insecure else await server_credentials(runtime.database, hosts, life=life)
    async with _started(server, address, credentials, runtime.database) as port:
        try:
            yield port
        finally:
            await hub.close()


@asynccontextmanager
async def opened_admin(
    database: Database, app: AsgiApp, address: str, *, tls: tuple[Path, Path] | None = None, shared: bool = False
) -> AsyncIterator[int]:
    """Serve administrators and tenants while the block runs; yields the port. `tls` is a certificate and its key."""
    server = grpc.aio.server(options=_options(shared=shared))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(app), server)
    credentials = None
    if tls is not None:
        certificate, key = (path.read_bytes() for path in tls)
        credentials = grpc.ssl_server_credentials([(key, certificate)])
    async with _started(server, address, credentials, database) as port:
        yield port


@asynccontextmanager
async def _started(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, database: Database
) -> AsyncIterator[int]:
    """Run a server with the health service while the block runs; yields the port."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressTaken("the address is in use, or not one of this machine's") from error
    await server.start()
    telling = asyncio.create_task(_tell_health(database, servicer), name="grpc-health")
    try:
        yield port
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await server.stop(GRACE_SECONDS)


def _options(*, shared: bool) -> tuple[tuple[str, int], ...]:
    """The server options. Without SO_REUSEPORT a second server on the same port fails instead of sharing it."""
    # A client that connects and says nothing would keep a descriptor for two minutes, and there could be any number.
    bounds = (
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    )
    return (*OPTIONS, *bounds, ("grpc.so_reuseport", int(shared)))


async def _tell_health(database: Database, servicer: Any) -> None:
    """Report the health of the database as that of this process, for ever."""
    while True:
        try:
            healthy = await _answers(database)
        except Exception:
            log.exception("health_check_failed", message="the health of this process cannot be determined")
            healthy = False
        serving = health_pb2.HealthCheckResponse
        await servicer.set("", serving.SERVING if healthy else serving.NOT_SERVING)
        await asyncio.sleep(CHECK_SECONDS)


async def _answers(database: Database) -> bool:
    try:
        async with asyncio.timeout(CHECK_SECONDS), database.reader() as db:
            await db.fetchval("SELECT 1")
    except AWAY:
        return False
    return True
