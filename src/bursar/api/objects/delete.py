"""Handlers of deletion: one object, or all that match."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, kind_of, origin_of, query_of, recalled, written_answer
from bursar.api.objects.render import shown
from bursar.commands.command import Reply, Written
from bursar.commands.lifecycle.dispatch import delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.objects import object as ops
from bursar.store.objects import listing
from bursar.store.objects.listing import ListedObject, Query
from bursar.wire.shared.document import render_list
from bursar.wire.shared.kind import Kind

AT_ONCE = 256
POLICIES = ("Background", "Foreground", "Orphan")


class DeleteOptions(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    grace_period_seconds: int | None = None
    propagation_policy: str | None = None
    orphan_dependents: bool | None = None
    preconditions: dict[str, str | None] | None = None
    dry_run: list[str] | None = None


def delete_options(call: Call) -> DeleteOptions | Refusal:
    options = DeleteOptions()
    if call.body.strip():
        document = read_document(call)
        if isinstance(document, Refusal):
            return document
        try:
            options = msgspec.convert(document, DeleteOptions)
        except msgspec.ValidationError as error:
            return invalid(f"DeleteOptions is invalid: {error}")
    grace = call.query.get("gracePeriodSeconds", "")
    if grace:
        if not (grace.isascii() and grace.isdigit() and len(grace) < 8):
            return invalid("gracePeriodSeconds must be a number of seconds")
        options.grace_period_seconds = int(grace)
    if options.grace_period_seconds is not None and not 0 <= options.grace_period_seconds < 10**7:
        return invalid("gracePeriodSeconds must be a number of seconds, not negative")
    options.propagation_policy = call.query.get("propagationPolicy") or options.propagation_policy
    if options.propagation_policy not in (None, "", *POLICIES):
        return invalid(f"propagationPolicy must be one of {', '.join(POLICIES)}")
    if options.dry_run:
        call.query = {**call.query, "dryRun": options.dry_run[0]}
    return options


def is_orphaning(options: DeleteOptions) -> bool:
    """Whether objects that this one created are kept."""
    return options.propagation_policy == "Orphan" or options.orphan_dependents is True


def _preconditions(options: DeleteOptions) -> DeletePreconditions | Refusal:
    given = options.preconditions or {}
    revision = given.get("resourceVersion") or ""
    if revision and not (revision.isascii() and revision.isdigit() and len(revision) <= 18):
        return invalid("preconditions.resourceVersion must be a number")
    return DeletePreconditions(given.get("uid") or "", int(revision) if revision else None)


async def delete(call: Call) -> Outcome:
    options = delete_options(call)
    if isinstance(options, Refusal):
        return options
    preconditions, idempotency_key, dry = _preconditions(options), idempotency_key_of(call), dry_run(call)
    for refusal in (preconditions, idempotency_key, dry):
        if isinstance(refusal, Refusal):
            return refusal
    kind = kind_of(call)
    assert not isinstance(idempotency_key, Refusal)
    assert isinstance(preconditions, DeletePreconditions)
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return await recalled(call, idempotency_key, found)
    command = delete_command(
        kind,
        found,
        origin_of(call),
        idempotency_key,
        preconditions=preconditions,
        grace_seconds=options.grace_period_seconds,
        orphan=is_orphaning(options),
    )
    reply = await ops.submit(call.context.runtime, command, tenant=found.tenant, dry_run=bool(dry))
    return await written_answer(call, kind, reply)


async def delete_collection(call: Call) -> Outcome:
    """Delete all matching objects; objects deleted meanwhile are skipped."""
    query, options, dry = await query_of(call), delete_options(call), dry_run(call)
    for refusal in (query, options, dry):
        if isinstance(refusal, Refusal):
            return refusal
    assert isinstance(query, Query)
    assert isinstance(options, DeleteOptions)
    kind = kind_of(call)
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, query)
    replies = await delete_all(
        call, kind, page.items, options.grace_period_seconds, dry=bool(dry), orphan=is_orphaning(options)
    )
    items = [shown(reply) for reply in replies if isinstance(reply, Written)]
    refused = [one for one in replies if isinstance(one, Refusal) and one.code is not Code.NOT_FOUND]
    return refused[0] if refused else Answer(200, render_list(kind, items, page.revision))


async def delete_all(
    call: Call,
    kind: Kind,
    items: Sequence[ListedObject],
    grace_seconds: int | None,
    *,
    dry: bool,
    reason: str = "",
    orphan: bool = False,
) -> list[Reply]:
    async def delete_one(one: ListedObject) -> Reply:
        found = await ops.get(call.context.runtime, Key(kind.name, one.namespace, one.name))
        if isinstance(found, Refusal):
            return found
        command = delete_command(
            kind,
            found,
            origin_of(call, reason),
            preconditions=DeletePreconditions(),
            grace_seconds=grace_seconds,
            orphan=orphan,
        )
        return await ops.submit(call.context.runtime, command, tenant=one.tenant, dry_run=dry)

    replies: list[Reply] = []
    for start in range(0, len(items), AT_ONCE):
        replies += await asyncio.gather(*(delete_one(one) for one in items[start : start + AT_ONCE]))
    return replies
