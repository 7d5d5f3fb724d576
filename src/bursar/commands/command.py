"""The base type of commands, their replies, and the replies that are remembered under a request id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from bursar.core.batch.placement_billing import PlacementPayer
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.allocation import GangKey
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin, Stored, Write
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Cause, Code, Refusal


class Written(Struct, frozen=True):
    """An object after the command; for a deletion, its last state."""

    key: Key
    doc: bytes
    status: bytes
    revision: int
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The answer to an edit that leaves an object as it is."""

    before: Stored


Result: TypeAlias = Write | tuple[Write, ...] | Refusal | Any
Reply: TypeAlias = Written | tuple[Written, ...] | Refusal | Any


class Answers(Struct, frozen=True):
    """The results of a command of several parts, each with its own answer."""

    each: tuple[Result, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One operation on one object. `decide` is called under locks, after everything named here was read."""

    key: Key
    origin: Origin
    idempotency_key: IdempotencyKey | None = None
    fence: int | None = None  # of the leader, if only the leader may do this

    @property
    def many(self) -> bool:
        """Whether it writes so many objects that it would delay other commands of its lane."""
        return False

    def objects(self) -> Iterable[Key]:
        """Objects to lock and read."""
        return (self.key,)

    def needs(self) -> Iterable[Key]:
        """Objects to read without a lock, because only their existence matters."""
        return ()

    def gangs(self) -> dict[GangKey, int]:
        """Gangs to lock, with the size of those that do not exist yet."""
        return {}

    def nodes(self) -> Iterable[str]:
        """Nodes to lock and read, in addition to those that the object is placed on."""
        return ()

    def heartbeats(self) -> Iterable[str]:
        """Nodes whose last heartbeat to lock and read: no heartbeat of theirs is stored before the commit."""
        return ()

    def claimed_nodes(self) -> Iterable[str]:
        """Nodes that it claims: the claimed nodes are counted, and the placements there read. It must lock the
        settings, which keeps out other claims."""
        return ()

    def placed(self, _: UnitOfWork, /) -> Iterable[Key]:
        """Objects whose placements to read, and whose nodes to lock."""
        return self.objects()

    def charges(self, batch: UnitOfWork, /) -> Iterable[tuple[str, Charge]]:
        """Every (namespace, charge) that deciding may add or remove."""
        before = batch.objects.get(self.key)
        return ((self.key.namespace, before.charge),) if before is not None else ()

    def pays(self, _: UnitOfWork, /) -> Iterable[PlacementPayer]:
        """Prepaid placements that deciding may make; called only if a tenant is prepaid."""
        return ()

    def meters(self, _: UnitOfWork, /) -> Iterable[str]:
        """Nodes whose usage deciding may begin to count: their device classes are read."""
        return ()

    def leases(self, _: UnitOfWork, /) -> Iterable[int]:
        """Leases that deciding may close; called only if a placement or a claim has one."""
        return ()

    def weight(self) -> int:
        """The bytes that it holds while queued: those of its drafts."""
        return 0

    def decide(self, batch: UnitOfWork, /) -> Result:
        raise NotImplementedError


def weight_of_drafts(*drafts: Stored) -> int:
    return sum(len(one.doc) + len(one.status) for one in drafts)


def written(write: Write) -> Written:
    shown: Stored = write.shown
    return Written(write.key, shown.doc, shown.status, write.revision, deleted=write.after is None)


# Replies that are remembered under a request_id.


class _Outcome(msgspec.Struct, omit_defaults=True):
    key: tuple[str, str, str] | None = None
    doc: msgspec.Raw = msgspec.Raw(b"null")
    status: msgspec.Raw = msgspec.Raw(b"null")
    revision: int = 0
    deleted: bool = False
    refusal: Refusal | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Outcome)


def encode_reply(reply: Reply) -> bytes:
    if isinstance(reply, Refusal):
        return _encoder.encode(_Outcome(refusal=reply))
    assert isinstance(reply, Written)
    return _encoder.encode(
        _Outcome((*reply.key,), msgspec.Raw(reply.doc), msgspec.Raw(reply.status), reply.revision, reply.deleted)
    )


def decode_reply(raw: bytes) -> Reply:
    outcome = _decoder.decode(raw)
    if outcome.refusal is not None:
        return outcome.refusal
    assert outcome.key is not None
    return Written(Key(*outcome.key), bytes(outcome.doc), bytes(outcome.status), outcome.revision, outcome.deleted)


DEPOSED = Refusal(
    Code.STALE,
    "another controller leads now",
    "Nothing was changed: the new leader decides again.",
)

REUSED = Refusal(
    Code.REQUEST_REUSED,
    "this request_id was used before with another body",
    "Send the same body to get the same answer, or a new request_id to do something new.",
    (Cause("FieldValueDuplicate", "was used before with another body", field="request_id"),),
)
