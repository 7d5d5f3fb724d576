"""A process of the server that is started again when it dies, as the user that it was handed over to."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from bursar.osuser import HandOver

log = structlog.get_logger()

STOP_SECONDS = 10.0
BACKOFF_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
READY = "ready"  # the line that a child prints when it serves


@dataclass(slots=True)
class ChildProcess:
    """Invariant: while it is not told to stop, at most one process of it lives, and a dead one is replaced."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...] = ()
    over: HandOver | None = None  # None: it runs as the user we are
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False

    async def keep_alive(self) -> None:
        failures = 0
        while not self.stopping:
            loop = asyncio.get_running_loop()
            started = loop.time()
            command = [sys.executable, "-P", "-m", "bursar.main", *self.arguments]
            self.process = await asyncio.create_subprocess_exec(
                *(command if self.over is None else self.over.command(command)),
                env=self.environment if self.over is None else {**self.environment, "HOME": self.over.user.home},
                pass_fds=self.descriptors,
                stdout=asyncio.subprocess.PIPE,
            )
            if self._told_to_stop():
                # While it was being started: whoever told us had nobody to tell.
                await self.stop()
                return
            assert self.process.stdout is not None
            async for line in self.process.stdout:
                if line.decode(errors="replace").strip() == READY:
                    self.ready.set()
            code = await self.process.wait()
            if self._told_to_stop():
                return
            failures = 0 if loop.time() - started > 10 else failures + 1
            pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
            log.warning("child died; starting it again", child=self.name, code=code, pause_seconds=pause)
            await asyncio.sleep(pause)

    def _told_to_stop(self) -> bool:
        return self.stopping

    async def stop(self) -> None:
        self.stopping = True
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
