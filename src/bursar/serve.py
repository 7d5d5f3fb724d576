"""`bursar serve`: a supervisor that owns PostgreSQL and the listening sockets and restarts its child processes.

The children are the API processes, the controller, the quota service and, if configured, the Waldur reader. They are
started by exec, die with the parent, and are restarted when they die alone. If root starts the server, they run as an
unprivileged user (`--user`); the parent accepts no connections and stays root to restart them. Each process imports
only its own part: start-up is mostly imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import uvloop

from bursar.announce import announce
from bursar.child import READY, ChildProcess
from bursar.config import Address, ServerSettings, with_password_hidden
from bursar.logs import set_up_logs
from bursar.ops.access.token import (
    SERVICE_TOKEN_SECONDS,
    TokenFileError,
    ensure_admin_token,
    renew_service_token,
)
from bursar.ops.lifecycle.bootstrap import prepare
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.gc_tuning import calm_collector
from bursar.osuser import SERVER, HandOver, OsUser, OsUserError, hand_over, name_of, system_user
from bursar.parent import die_with_parent
from bursar.rlimit import allow_open_files, open_files_max
from bursar.store.db.database import AWAY, Database, connect
from bursar.store.db.migrate import MigrationError
from bursar.store.embedded import Embedded, EmbeddedError
from bursar.store.embedded import start as start_embedded
from bursar.store.nodes.heartbeat import load_agents

log = structlog.get_logger()

RESERVED_FILES = 256  # descriptors of an API process that are not for HTTP connections
READY_SECONDS_MAX = 60.0
SERVICE_TOKEN_RENEW_SECONDS = SERVICE_TOKEN_SECONDS / 2
SERVICE_TOKEN_RETRY_SECONDS = 60.0

Listeners = Sequence[socket.socket | None]  # of HTTP, and of /metrics if it has one of its own


class ServerStartError(Exception):
    """The server cannot start; the message says what to do."""


def _run(main: Coroutine[Any, Any, int]) -> int:
    set_up_logs()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(main)
        except (ServerStartError, EmbeddedError, MigrationError, TokenFileError, OsUserError, OSError) as error:
            print(f"bursar: {error}", file=sys.stderr)
            return 1
        except AWAY as error:
            print(f"bursar: the database cannot be reached: {error}", file=sys.stderr)
            return 1


# The child processes.


def run_api(settings: ServerSettings, fd: int | None, metrics_fd: int | None = None) -> int:
    return _run(_own_api(settings) if fd is None else _api(settings, fd, metrics_fd))


async def _own_api(settings: ServerSettings) -> int:
    """`bursar api` by itself: prepare the database and open the sockets, as root if root starts it, then serve."""
    _check_api(settings)
    user = await asyncio.to_thread(_server_user, settings)
    await prepare(settings.database_url)
    token = await _admin_token(settings)
    if token is not None and settings.admin_token_file is None:
        print(f"admin token (shown once): {token}", flush=True)
    listeners = listener, scraped = listen(settings.http, "--http"), _listen_metrics(settings)
    if user is not None:
        await _become(user, settings, _api_arguments(settings, listeners), listeners)
    return await _api(settings, listener.detach(), scraped.detach() if scraped is not None else None)


async def _api(settings: ServerSettings, fd: int, metrics_fd: int | None) -> int:
    from bursar.api.http.connection import Bounds
    from bursar.api.serve import app_of, opened_context, serve_http
    from bursar.api.site.metrics_app import MetricsApp

    die_with_parent()
    allow_open_files()
    _check_api(settings)
    listener = socket.socket(fileno=fd)
    scraped = socket.socket(fileno=metrics_fd) if metrics_fd is not None else None
    async with AsyncExitStack() as opened:
        context = await opened.enter_async_context(
            opened_context(
                settings.database_url,
                redis_url=settings.redis_url,
                requests_per_minute=settings.requests_per_minute,
                service_requests_per_minute=settings.service_requests_per_minute,
                oidc=settings.oidc,
                # An insecure address is not announced: agents with certificates cannot use it.
                grpc_address="" if settings.grpc_insecure else settings.grpc_address,
            )
        )
        from bursar.rpc.agent_client import Agents

        context.log_source = agents = Agents(context.database, insecure=settings.grpc_insecure)
        opened.push_async_callback(agents.close)
        if settings.grpc is not None:
            from bursar.rpc.serve import AddressTaken, opened_grpc

            try:
                await opened.enter_async_context(
                    opened_grpc(
                        context.runtime,
                        context.feed,
                        str(settings.grpc),
                        hosts=settings.grpc_names,
                        insecure=settings.grpc_insecure,
                        shared=settings.grpc_shared,
                    )
                )
            except AddressTaken as error:
                raise _cannot_serve_grpc(settings.grpc, "--grpc", str(error)) from error
        app = app_of(context)
        if settings.grpc_admin is not None:
            from bursar.rpc.serve import AddressTaken, opened_admin

            tls = (settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
            try:
                shared = settings.grpc_shared
                await opened.enter_async_context(
                    opened_admin(context.database, app, str(settings.grpc_admin), tls=tls, shared=shared)
                )
            except AddressTaken as error:
                raise _cannot_serve_grpc(settings.grpc_admin, "--grpc-admin", str(error)) from error
        calm_collector()
        print(READY, flush=True)
        bounds = Bounds(min(settings.connections, open_files_max() - RESERVED_FILES), settings.connections_per_address)
        metrics = (MetricsApp(context), scraped) if scraped is not None else None
        await serve_http(
            app, listener, tls_cert=settings.tls_cert, tls_key=settings.tls_key, bounds=bounds, metrics=metrics
        )
    return 0


def _check_api(settings: ServerSettings) -> None:
    _check_grpc(settings)
    if not settings.database_url:
        raise ServerStartError(
            "`bursar api` needs --database-url or BURSAR_DATABASE_URL; `bursar serve` starts its own database"
        )


def _check_grpc(settings: ServerSettings, *, tls_auto: bool = False) -> None:
    if settings.grpc is not None and settings.grpc_insecure and not settings.grpc.is_loopback:
        raise ServerStartError(
            f"--grpc {settings.grpc} is not on loopback: with --grpc-insecure gRPC is served on loopback only"
        )
    if settings.grpc_admin is not None and not settings.grpc_admin.is_loopback and not (settings.tls_cert or tls_auto):
        raise ServerStartError(
            f"--grpc-admin {settings.grpc_admin} is not on loopback: tokens could be read on the wire; "
            "give --tls-cert and --tls-key, or --tls auto"
        )


def _cannot_serve_grpc(address: Address, option: str, why: str) -> ServerStartError:
    return ServerStartError(
        f"cannot listen on {address} for gRPC: {why}; choose another address with {option} HOST:PORT"
    )


def run_controller(settings: ServerSettings) -> int:
    return _run(_controller(settings))


async def _controller(settings: ServerSettings) -> int:
    from bursar.bridges.webhook import run_webhooks
    from bursar.loops.approvals import run_approvals
    from bursar.loops.claims import run_claims
    from bursar.loops.drain import run_drains
    from bursar.loops.election import run_election
    from bursar.loops.housekeeping import run_housekeeping
    from bursar.loops.jobs import run_jobs
    from bursar.loops.lease_expiry import run_leases
    from bursar.loops.ledger import run_ledger
    from bursar.loops.node_liveness import run_nodes
    from bursar.loops.reconcile import run_reconcile
    from bursar.loops.schedule import run_schedule
    from bursar.loops.usage_rollup import run_usage_rollup

    die_with_parent()
    if not settings.database_url:
        raise ServerStartError("`bursar controller` needs --database-url or BURSAR_DATABASE_URL")
    stopping = _on_signals()
    if "BURSAR_PARENT" not in os.environ:
        await _drop_root(settings, ["controller"])
        await prepare(settings.database_url)
    database = await Database.open(settings.database_url)
    runtime = await open_runtime(database)
    loops = asyncio.gather(
        run_housekeeping(runtime),
        run_drains(runtime),
        run_jobs(runtime),
        run_approvals(runtime),
        run_nodes(runtime),
        run_ledger(runtime),
        run_usage_rollup(runtime),
        run_leases(runtime),
        run_claims(runtime),
        run_reconcile(runtime),
        run_webhooks(runtime),
        run_election(database, f"{socket.gethostname()}/{os.getpid()}", lambda fence: run_schedule(runtime, fence)),
    )
    print(READY, flush=True)
    await _until(stopping, loops)
    loops.cancel()
    await asyncio.gather(loops, return_exceptions=True)
    await runtime.close()
    await database.close()
    return 0


def run_waldur(settings: ServerSettings) -> int:
    return _run(_waldur(settings))


async def _waldur(settings: ServerSettings) -> int:
    die_with_parent()
    if not settings.database_url:
        raise ServerStartError("`bursar waldur` needs --database-url or BURSAR_DATABASE_URL")
    if settings.waldur is None:
        raise ServerStartError("`bursar waldur` needs BURSAR_WALDUR_URL")
    _check_waldur(settings)
    stopping = _on_signals()
    if "BURSAR_PARENT" not in os.environ:
        await _drop_root(settings, ["waldur"])
        await prepare(settings.database_url)
    database = await Database.open(settings.database_url)
    # Ready before the import of Waldur's client, which takes seconds.
    print(READY, flush=True)
    from bursar.bridges.budget import ReadPace, run_budget_source
    from bursar.bridges.waldur import Component, Waldur

    said = settings.waldur
    source = Waldur(
        said.url, said.token_file, said.offerings, Component(*said.gpu_hours), Component(*said.node_hours), said.ca_file
    )
    reading = asyncio.ensure_future(run_budget_source(database, source, ReadPace(said.poll_seconds)))
    await _until(stopping, reading)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await database.close()
    return 0


def _check_waldur(settings: ServerSettings) -> None:
    if settings.waldur is not None and find_spec("waldur_api_client") is None:
        raise ServerStartError(
            "BURSAR_WALDUR_URL is set, but Waldur's client is not installed: pip install 'bursar[waldur]'"
        )


async def _until(stopping: asyncio.Event, loops: asyncio.Future[Any]) -> None:
    """Wait for the signal to stop. If a loop ends by itself, raise: the parent restarts this process."""
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({signalled, loops}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if loops.done() and not loops.cancelled() and (error := loops.exception()) is not None:
        raise error


def _on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping


def _listen_metrics(settings: ServerSettings) -> socket.socket | None:
    return listen(settings.metrics, "--metrics") if settings.metrics is not None else None


def listen(address: Address, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except OSError as error:
        raise ServerStartError(
            f"cannot listen on {address}: {error.strerror}; choose another address with {option} HOST:PORT"
        ) from error
    listener.listen(4096)
    listener.setblocking(False)
    return listener


def _try_grpc_address(address: Address | None, option: str) -> None:
    """Probe the gRPC address before any child starts, which would only be restarted in a loop. API processes share the
    address by SO_REUSEPORT, so only this probe detects a second server."""
    if address is None:
        return
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise _cannot_serve_grpc(address, option, str(error.strerror)) from error


# The parent.


def run(settings: ServerSettings, *, data: Path | None, tls_auto: bool) -> int:
    return _run(_serve(settings, data, tls_auto))


async def _serve(settings: ServerSettings, data: Path | None, tls_auto: bool) -> int:
    stopping = _on_signals()
    _check_grpc(settings, tls_auto=tls_auto)
    _check_waldur(settings)
    _try_grpc_address(settings.grpc, "--grpc")
    _try_grpc_address(settings.grpc_admin, "--grpc-admin")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise ServerStartError("--tls-cert and --tls-key must be given together")
    if not settings.http.is_loopback and not (settings.tls_cert or tls_auto):
        log.warning(
            "plain_http", message="plain HTTP beyond loopback: tokens can be read on the wire",
            next="use --tls, or a proxy that does",
        )  # fmt: skip
    data = (data or default_data_directory()).absolute()
    user = await asyncio.to_thread(_server_user, settings)
    embedded: Embedded | None = None
    listener, scraped = listen(settings.http, "--http"), _listen_metrics(settings)
    if not settings.database_url:
        embedded = await start_embedded(data, log=log, client=user)
        settings = replace(settings, database_url=embedded.url)
    try:
        return await _serve_on(settings, (listener, scraped), data, tls_auto, user, stopping)
    finally:
        for one in (listener, scraped):
            if one is not None:
                one.close()
        if embedded is not None:
            await embedded.stop()


def _server_user(settings: ServerSettings) -> OsUser | None:
    """The user of the child processes; None for the user of this process."""
    own = name_of(os.geteuid())
    if os.geteuid() != 0:
        if settings.user not in ("", own):
            raise ServerStartError(f"--user {settings.user}: only root can run the server as another user")
        return None
    if settings.user in ("root", own):
        return None
    user = system_user(settings.user or SERVER)
    for address, option in ((settings.grpc, "--grpc"), (settings.grpc_admin, "--grpc-admin")):
        if address is not None and 0 < address.port < _unprivileged_port():
            raise ServerStartError(f"{option} {address}: the user {user.name} may not listen on ports below 1024")
    return user


async def _drop_root(settings: ServerSettings, arguments: list[str]) -> None:
    """Start this command again as the server's user, if root started it."""
    if (user := await asyncio.to_thread(_server_user, settings)) is not None:
        await _become(user, settings, arguments)


