"""Feeding a lane: a whole plan at once, in order, without pushing out what others ask of the same lane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bursar.core.refusal import Code, Refusal
from bursar.ops.command import Command, Reply
from bursar.ops.lane import Lane, Overloaded

FEED_MAX = 2048


async def feed(lane: Lane[Command, Reply], commands: Sequence[Command]) -> list[Reply]:
    """Put many commands into a lane, in their order, and wait for all their answers; a full lane refuses."""
    replies: list[Reply] = []
    for start in range(0, len(commands), FEED_MAX):
        some = commands[start : start + FEED_MAX]
        answers = await asyncio.gather(*(_put(lane, command) for command in some), return_exceptions=True)
        replies += [_reply(answer) for answer in answers]
    return replies


def _put(lane: Lane[Command, Reply], command: Command) -> asyncio.Future[Reply]:
    try:
        return lane.put(command, command.key.namespace)
    except Overloaded as error:
        refused: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused


def _reply(answer: Reply | BaseException) -> Reply:
    if isinstance(answer, Overloaded):
        return Refusal(Code.OVERLOADED, str(answer), retry_after_seconds=answer.retry_after_seconds)
    if isinstance(answer, BaseException):
        raise answer
    return answer
