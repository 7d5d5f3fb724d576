"""Dry runs of creating allocations: all checks are made, and nothing is stored.

They use the lane of dry runs, so limits are checked against the current usage. Names are not checked: an allocation in
a dry run may have the name of an existing one.
"""

from __future__ import annotations

from collections.abc import Sequence

from bursar.commands.command import Reply
from bursar.commands.objects.object import CreateObject
from bursar.commands.workloads.dry_run import Rehearse
from bursar.core.objects.object import Key
from bursar.core.quota.permit import together
from bursar.core.values.refusal import Refusal
from bursar.core.values.replace import replace
from bursar.ops.runtime.runtime import Runtime


async def rehearse(runtime: Runtime, creations: Sequence[CreateObject], tenant: str) -> Refusal | None:
    """The refusal of creating these together now; None if they could be created."""
    first = creations[0]
    # The uid serves as a name that no allocation has.
    drafts = tuple(replace(one.draft, key=Key(one.key.kind, one.key.namespace, one.draft.uid)) for one in creations)
    command = Rehearse(
        key=drafts[0].key,
        origin=first.origin,
        draft=drafts[0],
        drafts=drafts,
        wants=tuple(dict.fromkeys(want for one in creations for want in one.wants)),
        subject=first.subject,
        seen_tenant=first.seen_tenant,
        asking=together(one.asking for one in creations),
        admin=first.admin,
    )
    reply: Reply = await runtime.trying.submit(command, tenant)
    return reply if isinstance(reply, Refusal) else None