async def _become(user: OsUser, settings: ServerSettings, arguments: list[str], sockets: Listeners = ()) -> None:
    """Replace this process by a command of this user, which inherits the sockets. It does not return."""
    over = await asyncio.to_thread(hand_over, user, _files(settings))
    for one in sockets:
        if one is not None:
            one.set_inheritable(True)
    command = over.command([sys.executable, "-P", "-m", "bursar.main", *arguments])
    os.execve(command[0], command, {**_environment(settings), "HOME": user.home})  # noqa: S606


def _unprivileged_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024


def _files(settings: ServerSettings) -> list[Path]:
    """The files that the children must be able to read."""
    oidc, waldur = settings.oidc, settings.waldur
    files = [settings.tls_cert, settings.tls_key]
    if oidc is not None:
        files += [Path(one) for one in (oidc.jwks, oidc.ca_file) if one and "://" not in one]
    if waldur is not None:
        files += [waldur.token_file, waldur.ca_file]
    return [path for path in files if path is not None and path.exists()]


async def _serve_on(
    settings: ServerSettings,
    listeners: tuple[socket.socket, socket.socket | None],
    data: Path,
    tls_auto: bool,
    user: OsUser | None,
    stopping: asyncio.Event,
) -> int:
    log.info("database_opened", message="using this database", url=with_password_hidden(settings.database_url))
    await prepare(settings.database_url, restored=settings.restored)
    ca: Path | None = None
    if tls_auto:
        from bursar.api.http.tls import ensure_server_certificate

        hosts = sorted({"localhost", "127.0.0.1", "::1", settings.http.host} - {"0.0.0.0", "::"})  # noqa: S104
        cert, key, ca = ensure_server_certificate(data / "tls", hosts, user.gid if user else None)
        settings = replace(settings, tls_cert=cert, tls_key=key)
    token = await _admin_token(settings)
    await _warn_of_agents(settings)
    token_file = await _service_token(settings, data, user)
    readable = [*_files(settings), *([token_file] if token_file is not None else [])]
    over = await asyncio.to_thread(hand_over, user, readable) if user is not None else None
    children = _children(settings, listeners, over)
    keepers = [asyncio.create_task(child.keep_alive(), name=child.name) for child in children]
    try:
        if await _all_ready(children, stopping):
            announce(settings, listeners[0], token, ca)
            if token_file is not None:
                decider = _quota_service(settings, listeners[0], token_file, ca, over)
                children.append(decider)
                keepers.append(asyncio.create_task(decider.keep_alive(), name=decider.name))
                keepers.append(asyncio.create_task(_renew_service_token(settings, token_file, user), name="renewal"))
            await stopping.wait()
        return 0
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        for keeper in keepers:
            if keeper.get_name() == "renewal":
                keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


