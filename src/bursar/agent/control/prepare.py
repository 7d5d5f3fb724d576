"""Fetches the peers and the standard input of a command from the control plane before the command starts.

It polls with a time limit: a placement that cannot be prepared fails and frees its devices.
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
    """The control plane cannot be reached at the moment."""


class NotGiven(ValueError):
    """The command cannot be started, and why."""


Ask: TypeAlias = Callable[[Run], Awaitable[pb.PrepareResponse]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Environment variables for the command, and its standard input, if any."""

    variables: Mapping[str, str]
    defaults: Mapping[str, str]  # the command's own variables override these
    stdin: bytes | None = None

    def add_to(self, env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
        return {**env, **{name: own.get(name, value) for name, value in self.defaults.items()}, **self.variables}


NOTHING = Prepared({}, {})


async def unreachable(_: Run) -> pb.PrepareResponse:
    raise Away


async def prepare(
    ask: Ask, run: Run, is_over: Callable[[], bool], *, seconds_max: float = SECONDS_MAX
) -> Prepared | None:
    """Poll until the answer is complete; None if the command is stopped meanwhile. Raises NotGiven on timeout."""
    if not run.prepare:
        return NOTHING
    loop = asyncio.get_running_loop()
    until, why = loop.time() + seconds_max, ""
    while not is_over():
        try:
            answer = await ask(run)
        except Away:
            why = "the control plane could not be reached for its peers and standard input"
        else:
            if not answer.wait:
                return read_prepared(answer)
            why = "its standard input was not uploaded"
        if loop.time() >= until:
            raise NotGiven(f"{why} within {seconds_max:.0f} s")
        await asyncio.sleep(ASK_SECONDS)
    return None


def read_prepared(answer: pb.PrepareResponse) -> Prepared:
    """The rank and peers of the allocation as variables; none if it runs alone."""
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
    defaults = {"MASTER_ADDR": answer.peers[0].address, "MASTER_PORT": str(answer.port)}
    return Prepared(variables, defaults, stdin)
