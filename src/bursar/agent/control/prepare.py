"""What a command needs before it is started, from the control plane: who runs with it, and its standard input.

It is asked for until it is there, and not for ever: work that is given nothing gives its devices back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from bursar.agent.machine.types import Run
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

SECONDS_MAX = 60.0
ASK_SECONDS = 0.2


class Away(Exception):
    """Nobody can be asked at the moment."""


class NotGiven(ValueError):
    """Why it cannot be started."""


Ask: TypeAlias = Callable[[Run], Awaitable[pb.PrepareResponse]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Variables for the command, and what it reads; None where it reads nothing."""

    variables: Mapping[str, str]
    wishes: Mapping[str, str]  # variables that the command's own go before
    stdin: bytes | None = None

    def add_to(self, env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
        return {**env, **{name: own.get(name, value) for name, value in self.wishes.items()}, **self.variables}


NOTHING = Prepared({}, {})


async def nobody(_: Run) -> pb.PrepareResponse:
    raise Away


async def prepare(
    ask: Ask, run: Run, is_over: Callable[[], bool], *, seconds_max: float = SECONDS_MAX
) -> Prepared | None:
    """What it needs; None where it is not to be started any more. NotGiven where that did not come in time."""
    if not run.prepare:
        return NOTHING
    loop = asyncio.get_running_loop()
    until, why = loop.time() + seconds_max, ""
    while not is_over():
        try:
            answer = await ask(run)
        except Away:
            why = "the control plane could not be asked what it needs"
        else:
            if not answer.wait:
                return read_prepared(answer)
            why = "its standard input did not come"
        if loop.time() >= until:
            raise NotGiven(f"{why} within {seconds_max:.0f} s")
        await asyncio.sleep(ASK_SECONDS)
    return None


def read_prepared(answer: pb.PrepareResponse) -> Prepared:
    """Who it is among those that run as one. Where it runs alone there is nothing to be told."""
    stdin = answer.stdin or None
    if not answer.peers:
        return Prepared({}, {}, stdin)
    rank, size = str(answer.rank), str(len(answer.peers))
    variables = {
        "BURSAR_RANK": rank,
        "BURSAR_SIZE": size,
        "BURSAR_PEERS": ",".join(one.address for one in answer.peers),
        "NODE_RANK": rank,
        "WORLD_SIZE": size,
    }
    wishes = {"MASTER_ADDR": answer.peers[0].address, "MASTER_PORT": str(answer.port)}
    return Prepared(variables, wishes, stdin)
