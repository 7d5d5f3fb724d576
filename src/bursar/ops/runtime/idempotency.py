"""Idempotency keys: a request is decided once, and every repetition, even years later, gets the same answer.

Keys are claimed before all else; a claim waits for a rival transaction that claims the same key. Only answers that were
decided under locks are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from bursar.commands.command import REUSED
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.refusal import Refusal
from bursar.store.db import idempotency as store
from bursar.store.db.database import Connection, Stale
from bursar.store.db.idempotency import Remembered


class Claiming(Protocol):
    """A command that may carry an idempotency key."""

    @property
    def idempotency_key(self) -> IdempotencyKey | None: ...


C = TypeVar("C", bound=Claiming)
R = TypeVar("R")


async def claim(
    db: Connection, commands: Sequence[Claiming]
) -> tuple[set[RequestKey], Mapping[RequestKey, Remembered]]:
    """Claim the keys of these commands: the newly claimed ones, and the remembered answers of the others."""
    claims: dict[RequestKey, IdempotencyKey] = {}
    for command in commands:
        if command.idempotency_key is not None:
            claims.setdefault(command.idempotency_key.key, command.idempotency_key)
    if not claims:
        return set(), {}
    ours = await store.claim(db, list(claims.values()))
    theirs = [key for key in claims if key not in ours]
    if not theirs:
        return ours, {}
    remembered = await store.load(db, theirs)
    if len(remembered) != len(theirs) or any(one.outcome is None for one in remembered.values()):
        raise Stale("a request was claimed by a rival that did not answer it")
    return ours, remembered


def decide_once(
    commands: Sequence[C],
    remembered: Mapping[RequestKey, Remembered],
    decode: Callable[[bytes], R],
    decide: Callable[[C], R],
) -> list[R | Refusal]:
    """Decide one command after another. A repeated request, in this batch or from before, gets its first answer."""
    results: list[R | Refusal] = []
    answered: dict[RequestKey, tuple[str, R]] = {
        key: (one.fingerprint, decode(one.outcome)) for key, one in remembered.items() if one.outcome is not None
    }
    for command in commands:
        if command.idempotency_key is None:
            results.append(decide(command))
            continue
        key, fingerprint = command.idempotency_key
        if key not in answered:
            answered[key] = (fingerprint, decide(command))
        results.append(answered[key][1] if answered[key][0] == fingerprint else REUSED)
    return results


async def remember(
    db: Connection,
    commands: Sequence[Claiming],
    claimed: set[RequestKey],
    replies: Sequence[R],
    encode: Callable[[R], bytes],
) -> None:
    outcomes: dict[RequestKey, bytes] = {}
    forgotten: set[RequestKey] = set()
    for command, reply in zip(commands, replies, strict=True):
        key = command.idempotency_key.key if command.idempotency_key is not None else None
        if key not in claimed or key in outcomes:
            continue
        if isinstance(reply, Refusal) and not reply.remembered:
            forgotten.add(key)
        else:
            outcomes[key] = encode(reply)
    if outcomes:
        await store.save_outcomes(db, outcomes)
    if forgotten:
        await store.forget(db, sorted(forgotten))
