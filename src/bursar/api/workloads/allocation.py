"""Handlers of allocations beside the common ones: bulk release, and status reports of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bursar.api.http.body import dry_run, idempotency_key_of, read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.delete import delete_all
from bursar.api.objects.edit import JSON_PATCH, STRATEGIC_PATCH
from bursar.api.objects.object import find, kind_of, namespace_tenant, origin_of, query_of, written_answer
from bursar.api.objects.object import key_of as allocation_key
from bursar.commands.command import Written
from bursar.commands.workloads.allocation import request_in
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.core.values.patch import PatchError, json_patch, merge, strategic
from bursar.core.values.quantity import format_granted
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.core.values.selector import SelectorError, parse
from bursar.ops.scheduling.placement import report
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.wire.kinds.allocation import AllocationStatus
from bursar.wire.shared.document import encode, is_ending
from bursar.wire.shared.reading import without_nulls

REPORTED = (Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class BulkRelease(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    label_selector: str = ""
    grace_period_seconds: int = 30
    dry_run: bool = False


class Released(msgspec.Struct, rename="camel"):
    released: int
    failed: int
    total_resources_freed: dict[str, str]


async def bulk_release(call: Call) -> Outcome:
    """Release all matching allocations. Pending work counts as released; only bound resources are freed."""
    document, dry = read_document(call), dry_run(call)
    if isinstance(document, Refusal):
        return document
    if isinstance(dry, Refusal):
        return dry
    try:
        wanted = msgspec.convert(document, BulkRelease)
        labels = parse(wanted.label_selector)
    except (msgspec.ValidationError, SelectorError) as error:
        return invalid(f"the bulk release is invalid: {error}")
    if not labels.terms:
        return invalid(
            "labelSelector is required: it selects the allocations to release",
            field_fault("labelSelector", "is required"),
            hint='For example {"labelSelector": "batch-id=job-1"}.',
        )
    if not 0 <= wanted.grace_period_seconds < 10**7:
        return invalid("gracePeriodSeconds must be a number of seconds, not negative")
    seen = await namespace_tenant(call, kind_of(call))
    if isinstance(seen, Refusal):
        return seen
    query = await query_of(call)
    if isinstance(query, Refusal):
        return query
    wanted.dry_run = wanted.dry_run or dry
    return await _release_all(call, Query(query.kind, query.namespace, query.tenants, labels=labels), wanted)


async def _release_all(call: Call, query: Query, wanted: BulkRelease) -> Outcome:
    async with call.context.database.reader() as db:
        page = await listing.load_page(db, query)
    waiting = [one for one in page.items if not is_ending(one.doc)]
    replies = await delete_all(
        call, kind_of(call), waiting, wanted.grace_period_seconds, dry=wanted.dry_run, reason="bulk release"
    )
    freed: dict[str, int] = {}
    released = 0
    for item, reply in zip(waiting, replies, strict=True):
        if not isinstance(reply, Written):
            continue
        released += 1
        if msgspec.json.decode(item.status).get("nodes"):
            request = request_in(item.doc)
            for name, value in request.requests.items():
                freed[name] = freed.get(name, 0) + value * request.nodes
    failed = sum(isinstance(one, Refusal) and one.code is not Code.NOT_FOUND for one in replies)
    totals = {name: format_granted(name, value) for name, value in sorted(freed.items())}
    return Answer(200, encode(Released(released, failed, totals)))


async def report_status(call: Call) -> Outcome:
    """PATCH or PUT of a status: a node's report on its allocations. An end releases their resources."""
    key = allocation_key(call)
    found = await find(call, key)
    if isinstance(found, Refusal):
        return found
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    status = _status_after(call, key, msgspec.json.decode(found.status), document)
    if isinstance(status, Refusal):
        return status
    if status.phase not in REPORTED:
        return Refusal(
            Code.IMMUTABLE,
            f"status.phase can be reported as {', '.join(REPORTED)}, not {str(status.phase)[:63]!r}",
            causes=(Cause("FieldValueNotSupported", "is not a phase that can be reported", field="status.phase"),),
        )
    idempotency_key, dry = idempotency_key_of(call), dry_run(call)
    if isinstance(idempotency_key, Refusal):
        return idempotency_key
    if isinstance(dry, Refusal):
        return dry
    command = Report(
        key=key,
        uid=found.uid,
        origin=origin_of(call),
        idempotency_key=idempotency_key,
        phase=Phase(status.phase),
        node=call.identity.node,
        reason=status.reason or "",
        message=status.message or "",
        exit_code=status.exit_code if isinstance(status.exit_code, int) else None,
        gang=found.gang,
    )
    runtime = call.context.runtime
    reply = await (runtime.trying.submit(command, key.namespace) if dry else report(runtime, command))
    return await written_answer(call, kind_of(call), reply)


def _status_after(call: Call, key: Key, before: dict[str, Any], patch: Any) -> AllocationStatus | Refusal:
    current: dict[str, Any] = {"metadata": {"name": key.name}, "status": before}
    try:
        if call.route.method == "PUT":
            after: Any = patch
        elif call.media_type == JSON_PATCH:
            after = json_patch(current, patch)
        elif call.media_type == STRATEGIC_PATCH:
            after = strategic(current, patch, kind_of(call).merge_keys)
        else:
            after = merge(current, patch)
    except PatchError as error:
        return invalid(f"the patch cannot be applied: {error}")
    if not isinstance(after, Mapping) or not isinstance(after.get("status"), Mapping):
        return invalid("the body must have a status", field_fault("status", "is required"))
    try:
        return msgspec.convert(without_nulls(after["status"]), AllocationStatus)
    except msgspec.ValidationError as error:
        return invalid(f"the status is invalid: {error}")
