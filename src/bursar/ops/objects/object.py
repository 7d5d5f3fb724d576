"""Verbs on objects of any kind: create, change, delete.

Changes use optimistic concurrency: a change is computed from a version that was read without a lock, and committed only
if the object still has that revision. A caller that named no version is retried on the new one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from bursar.commands.command import Command, Reply, Unchanged
from bursar.commands.objects.object import CreateObject, not_found, submitter
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.clock import new_uid, now
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import EMPTY, decode, encode, encode_object
from bursar.wire.shared.kind import Kind, Object, user_field

TRIES_MAX = 32


# Drafts: everything is encoded before locks are taken.


@dataclass(frozen=True, slots=True)
class ObjectCreation:
    """A new object as submitted, with its submitter."""

    kind: Kind
    one: Object
    origin: Origin
    idempotency_key: IdempotencyKey | None = None
    seen_tenant: str | None = None  # the namespace's tenant when access was checked
    admin: bool = False


def create_object(creation: ObjectCreation) -> CreateObject:
    """The command for a new object of a kind that needs no command of its own."""
    kind, seen = creation.kind, creation.seen_tenant
    user = submitter(creation.origin) if kind.submitted else ""
    draft = new_draft(kind, creation.one, tenant=kind.owner(creation.one) or seen or "", user=user)
    return CreateObject(
        key=draft.key, origin=creation.origin, idempotency_key=creation.idempotency_key, draft=draft,
        subject=kind.singular, seen_tenant=seen,
    )  # fmt: skip


def new_draft(
    kind: Kind,
    one: Object,
    *,
    tenant: str = "",
    status: dict[str, Any] | None = None,
    user: str = "",
    permitted: str = "",
) -> Stored:
    """A new object from a client's document. The server sets identity, times, submitter and the first status."""
    at = timestamp(now())
    kind.normalise(one)
    metadata = one.metadata
    metadata.uid = new_uid(kind.uid_prefix)
    metadata.creation_timestamp = at
    metadata.generation = 1
    metadata.deletion_timestamp = UNSET
    metadata.deletion_grace_period_seconds = UNSET
    charge = kind.charge_of(one)
    first = status if status is not None else kind.first_status(one, at) | kind.granted(charge.accepted)
    if user:
        first["user"] = user
    if permitted:
        first["permittedBy"] = permitted
    if hasattr(one, "status"):
        one.status = UNSET
    fields = {**kind.fields(one), **user_field(user)}
    return Stored(
        key=Key(kind.name, metadata.namespace or "", metadata.name),
        uid=metadata.uid,
        tenant=tenant,
        labels=dict(metadata.labels or {}),
        fields=fields,
        doc=encode_object(kind, one),
        status=encode(first) if first else EMPTY,
        charge=charge,
    )


# Verbs.


async def get(runtime: Runtime, key: Key) -> Stored | Refusal:
    """One object. Concurrent calls share one statement."""
    found = await runtime.reading.submit(key)
    return found if found is not None else not_found(key)


Next = Callable[[Stored, dict[str, Any]], Unchanged | Command | Refusal]


async def change(
    runtime: Runtime,
    key: Key,
    edit: Next,
    *,
    tenant: str,
    dry_run: bool = False,
    pinned: bool = False,
    first: Stored | None = None,
) -> Reply:
    """Read the object, let `edit` make a command for that version, and submit it; retry after a conflict.

    A `pinned` caller named the version it changed, and gets the conflict at once. `first` is a version that the caller
    has read already.
    """
    reply: Reply = not_found(key)
    for tries in range(TRIES_MAX):
        if tries > 2:
            # Jitter, so that the same callers do not win every time.
            await asyncio.sleep(random.uniform(0, 0.002 * tries))  # noqa: S311
        before = first or await get(runtime, key)
        first = None
        if isinstance(before, Refusal):
            return before
        command = edit(before, decode(before.doc, before.status, before.revision))
        if isinstance(command, Refusal | Unchanged):
            return command
        reply = await submit(runtime, command, tenant=tenant, dry_run=dry_run)
        if pinned or not (isinstance(reply, Refusal) and reply.code is Code.CONFLICT):
            return reply
    return reply


async def submit(runtime: Runtime, command: Command, *, tenant: str, dry_run: bool = False) -> Reply:
    """Put a command into its lane."""
    kind = BY_NAME[command.key.kind]
    if dry_run:
        lane = runtime.trying_shape if kind.in_tree else runtime.trying
    elif kind.in_tree:
        lane = runtime.shaping
    else:
        lane = runtime.creating if isinstance(command, CreateObject) else runtime.changing
        lane = runtime.bulk if command.many else lane
    reply = await lane.submit(command, tenant)
    if kind.offers_resources:
        runtime.ceilings.forget()
    return reply
