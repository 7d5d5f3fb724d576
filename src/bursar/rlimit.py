"""The limit of open files (RLIMIT_NOFILE): each stream, connection and placement needs one or two descriptors."""

from __future__ import annotations

import resource


def allow_open_files() -> None:
    """Raise the soft limit, usually 1024, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_files_max() -> int:
    """The soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
