"""An API process: opens the runtime, serves the application, and closes both in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvicorn

import bursar
from bursar.api.http.app import App
from bursar.api.http.connection import Bounds, ConnectionGate, HttpConnection
from bursar.api.http.context import LISTS_MAX, STATES_MAX, ApiContext
from bursar.api.http.identity import Authenticator
from bursar.api.http.oidc_settings import OidcSettings
from bursar.api.http.ratelimit import (
    LIMIT_PER_MINUTE_DEFAULT,
    SERVICE_LIMIT_PER_MINUTE_DEFAULT,
    MemoryRateLimit,
    RateLimit,
)
from bursar.api.http.tls_listener import TlsListener
from bursar.api.site.metrics_app import MetricsApp
from bursar.api.site.routes import build_routes
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.feed import Feed
from bursar.store.db.database import Database

if TYPE_CHECKING:
    from bursar.api.http.oidc import Oidc

log = structlog.get_logger()

GRACE_SECONDS = 5
# More than the limit of full reads, because some need a second connection for joined figures.
READERS = LISTS_MAX + STATES_MAX + 2


@asynccontextmanager
async def opened_context(
    database_url: str,
    *,
    redis_url: str = "",
    requests_per_minute: int = LIMIT_PER_MINUTE_DEFAULT,
    service_requests_per_minute: int = SERVICE_LIMIT_PER_MINUTE_DEFAULT,
    oidc: OidcSettings | None = None,
    grpc_address: str = "",
) -> AsyncIterator[ApiContext]:
    database = await Database.open(database_url, readers=READERS)
    runtime = await open_runtime(database)
    feed = Feed(database)
    runtime.on_commit.append(feed.nudge)
    limits = _open_rate_limits(redis_url)
    authenticator = Authenticator(database, oidc=_open_oidc(oidc), trees=runtime.trees)
    context = ApiContext(
        database, runtime, feed, authenticator, limits, requests_per_minute, service_requests_per_minute,
        bursar.__version__, grpc_address,
    )  # fmt: skip
    try:
        yield context
    finally:
        await context.depths.close()
        await context.leader_queries.close()
        await feed.close()
        await authenticator.close()
        await runtime.close()
        await limits.close()
        await database.close()


def _open_rate_limits(redis_url: str) -> RateLimit:
    if not redis_url:
        return MemoryRateLimit()
    from bursar.api.http.redis_ratelimit import RedisRateLimit

    return RedisRateLimit.open(redis_url)


def _open_oidc(settings: OidcSettings | None) -> Oidc | None:
    if settings is None:
        return None
    from bursar.api.http.oidc import Oidc

    return Oidc(settings)


def app_of(context: ApiContext) -> App:
    return App(context, build_routes(bursar.__version__))


async def serve_http(
    app: App,
    listener: socket.socket,
    *,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    bounds: Bounds | None = None,
    metrics: tuple[MetricsApp, socket.socket] | None = None,
) -> None:
    """Serve until a signal; finish open requests, and disconnect watchers."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    served: list[tuple[App | MetricsApp, socket.socket, ConnectionGate]] = [(app, listener, ConnectionGate(bounds))]
    if metrics is not None:
        served.append((*metrics, ConnectionGate(bounds)))
    # Metrics are served over plain HTTP, even if the API uses TLS.
    servers = [_server(one, gate, *((tls_cert, tls_key) if one is app else ())) for one, _, gate in served]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, servers, app)
    looking = [asyncio.create_task(gate.keep_looking()) for *_, gate in served]
    try:
        await asyncio.gather(
            *(server.serve(sockets=[one]) for server, (_, one, _) in zip(servers, served, strict=True))
        )
    finally:
        for task in looking:
            task.cancel()


def _server(
    app: App | MetricsApp, gate: ConnectionGate, tls_cert: Path | None = None, tls_key: Path | None = None
) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=gate.protocol(),
        ws="none",
        lifespan="off",
        log_level="error",  # warnings for malformed requests could flood the log
        access_log=False,
        server_header=False,
        proxy_headers=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
        backlog=4096,
        ssl_certfile=str(tls_cert) if tls_cert else None,
        ssl_keyfile=str(tls_key) if tls_key else None,
    )
    return HttpServer(config, gate)


def _is_news(record: logging.LogRecord) -> bool:
    """Filter uvicorn's message about incomplete responses: streams break off on purpose, and are logged elsewhere."""
    return "without completing response" not in record.getMessage()


class HttpServer(uvicorn.Server):
    """uvicorn's server, whose gate counts connections over TLS from before their handshake."""

    def __init__(self, config: uvicorn.Config, gate: ConnectionGate) -> None:
        super().__init__(config)
        self._gate = gate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config, loop = self.config, asyncio.get_running_loop()

        def connection() -> HttpConnection:
            made: HttpConnection = config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=config, server_state=self.server_state, app_state={}
            )
            return made

        self.servers = [
            await loop.create_server(connection, sock=one, backlog=config.backlog)
            if config.ssl is None
            else TlsListener(one, self._gate, connection, config.ssl)  # type: ignore[misc]
            for one in sockets or ()
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller: uvicorn would raise them again before the runtime is closed."""
        yield


def _stop(servers: list[uvicorn.Server], app: App) -> None:
    """Disconnect watchers first: they would never end by themselves."""
    app.end_streams()
    for server in servers:
        server.should_exit = True
