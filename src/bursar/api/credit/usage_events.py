"""Handler of usage events: one or many measurements of jobs. Each is counted once, however often it is sent."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.credit.credit import sees
from bursar.api.http.action import faulty
from bursar.api.http.body import read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.core.credit.lease import lease_number
from bursar.core.values.refusal import Cause, Refusal, field_fault, invalid
from bursar.ops.credit.usage_events import Measure, Noted, note_usage
from bursar.store.credit import ledger as store
from bursar.wire.reports.usage_events import NewUsage, RefusedUsage, UsageBatch, UsageTaken, event_of, usage_faults
from bursar.wire.shared.document import encode
from bursar.wire.shared.faults import all_faults

EVENTS_MAX = 1000


async def report(call: Call) -> Outcome:
    """Record usage events; reconciliation of the lease corrects its cost by them."""
    events = _read(call)
    if isinstance(events, Refusal):
        return events
    answers = await note_usage(call.context.runtime, await _measures(call, events), call.identity.tenant)
    refused = [one for one in answers if isinstance(one, Refusal)]
    if refused and len(refused) == len(answers):
        return refused[0]
    noted = [one for one in answers if isinstance(one, Noted)]
    taken = UsageTaken(
        sum(not one.duplicate for one in noted),
        sum(one.duplicate for one in noted),
        sum(one.late for one in noted),
        [
            RefusedUsage(index, event.job_id, event.seq, answer.code, answer.message)
            for index, (event, answer) in enumerate(zip(events, answers, strict=True))
            if isinstance(answer, Refusal)
        ],
    )
    return Answer(202, encode(taken))


def _read(call: Call) -> list[NewUsage] | Refusal:
    """Decode one event, or an object with several as `events`."""
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    if not isinstance(document, dict):
        return invalid("the body must be an object")
    several = "events" in document
    wanted: Any = UsageBatch if several else NewUsage
    try:
        found = msgspec.convert(document, wanted)
    except msgspec.ValidationError as error:
        faults = all_faults(wanted, document) or [("", str(error))]
        return faulty("usage", [field_fault(path, message) for path, message in faults])
    events: list[NewUsage] = found.events if several else [found]
    if not 0 < len(events) <= EVENTS_MAX:
        return invalid(f"between 1 and {EVENTS_MAX} events may be sent at once, got {len(events)}")
    causes: list[Cause] = []
    for index, one in enumerate(events):
        causes += usage_faults(f"events[{index}]." if several else "", one)
    return faulty("usage", causes[:FAULTS_MAX]) if causes else events


FAULTS_MAX = 50


async def _measures(call: Call, events: list[NewUsage]) -> list[Measure]:
    identity = call.identity
    tenants = await call.context.visible_tenants(identity)
    accounts = await _accounts(call, {one.account for one in events if one.account})
    measures = []
    for one in events:
        lease = (lease_number(one.lease_id) or NOBODY) if one.lease_id else 0
        event = event_of(one, node=identity.node, account=accounts.get(one.account, 0), lease=lease)
        measures.append(Measure(event, None if identity.node else tenants, identity.node))
    return measures


async def _accounts(call: Call, names: set[str]) -> dict[str, int]:
    """The named accounts; an invisible one is treated as an account without leases."""
    owners: dict[str, tuple[str, str]] = {}
    for name in names:
        tenant, _, user = name.partition("/")
        if call.identity.node or await sees(call, tenant, user):
            owners[name] = (tenant, user)
    async with call.context.database.reader() as db:
        found = await store.find_accounts(db, owners.values())
    return {name: found.get(owners.get(name, ("", "")), NOBODY) for name in names}


NOBODY = -1
