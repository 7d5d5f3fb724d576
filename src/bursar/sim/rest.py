"""Simulated nodes over the public REST API.

An administrator's token registers them. Afterwards each node authenticates with its own token, reports only for itself
and sends its own heartbeats. One watch delivers the allocations bound to any of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bursar.client.calls import ROOT, segment
from bursar.client.errors import ApiError, BursarError, Conflict, ConnectionFailed, NotFound, Unauthorized
from bursar.core.objects.allocation import Phase
from bursar.sim.drive import Answer, Drive, DriveTrouble, SimPace
from bursar.sim.node import NodeReport, Nodes
from bursar.sim.registry import NotSimulated, SimRegistry, several
from bursar.sim.shape import NodeShape, documents
from bursar.sim.work import SimWork, Whole, read_work

if TYPE_CHECKING:
    from bursar.client import AsyncClient, Event

PACE = SimPace(speakers=32, batch_max=1)
HEARTBEAT_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
# Lifetime of a node's token; an expired one is replaced.
TOKEN_TTL = "24h"  # noqa: S105 - not a secret
MERGE = "application/merge-patch+json"
PLACED = ",".join(f"status.phase!={phase}" for phase in (Phase.PENDING, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED))


class RestNodes:
    """`open` registers the nodes, `run` simulates them until cancelled, `remove` deletes those without work.

    It needs an administrator's token."""

    def __init__(
        self,
        client: AsyncClient,
        shape: NodeShape,
        *,
        default_seconds: float | None = None,
        stop_seconds: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._shape = shape
        self._roll = SimRegistry(client, shape)
        self._nodes = Nodes(shape.names, default_seconds=default_seconds, stop_seconds=stop_seconds)
        self._drive = Drive(self._nodes, self, PACE, clock)
        self._tokens: dict[str, str] = {}

    @property
    def running(self) -> int:
        return self._nodes.running

    @property
    def ended(self) -> int:
        return self._nodes.ended

    # Registration.

    async def open(self) -> None:
        """Register the nodes, and adopt those of an earlier run."""
        ours = await self._roll.registered()
        await several(partial(self._register, ours), documents(self._shape))

    async def _register(self, ours: set[str], document: dict[str, Any]) -> None:
        name = document["metadata"]["name"]
        token = ""
        if name not in ours:
            try:
                made = await self._client.nodes.create(document)
            except Conflict:
                raise NotSimulated(name) from None
            token = made["status"].get("token", "")
        self._tokens[name] = token or await self._new_token(name)

    async def _new_token(self, name: str) -> str:
        wanted = {"role": "node", "node": name, "single_use": False, "ttl": TOKEN_TTL}
        made = await self._client.request("POST", f"{ROOT}/tokens", body=wanted)
        return str(made["status"]["token"])

    async def remove(self) -> int:
        return await self._roll.remove()

    # Allocations.

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._drive.run())
            group.create_task(self._heartbeat())
            group.create_task(self._watch())

    async def _watch(self) -> None:
        """Watch allocations; the client resumes after lost connections, and lists again if needed."""
        while True:
            async for event in self._client.allocations.watch(field_selector=PLACED):
                self._take(event)

    def _take(self, event: Event) -> None:
        if event.type == "DELETED":
            # It has ended, is pending again, or was deleted: no longer placed on a node.
            self._nodes.forget(str(event.object["metadata"].get("uid", "")))
        elif (work := _work(event.object)) is not None:
            self._drive.see(work)

    # Reports.

    async def say(self, reports: Sequence[NodeReport]) -> list[Answer]:
        return [await self._report(one) for one in reports]

    async def _report(self, one: NodeReport) -> Answer:
        where = f"namespaces/{segment(one.work.namespace)}/allocations/{segment(one.work.name)}/status"
        status: dict[str, Any] = {"phase": one.phase}
        if one.reason:
            status["reason"] = one.reason
        if one.exit_code is not None:
            status["exitCode"] = one.exit_code
        try:
            answer = await self._as_node(one.node, where, {"status": status})
        except (ConnectionFailed, ApiError) as error:
            return DriveTrouble.PASSING if error.passing or isinstance(error, Unauthorized) else DriveTrouble.REFUSED
        return int(answer["metadata"]["resourceVersion"])

    async def look(self, work: SimWork) -> SimWork | DriveTrouble | None:
        try:
            return _work(await self._client.allocations(work.namespace).get(work.name))
        except NotFound:
            return None
        except (ConnectionFailed, ApiError):
            return DriveTrouble.PASSING

    async def _as_node(self, name: str, where: str, patch: dict[str, Any]) -> Any:
        """A request with the node's token; an expired token is replaced."""
        try:
            return await self._patch(where, patch, self._tokens[name])
        except Unauthorized:
            self._tokens[name] = await self._new_token(name)
        return await self._patch(where, patch, self._tokens[name])

    async def _patch(self, where: str, patch: dict[str, Any], token: str) -> Any:
        headers = {"authorization": f"Bearer {token}", "content-type": MERGE}
        return await self._client.request("PATCH", f"{ROOT}/{where}", body=patch, headers=headers)

    async def _heartbeat(self) -> None:
        """Send heartbeats: a patch of a node's status without changes counts as one, and writes nothing to the feed."""
        while True:
            started = time.monotonic()
            await several(self._heartbeat_once, self._shape.names)
            await asyncio.sleep(max(0.0, HEARTBEAT_SECONDS - (time.monotonic() - started)))

    async def _heartbeat_once(self, name: str) -> None:
        try:
            await self._as_node(name, f"nodes/{segment(name)}/status", {"status": {}})
        except (ConnectionFailed, ApiError):
            return  # the next heartbeat tries again


def _work(document: dict[str, Any]) -> SimWork | None:
    try:
        whole = msgspec.convert(document, Whole)
        return read_work(whole, whole.status, int(whole.metadata.resource_version))
    except (msgspec.ValidationError, KeyError, ValueError):
        return None  # an unknown form of a newer server


def _first(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class Simulated(Protocol):
    """`open` registers nodes, `run` simulates them until cancelled, `remove` deletes those without work."""

    async def open(self) -> None: ...
    async def run(self) -> None: ...
    async def remove(self) -> int: ...


async def simulate(
    nodes: Simulated, stop: asyncio.Event, *, ready: Callable[[], None], progress: Callable[[], None], keep: bool
) -> int:
    """Simulate the nodes until `stop`; returns how many could not be removed because work runs there.

    `ready` is called when the nodes are registered, `progress` about once a second.
    """

    async def act() -> None:
        await nodes.open()
        ready()
        await nodes.run()

    try:
        await _until(stop, act(), progress)
    except BursarError:
        if not keep:
            with suppress(BursarError):  # the first error is raised
                await nodes.remove()
        raise
    return 0 if keep else await nodes.remove()


async def _until(stop: asyncio.Event, act: Coroutine[Any, Any, None], progress: Callable[[], None]) -> None:
    acting, stopping = asyncio.create_task(act), asyncio.create_task(stop.wait())
    try:
        while not (acting.done() or stopping.done()):
            await asyncio.wait((acting, stopping), timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            progress()
        if acting.done() and (error := acting.exception()):
            raise _first(error)
    finally:
        acting.cancel()
        stopping.cancel()
        await asyncio.gather(acting, stopping, return_exceptions=True)
