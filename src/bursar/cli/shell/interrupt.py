"""Handling of SIGINT and SIGTERM: the first signal interrupts the command so that it can clean up, a second one
interrupts the cleanup."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal to stop. It is not an Exception, so that error handlers let it pass."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class InterruptTrap:
    """A context manager in which a signal raises Interrupted. Until `release` the first signal is held back, because
    the command must know what it has started before it can undo it."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._held = True
        self._waiting: int | None = None

    def __enter__(self) -> InterruptTrap:
        self._before = {one: signal.signal(one, self._handle) for one in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def release(self) -> None:
        """Let signals interrupt at once from now on, a held one immediately."""
        self._held = False
        if self._waiting is not None:
            raise Interrupted(self._waiting)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._held and self._waiting is None:
            self._waiting = number
            return
        raise Interrupted(number)
