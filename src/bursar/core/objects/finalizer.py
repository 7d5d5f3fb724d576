"""Finalizers: names in `metadata.finalizers` of somebody who has to clean up before an object may go.

A deletion marks such an object with the time and waits until the list is empty. Whoever put a name there takes it away
again; nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bursar.core.values.names import qualified_name, quoted

COUNT_MAX: Final = 32
# On a job that was deleted without what it made, while others still have to clean up: its allocations stay.
ORPHAN: Final = "bursar.io/orphan"
_OURS: Final = "bursar.io/"


def faults(names: Sequence[str]) -> Iterator[str]:
    """What is wrong with a list of finalizers."""
    if len(names) > COUNT_MAX:
        yield f"must have at most {COUNT_MAX} entries, got {len(names)}"
        return
    for name in names:
        yield from qualified_name(name)


def added(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """The names that are new."""
    known = set(before)
    return [name for name in dict.fromkeys(after) if name not in known]


def reserved(names: Iterable[str]) -> str:
    """Why one of these names is not for users; empty where all are theirs to give."""
    ours = next((name for name in names if name.startswith(_OURS)), "")
    return f"{quoted(ours)} is not for users: names below {_OURS} are the server's" if ours else ""