async def _all_ready(children: list[ChildProcess], stopping: asyncio.Event) -> bool:
    """Whether all children became ready before the signal to stop."""
    stop = asyncio.create_task(stopping.wait())
    ready = asyncio.gather(*(child.ready.wait() for child in children))
    done, _ = await asyncio.wait((stop, ready), timeout=READY_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        raise ServerStartError(f"the child processes were not ready within {READY_SECONDS_MAX:.0f} s; see the log")
    for one in (stop, ready):
        one.cancel()
    await asyncio.gather(stop, ready, return_exceptions=True)
    return stop not in done


async def _admin_token(settings: ServerSettings) -> str | None:
    db = await connect(settings.database_url)
    try:
        return await ensure_admin_token(db, settings.admin_token_file, now())
    finally:
        await db.close()


# The quota service.


async def _service_token(settings: ServerSettings, data: Path, user: OsUser | None) -> Path | None:
    """A new token for the quota service, in a file that only its user may read; None if the service is not to run."""
    if not settings.quota_service:
        return None
    path = data / "quota-service.token"
    try:
        await asyncio.to_thread(data.mkdir, 0o711 if user is not None else 0o700, parents=True, exist_ok=True)
        await _new_service_token(settings, path, user)
    except (OSError, TokenFileError) as error:
        log.warning(
            "quota_service_off", message="the quota service does not run: its token cannot be written",
            path=str(path), error=str(error), next="name a directory with --data, or give --no-quota-service",
        )  # fmt: skip
        return None
    return path


async def _new_service_token(settings: ServerSettings, path: Path, user: OsUser | None) -> None:
    db = await connect(settings.database_url)
    try:
        await renew_service_token(db, path, now(), owner=(user.uid, user.gid) if user is not None else None)
    finally:
        await db.close()


async def _renew_service_token(settings: ServerSettings, path: Path, user: OsUser | None) -> None:
    """Replace the token in time; the service reads the file again when its present token is refused."""
    pause = SERVICE_TOKEN_RENEW_SECONDS
    while True:
        await asyncio.sleep(pause)
        try:
            await _new_service_token(settings, path, user)
            pause = SERVICE_TOKEN_RENEW_SECONDS
        except (TokenFileError, *AWAY) as error:  # type: ignore[misc]
            log.warning("token_not_renewed", message="the token of the quota service is not renewed", error=str(error))
            pause = SERVICE_TOKEN_RETRY_SECONDS


def _quota_service(
    settings: ServerSettings, listener: socket.socket, token_file: Path, ca: Path | None, over: HandOver | None
) -> ChildProcess:
    """The quota service as a child: a client of this server, by its loopback address if it has one."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not listened on
    scheme = "https" if settings.tls_cert else "http"
    words = ["quota-service", "--url", f"{scheme}://{Address(host, port)}", "--token-file", str(token_file)]
    if ca is not None:
        words += ["--ca-file", str(ca)]
    elif settings.tls_cert is not None:
        words += ["--pinned-certificate", str(settings.tls_cert)]  # It may name other hosts than this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    return ChildProcess("quota-service", words, {**environment, "BURSAR_PARENT": str(os.getpid())}, over=over)


async def _warn_of_agents(settings: ServerSettings) -> None:
    """Warn if nodes have agents but no gRPC is served: they would become NotReady without an explanation."""
    if settings.grpc is not None:
        return
    db = await connect(settings.database_url)
    try:
        count = await load_agents(db)
    finally:
        await db.close()
    if count:
        log.warning(
            "grpc_not_served", message="nodes have agents, and no --grpc is served: they will become NotReady",
            nodes=count, next="give --grpc with the address that the agents know",
        )  # fmt: skip


def _environment(settings: ServerSettings) -> dict[str, str]:
    urls = {"BURSAR_DATABASE_URL": settings.database_url, "BURSAR_REDIS_URL": settings.redis_url}
    return {**os.environ, **urls}


def _api_arguments(settings: ServerSettings, listeners: Listeners) -> list[str]:
    """The command line of an API process that inherits its sockets, those of HTTP and, if given, of /metrics."""
    fds = [one.fileno() for one in listeners if one is not None]
    arguments = ["api", "--http", str(settings.http), "--fd", str(fds[0])]
    if len(fds) > 1:
        arguments += ["--metrics-fd", str(fds[1])]
    if settings.tls_cert and settings.tls_key:
        arguments += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    if settings.grpc_address:
        arguments += ["--grpc-advertise", settings.grpc_address]
    for host in settings.grpc_hosts:
        arguments += ["--grpc-host", host]
    if settings.grpc_insecure:
        arguments.append("--grpc-insecure")
    if settings.grpc is not None:
        arguments += ["--grpc", str(settings.grpc)]
    if settings.grpc_admin is not None:
        arguments += ["--grpc-admin", str(settings.grpc_admin)]
    if settings.workers > 1 or settings.grpc_shared:
        arguments.append("--grpc-shared")
    arguments += ["--connections", str(settings.connections)]
    arguments += ["--connections-per-address", str(settings.connections_per_address)]
    return arguments


def _children(settings: ServerSettings, listeners: Listeners, over: HandOver | None) -> list[ChildProcess]:
    environment = {**_environment(settings), "BURSAR_PARENT": str(os.getpid())}
    fds = tuple(one.fileno() for one in listeners if one is not None)
    shared = _api_arguments(settings, listeners)
    children = [ChildProcess(f"api-{index}", shared, environment, fds, over) for index in range(settings.workers)]
    children.append(ChildProcess("controller", ["controller"], environment, over=over))
    if settings.waldur is not None:
        children.append(ChildProcess("waldur", ["waldur"], environment, over=over))
    return children


def default_data_directory() -> Path:
    """The default data directory. Root's home is closed to the database's user, so root uses /var/lib, unless data
    exists there already."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    at_home = Path(base) / "bursar"
    if os.geteuid() == 0 and "XDG_DATA_HOME" not in os.environ and not at_home.exists():
        return Path("/var/lib/bursar")
    return at_home
