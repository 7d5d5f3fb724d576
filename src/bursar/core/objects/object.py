"""Objects as the store keeps them: identity, what selectors ask about, what they hold, and two opaque documents.

`doc` is metadata and spec, `status` is status; both are JSON without the resourceVersion, which is `revision`. Rules do
not look inside: whoever builds a draft says beside it what the rules need to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from bursar.core.objects.charge import NOTHING, Charge

UNASSIGNED = -1  # the revision of what was written in a batch that has not taken its numbers yet


class Key(NamedTuple):
    kind: str
    namespace: str  # empty for kinds without one
    name: str


class Stored(Struct, frozen=True):
    key: Key
    uid: str
    tenant: str
    labels: Mapping[str, str]
    fields: Mapping[str, str]
    doc: bytes
    status: bytes
    charge: Charge = NOTHING
    gang: str = ""
    revision: int = UNASSIGNED


class Origin(Struct, frozen=True):
    """Who did what, and why: committed with what was done."""

    actor: str
    verb: str
    reason: str = ""


class Write(Struct):
    """One change of one object: its line in the feed. The revision is known once the batch has taken its numbers."""

    key: Key
    before: Stored | None
    after: Stored | None
    origin: Origin
    revision: int = UNASSIGNED
    last: Stored | None = None  # how a deleted object ended, where that differs from what it was before

    @property
    def type(self) -> str:
        if self.before is None:
            return "ADDED"
        return "MODIFIED" if self.after is not None else "DELETED"

    @property
    def shown(self) -> Stored:
        """The object that a watcher is shown: the last state of what was deleted."""
        shown = self.after or self.last or self.before
        assert shown is not None
        return shown
