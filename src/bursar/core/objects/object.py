"""Stored objects: identity, the values for selectors, the charge, and two opaque JSON documents.

`doc` is metadata and spec, `status` is status; both are JSON without the resourceVersion, which is `revision`. Rules do
not parse them: the code that builds an object passes the values that the rules need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from bursar.core.objects.charge import NOTHING, Charge

UNASSIGNED = -1  # the revision of a change whose batch has not taken its numbers yet


class Key(NamedTuple):
    """The identity of an object: kind, namespace and name."""

    kind: str
    namespace: str  # empty for kinds without one
    name: str


class Stored(Struct, frozen=True):
    """An object as the database stores it."""

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
    """The actor, verb and reason of a change, committed with it for the audit log."""

    actor: str
    verb: str
    reason: str = ""


class Write(Struct):
    """One change of one object, an entry of the change feed. Its revision is assigned when the batch commits."""

    key: Key
    before: Stored | None
    after: Stored | None
    origin: Origin
    revision: int = UNASSIGNED
    last: Stored | None = None  # the final state of a deleted object, if it differs from `before`

    @property
    def type(self) -> str:
        if self.before is None:
            return "ADDED"
        return "MODIFIED" if self.after is not None else "DELETED"

    @property
    def shown(self) -> Stored:
        """The object that watchers receive: for a deletion its last state."""
        shown = self.after or self.last or self.before
        assert shown is not None
        return shown
