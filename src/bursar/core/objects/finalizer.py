"""Finalizers: names in `metadata.finalizers` that hold back the deletion of an object until its owners cleaned up.

A deletion sets `deletionTimestamp` on such an object and completes when the list is empty. Each finalizer is removed by
the client that added it, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bursar.core.values.names import qualified_name, quoted

COUNT_MAX: Final = 32
# On a job that is deleted with `propagationPolicy: Orphan`, while it has other finalizers: its allocations remain.
ORPHAN: Final = "bursar.io/orphan"
_OURS: Final = "bursar.io/"


def faults(names: Sequence[str]) -> Iterator[str]:
    """The faults of a list of finalizers."""
    if len(names) > COUNT_MAX:
        yield f"must have at most {COUNT_MAX} entries, got {len(names)}"
        return
    for name in names:
        yield from qualified_name(name)


def added(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """The new names of a changed list."""
    known = set(before)
    return [name for name in dict.fromkeys(after) if name not in known]


def reserved(names: Iterable[str]) -> str:
    """Why users may not set one of these names; empty if they may set all."""
    ours = next((name for name in names if name.startswith(_OURS)), "")
    return f"{quoted(ours)} is reserved: names that begin with {_OURS} belong to the server" if ours else ""
