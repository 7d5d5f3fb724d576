"""Work in a thread of its own, for what may wait for ever, or very long: for a process that hangs in a driver, or for
somebody's name server.

In a pool it would take a place from everybody else, and the program could not end before it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def apart(work: Callable[[], T]) -> T:
    """What it returns or raises. Whoever is cancelled waits no longer; the work itself goes on."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failed:
            error = failed
        with suppress(RuntimeError):  # nobody is there any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return await done
