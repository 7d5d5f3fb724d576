"""How many files a process may have open: every stream, connection and placement is one or two of them."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """As many as the machine lets us; the usual 1024 is soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_max() -> int:
    """How many this process may have open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
