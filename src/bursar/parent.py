"""The link of a child process of `bursar serve` to its parent: no child outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "BURSAR_PARENT"  # the environment variable with the parent's process id
_PR_SET_PDEATHSIG = 1


class ParentGone(OSError):
    """The server that started this process has ended already."""


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies (PR_SET_PDEATHSIG), so that no child outlives the server."""
    if sys.platform != "linux" or PARENT not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT]):
        raise ParentGone("the server that started this process is gone")
