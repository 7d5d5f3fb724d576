"""Retention of the directories of ended placements: their output and their start parameters.

They are kept for a while as logs. A wipe removes all of them, acknowledged or not: the journal knows how they ended.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from bursar.agent.executor.journal import sync_folder
from bursar.core.values.wording import counted


def remove_old(folder: Path, keep: Collection[str], seconds: float, bytes_max: int) -> None:
    """Remove directories older than `seconds`, and the oldest beyond `bytes_max`."""
    kept_bytes = 0
    old_at = time.time() - seconds
    for path, changed_at, size in sorted(_folders(folder), key=lambda one: -one[1]):
        if path.name in keep:
            continue
        kept_bytes += size
        if changed_at < old_at or kept_bytes > bytes_max:
            shutil.rmtree(path, ignore_errors=True)


def remove_all(folder: Path, keep: Collection[str]) -> None:
    """Remove all but `keep`. Raises OSError if something stays; it names no file, because every tenant may read it."""
    for path in list(folder.iterdir()):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink()
    if left := [path for path in folder.iterdir() if path.name not in keep]:
        raise OSError(f"the output of {counted(len(left), 'placement')} cannot be removed")
    sync_folder(folder)


def _folders(folder: Path) -> list[tuple[Path, float, int]]:
    """Directories with their modification time and bytes of output."""
    found = []
    for path in list(folder.iterdir()):
        with suppress(OSError):
            size = sum(one.stat().st_size for one in path.glob("output.*"))
            found.append((path, path.stat().st_mtime, size))
    return found
