"""Feed a plan's commands into a lane: all of them, in order, without shedding the commands of other callers."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.commands.command import Command, Reply
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.lane import Lane, Overloaded

FEED_MAX = 2048


async def feed(lane: Lane[Command, Reply], commands: Sequence[Command]) -> list[Reply]:
    """Put many commands into a lane, in their order, and wait for all their answers; a full lane refuses."""
    replies: list[Reply] = []
    for start in range(0, len(commands), FEED_MAX):
        some = [(command, command.key.namespace) for command in commands[start : start + FEED_MAX]]
        replies += [_reply(answer) for answer in await lane.put_together(some)]
    return replies


def _reply(answer: Reply | BaseException) -> Reply:
    if not isinstance(answer, BaseException):
        return answer
    if isinstance(answer, Overloaded):
        return Refusal(Code.OVERLOADED, str(answer), retry_after_seconds=answer.retry_after_seconds)
    raise answer
