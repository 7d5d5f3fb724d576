"""The gRPC door. Today it answers the standard health service; the node agents' service joins it here."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bursar.store.database import AWAY, Database

CHECK_SECONDS = 1.0
GRACE_SECONDS = 2.0


async def serve_grpc(database: Database, address: str) -> None:
    """Serve until cancelled; the health that is told is the database's."""
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if not server.add_insecure_port(address):
        raise OSError(f"cannot listen on {address} for gRPC")
    await server.start()
    try:
        while True:
            serving = health_pb2.HealthCheckResponse.SERVING
            if not await _answers(database):
                serving = health_pb2.HealthCheckResponse.NOT_SERVING
            await servicer.set("", serving)
            await asyncio.sleep(CHECK_SECONDS)
    finally:
        await server.stop(GRACE_SECONDS)


async def _answers(database: Database) -> bool:
    try:
        async with asyncio.timeout(CHECK_SECONDS), database.reader() as db:
            await db.fetchval("SELECT 1")
    except AWAY:
        return False
    return True
