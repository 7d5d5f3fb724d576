"""A supervised child process of the server: restarted with backoff when it dies, run as the server's user."""

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
READY = "ready"  # the line that a child prints when it is ready


@dataclass(slots=True)
class ChildProcess:
    """Invariant: until `stop`, at most one process of it lives, and a dead one is replaced."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    descriptors: tuple[int, ...] = ()
    over: HandOver | None = None  # None: it runs as the user of this process
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
            if self._is_stopping():
                # `stop` was called during the start, when there was no process to terminate.
                await self.stop()
                return
            assert self.process.stdout is not None
            async for line in self.process.stdout:
                if line.decode(errors="replace").strip() == READY:
                    self.ready.set()
            code = await self.process.wait()
            if self._is_stopping():
                return
            failures = 0 if loop.time() - started > 10 else failures + 1
            pause = BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)]
            log.warning(
                "child_died", message="a child process died and is started again",
                child=self.name, code=code, pause_seconds=pause,
            )  # fmt: skip
            await asyncio.sleep(pause)

    def _is_stopping(self) -> bool:
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
