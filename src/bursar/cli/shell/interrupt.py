"""Being told to stop: the first time what is going on is interrupted, so that it can be undone; the second time too."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Not an Exception: nothing that handles trouble on its way may take it for some."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class InterruptTrap:
    """Within the block a signal to stop raises Interrupted. Until `release` the first one waits: what has been begun
    must be known before it can be undone."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._held = True
        self._waiting: int | None = None

    def __enter__(self) -> InterruptTrap:
        self._before = {one: signal.signal(one, self._hear) for one in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def release(self) -> None:
        """From now on a signal interrupts at once; one that came before does so now."""
        self._held = False
        if self._waiting is not None:
            raise Interrupted(self._waiting)

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self._held and self._waiting is None:
            self._waiting = number
            return
        raise Interrupted(number)
