"""The standard input of a command, which its submitter sends once, before it is started."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from bursar.api.http.body import dry_run
from bursar.api.http.route import Answer, Call, Outcome
from bursar.api.objects.object import find, key_of, origin_of
from bursar.commands.objects.object import not_found, submitter
from bursar.commands.objects.status import status_of
from bursar.commands.workloads.allocation import phase_of
from bursar.core.objects.allocation import ENDED
from bursar.core.values.access import Role
from bursar.core.values.refusal import Code, Refusal
from bursar.store.objects import stdin as store
from bursar.wire.kinds.allocation import STDIN_BYTES_MAX
from bursar.wire.shared.document import encode


class Sent(Struct):
    """The number of accepted bytes."""

    bytes: int


class _Spec(Struct):
    stdin: bool = False


class _Document(Struct):
    spec: _Spec


_decode = msgspec.json.Decoder(_Document).decode


async def send(call: Call) -> Outcome:
    """Upload standard input; the first upload wins. It may contain code, so only the user of the work may send it."""
    found, dry = await find(call, key_of(call)), dry_run(call)
    if isinstance(found, Refusal):
        return found
    if isinstance(dry, Refusal):
        return dry
    name, user = found.key.name, status_of(found).get("user", "")
    if call.identity.role is Role.USER and user != submitter(origin_of(call)):
        return Refusal(Code.FORBIDDEN, f"{name} is another user's: only who submitted it sends its standard input")
    if not _decode(found.doc).spec.stdin:
        return Refusal(Code.CONFLICT, f"{name} reads no standard input", "Submit it with stdin: true in its spec.")
    if phase_of(found) in ENDED:
        return Refusal(Code.ENDED, f"{name} is {phase_of(found)}")
    if len(call.body) > STDIN_BYTES_MAX:
        hint = "Put it into a file that the node can read."
        return Refusal(Code.TOO_LARGE, f"standard input may have {STDIN_BYTES_MAX} bytes, got {len(call.body)}", hint)
    async with call.context.database.reader() as db:
        taken = (
            not await store.is_there(db, found.uid) if dry else await store.save(db, found.key, found.uid, call.body)
        )
        if not taken and not await store.is_there(db, found.uid):
            return not_found(found.key)
    if not taken:
        return Refusal(Code.ALREADY_EXISTS, f"the standard input of {name} was sent before", "It is sent once.")
    return Answer(200, encode(Sent(len(call.body))))
