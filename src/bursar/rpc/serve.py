"""The gRPC door. Today it answers the standard health service; the node agents' service joins it here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bursar.store.database import AWAY, Database

log = structlog.get_logger()

CHECK_SECONDS = 1.0
GRACE_SECONDS = 2.0


class AddressTaken(Exception):
    """The address cannot be listened on."""


@asynccontextmanager
async def opened_grpc(database: Database, address: str) -> AsyncIterator[None]:
    """Serve for as long as the block lasts."""
    # Two servers on one port would share its connections, unseen: the second is refused.
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressTaken("the address is in use, or not one of this machine's") from error
    await server.start()
    telling = asyncio.create_task(_tell_health(database, servicer), name="grpc-health")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await server.stop(GRACE_SECONDS)


async def _tell_health(database: Database, servicer: Any) -> None:
    """For ever: the health that is told is the database's."""
    while True:
        try:
            healthy = await _answers(database)
        except Exception:
            log.exception("health could not be found out")
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
