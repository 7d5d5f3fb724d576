"""Runs `bursar agent`: lock the data directory, join, adopt placements, then serve and stream until a signal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import stat
import sys
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from bursar.agent.control.certificates import NoCredentials, NodeCertificates
from bursar.agent.control.codec import FEATURES
from bursar.agent.control.connect_errors import ConnectErrorLog, join_trouble
from bursar.agent.control.identity import AgentIdentity, IdentityError
from bursar.agent.control.server import AgentServerError, advertised, opened_app
from bursar.agent.control.stream import ControlStream, backoff_seconds
from bursar.agent.daemon import Daemon, features_of
from bursar.agent.executor.executor import ExecutorSettings
from bursar.agent.executor.wipe import NO_WIPE, Wipe
from bursar.agent.host.probe import Inventory, Probe
from bursar.agent.host.sandbox import USERS, Sandbox, Users, find_sandbox
from bursar.client.errors import ApiError, ConnectionFailed
from bursar.core.values.address import is_loopback
from bursar.logs import set_up_logs

log = structlog.get_logger()

LOCK = "agent.lock"
WORK = "work"
PIDS_MAX = 4096


class AgentStartError(Exception):
    """The agent cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings of an agent, as `main.py` validates them."""

    name: str
    data: Path
    servers: tuple[str, ...] = ()
    grpc: tuple[str, ...] = ()
    token_file: Path | None = None
    ca_file: str = ""
    listen: str = ""
    advertise: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    fake_gpus: int | None = None
    run_as: str | None = None
    run_as_groups: bool = False
    users: Users = USERS
    shared: tuple[Path, ...] = ()
    pids_max: int | None = PIDS_MAX
    disk_reserve_bytes: int | None = None
    insecure: bool = False
    drain_on_stop: bool = False
    wipe: Wipe = NO_WIPE


def run(settings: AgentSettings) -> int:
    set_up_logs()
    try:
        with _locked(settings.data):
            return asyncio.run(_run(settings))
    except (AgentStartError, AgentServerError, OSError) as error:
        print(f"bursar: {error}", file=sys.stderr)
    except IdentityError as error:
        print(f"bursar: {error}" + (f"; {error.hint}" if error.hint else ""), file=sys.stderr)
    return 1


async def _run(settings: AgentSettings) -> int:
    stopping = _on_signals()
    probe = Probe(settings.data, settings.fake_gpus)
    found = probe.inventory()
    sandbox = await asyncio.to_thread(_sandbox, settings, found)
    credentials = _credentials(settings, found, sandbox)
    if isinstance(credentials, NodeCertificates) and not await _joined(credentials, stopping):
        return 0
    executor = ExecutorSettings(
        run_as=settings.run_as,
        run_as_groups=settings.run_as_groups,
        sandbox=sandbox,
        pids_max=settings.pids_max,
        disk_reserve_bytes=settings.disk_reserve_bytes,
    )
    daemon = Daemon(settings.name, settings.data / WORK, probe, settings=executor, wipe=settings.wipe)
    await daemon.open()
    try:
        await _serve(settings, credentials, daemon, stopping)
    finally:
        await daemon.close()
        probe.close()
    return 0


def _sandbox(settings: AgentSettings, found: Inventory) -> Sandbox:
    return find_sandbox(
        run_as=settings.run_as,
        hidden=(settings.data,),
        shared=settings.shared,
        users=settings.users,
        minors=found.minors,
    )


async def _serve(
    settings: AgentSettings, credentials: NodeCertificates | NoCredentials, daemon: Daemon, stopping: asyncio.Event
) -> None:
    server = credentials.addresses[0]
    listen = settings.listen or ("127.0.0.1:0" if is_loopback(server) else "0.0.0.0:0")
    identity = (lambda: _identity(credentials)) if isinstance(credentials, NodeCertificates) else None
    async with opened_app(daemon, listen, identity=identity) as port:
        daemon.address = advertised(listen, port, advertise=settings.advertise, server=server)
        stream = ControlStream(settings.name, credentials, daemon)
        daemon.ask_with(stream.prepare)
        tasks = [asyncio.create_task(stream.run(), name="stream"), asyncio.create_task(daemon.run(stream.poke))]
        log.info(
            "agent_started", message="the agent is ready",
            node=settings.name, address=daemon.address, servers=list(credentials.addresses),
        )  # fmt: skip
        print(f"bursar agent is ready: node {settings.name}, listening on {daemon.address}", flush=True)
        try:
            await _until(stopping, tasks)
            if settings.drain_on_stop:
                stopping.clear()
                await _until(stopping, [*tasks, asyncio.create_task(daemon.drain())])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    log.info("agent_stopped", message="the agent has stopped", node=settings.name)


async def _until(stopping: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for the signal or for the end of a task; raises if the task failed."""
    signalled = asyncio.create_task(stopping.wait())
    try:
        done, _ = await asyncio.wait({signalled, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        signalled.cancel()


# Start-up.


async def _joined(credentials: NodeCertificates, stopping: asyncio.Event) -> bool:
    """Ensure an identity; an expired one is enough to adopt running work with. False if stopped first.

    It waits for a server that cannot be reached, and gives up if the server refuses.
    """
    troubles, error_log = 0, ConnectErrorLog()
    while credentials.identity is None:
        try:
            if await _stopped_first(stopping, credentials.ensure()):
                return False
        except (ConnectionFailed, ApiError) as error:
            if not error.passing:
                raise AgentStartError("; ".join(filter(None, (error.message, error.hint)))) from None
            troubles += 1
            trouble, pause_seconds = join_trouble(error), backoff_seconds(troubles)
            if error_log.is_news(trouble.why):
                log.warning(
                    "join_failed",
                    message="the node cannot join yet",
                    error=trouble.why,
                    next=trouble.next(pause_seconds),
                )
            if await _stopped_first(stopping, asyncio.sleep(pause_seconds)):
                return False
    return True


async def _stopped_first(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the signal came before the work was done; raises if the work failed."""
    task = asyncio.create_task(work)
    await _until(stopping, [task])
    if task.done():
        return False
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return True


def _credentials(settings: AgentSettings, found: Inventory, sandbox: Sandbox) -> NodeCertificates | NoCredentials:
    if settings.insecure:
        return NoCredentials(settings.grpc)
    return NodeCertificates(
        settings.data,
        settings.name,
        urls=settings.servers,
        token_file=settings.token_file,
        document=lambda: node_document(settings, found, sandbox),
        ca_file=settings.ca_file,
        addresses=settings.grpc,
    )


def _identity(credentials: NodeCertificates) -> AgentIdentity:
    assert credentials.identity is not None, "only nodes that have joined serve"
    return credentials.identity


def node_document(settings: AgentSettings, found: Inventory, sandbox: Sandbox) -> dict[str, Any]:
    """The node object that the agent proposes when it joins for the first time."""
    spec: dict[str, Any] = {"capacity": found.capacity}
    if settings.taints:
        spec["taints"] = [dict(one) for one in settings.taints]
    metadata = {"name": settings.name, "labels": {**found.labels, **settings.labels}}
    status = {"isolation": sandbox.named, "features": [*FEATURES, *features_of(sandbox, settings.wipe)]}
    return {"metadata": metadata, "spec": spec, "status": status}


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive flock on the data directory while the block runs; the kernel releases it if the agent dies."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(directory)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise AgentStartError(f"{directory} cannot be used: {error.strerror}; choose another with --data DIR") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AgentStartError(
            f"another agent uses {directory}; stop it, or choose another directory with --data DIR"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _check_owner(directory: Path) -> None:
    """Refuse a directory that others own or may write: they could impersonate the node or start commands on it."""
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise AgentStartError(
            f"{directory} belongs to another user (uid {found.st_uid}); choose another with --data DIR,"
            " or run the agent as that user"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AgentStartError(
            f"{directory} can be written by others; run `chmod go-w {directory}` if you trust its content,"
            " or choose another with --data DIR"
        )


def _on_signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    return stopping
