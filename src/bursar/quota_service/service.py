"""The loop of the quota service: it watches requests and quotas, and sends the decider's plans.

Quotas are watched only while requests are pending, so that a cluster without gates pays for one idle watch. Everything
is read again after an outage; nothing is stored here.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from bursar.client import ApiError, AsyncClient, BursarError, ConnectionFailed, Forbidden, Unauthorized
from bursar.quota_service.decider import DECIDE_MAX, GATE, Decider, PlannedDecision

log = structlog.get_logger()

PAUSE_SECONDS = 0.5  # after the first failure; doubled with every further one
PAUSE_SECONDS_MAX = 30.0
CALL_SECONDS = 0.1  # the shortest time between two calls that are not full
LINGER_SECONDS = 30.0  # for which quotas are still watched after the last request
REREAD_SECONDS = 0.5
REPLACED_SECONDS_MAX = 30.0

Connect = Callable[[str], AsyncClient]  # a client with this token


class TokenUnreadable(Exception):
    """The token file cannot be read, or is empty; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The service's token: a fixed one, or that of a file, which may be replaced while the service runs."""

    text: str = ""
    path: Path | None = None

    def read(self) -> str:
        if self.path is None:
            return self.text
        try:
            found = self.path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise TokenUnreadable(f"cannot read the token in {self.path}: {reason}") from error
        if not found:
            raise TokenUnreadable(f"the token file {self.path} is empty")
        return found


@dataclass(slots=True)
class QuotaService:
    """One service over one client, until its token is refused."""

    client: AsyncClient
    decider: Decider = field(default_factory=Decider)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _known: asyncio.Event = field(default_factory=asyncio.Event)  # set while all figures are known
    _asked: asyncio.Event = field(default_factory=asyncio.Event)  # set while requests are pending

    async def run(self) -> None:
        """Decide for ever. Raises Unauthorized or Forbidden if the server refuses the token."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_requests(), name="requests")
            tasks.create_task(self._watch_quotas(), name="quotas")
            tasks.create_task(self._decide(), name="decisions")

    # Watching.

    async def _watch_requests(self) -> None:
        async def watch() -> None:
            self.decider.begin_requests()
            async for event in self.client.watch_approvals(gate=GATE):
                self.decider.take_request(event)
                self._asked.set()
                self._changed.set()

        await _again("requests_watch_failed", watch)

    async def _watch_quotas(self) -> None:
        while True:
            await self._asked.wait()
            figures = asyncio.create_task(_again("quotas_watch_failed", self._watch_figures))
            try:
                await _until_idle(self._idle, figures)
            finally:
                figures.cancel()
                with suppress(asyncio.CancelledError):
                    await figures
                self._known.clear()

    async def _watch_figures(self) -> None:
        self._known.clear()
        self.decider.begin_figures()
        async for event in self.client.watch_quotas():
            if event.type == "BOOKMARK":
                self._known.set()
            else:
                self.decider.take_figures(event)
            self._changed.set()

    def _idle(self) -> bool:
        """Whether no request has been pending for a while; then quotas need not be watched."""
        if len(self.decider):
            return False
        self._asked.clear()
        return True

    # Deciding.

    async def _decide(self) -> None:
        pause = PAUSE_SECONDS
        while True:
            await self._known.wait()
            self._changed.clear()
            plan = self.decider.plan(time.monotonic())
            if not plan:
                await self._wait()
                continue
            sent_at = time.monotonic()
            try:
                await self._send(plan)
                pause = PAUSE_SECONDS
                if len(plan) < DECIDE_MAX:
                    # Requests that come one by one share calls, which the server counts.
                    await asyncio.sleep(max(0.0, sent_at + CALL_SECONDS - time.monotonic()))
            except (Unauthorized, Forbidden):
                raise
            except BursarError as error:
                log.warning(
                    "decisions_failed", message="decisions could not be sent, and are planned again",
                    decisions=len(plan), error=error.message, pause_seconds=pause,
                )  # fmt: skip
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
                pause = min(PAUSE_SECONDS_MAX, pause * 2)

    async def _send(self, plan: Sequence[PlannedDecision]) -> None:
        try:
            answers = await self.client.decide_approvals([one.item() for one in plan])
        except BaseException:
            self.decider.failed(plan)
            raise
        now, counts = time.monotonic(), dict[str, int]()
        for decision, answer in zip(plan, answers, strict=True):
            outcome = self.decider.answered(decision, answer, now)
            counts[outcome] = counts.get(outcome, 0) + 1
        log.info("requests_decided", message="requests were decided", pending=len(self.decider), **counts)

    async def _wait(self) -> None:
        """Wait until something changes, or until the next plan is due."""
        due = self.decider.next_due()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.01, due - time.monotonic())):
                await self._changed.wait()


async def _until_idle(idle: Callable[[], bool], task: asyncio.Task[None]) -> None:
    """Wait until it is idle for LINGER_SECONDS, or the task fails."""
    while True:
        done, _ = await asyncio.wait({task}, timeout=LINGER_SECONDS)
        if done:
            task.result()
        if idle():
            return


async def _again(event: str, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Watch again and again. The SDK resumes over short outages; this is for long ones."""
    pause = PAUSE_SECONDS
    while True:
        began = time.monotonic()
        try:
            await watch()
        except (Unauthorized, Forbidden):
            raise
        except BursarError as error:
            pause = PAUSE_SECONDS if time.monotonic() - began > PAUSE_SECONDS_MAX else min(PAUSE_SECONDS_MAX, pause * 2)
            log.warning(event, message="a watch failed and is opened again", error=error.message, pause_seconds=pause)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret


async def serve(connect: Connect, token: TokenSource) -> None:
    """Run the service until it is stopped, or until its token is refused for good. A token that was good before may
    have been replaced in its file."""
    text = token.read()
    while True:
        started = False
        async with connect(text) as client:
            try:
                await _check(client)
                started = True
                log.info("quota_service_started", message="the quota service decides requests", url=client.context.url)
                await QuotaService(client).run()
            except* (Unauthorized, Forbidden) as errors:
                refused = _first(errors)
        if not started:
            raise refused
        log.warning("token_refused", message="the server refuses the token", error=refused.message)
        if not (following := await _replaced(token, text)):
            raise refused
        text = following


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, ApiError)
    return found


async def _replaced(token: TokenSource, text: str) -> str:
    """The token that follows a refused one; empty if there is none after a while."""
    end = time.monotonic() + REPLACED_SECONDS_MAX
    while token.path is not None and time.monotonic() < end:
        if (found := token.read()) != text:
            return found
        await asyncio.sleep(REREAD_SECONDS)
    return ""


async def _check(client: AsyncClient) -> None:
    """Make sure that the server takes the token, and that it decides this gate; wait while the server is away."""
    pause = PAUSE_SECONDS
    while True:
        try:
            who = await client.whoami()
            break
        except (ConnectionFailed, ApiError) as error:
            if not error.passing:
                raise
            log.warning("server_away", message="the server does not answer", error=error.message, pause_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(PAUSE_SECONDS_MAX, pause * 2)
    gates = who.get("gates") or []
    if who.get("role") != "system-admin" and GATE not in gates and "*" not in gates:
        raise Forbidden(
            f"the token of {who.get('user')} has the role {who.get('role')}, which does not decide gate {GATE}",
            hint=f"create a token of role approver whose gates are [{GATE}]: POST /api/v1/tokens",
        )


def run(connect: Connect, token: TokenSource) -> int:
    """Run the service until SIGTERM or SIGINT."""

    async def main() -> None:
        task, loop = asyncio.ensure_future(serve(connect, token)), asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    return 0
