"""What commands need before they are started: asked for until it is there, and not for ever."""

import asyncio

import pytest

from bursar.agent.control.prepare import Ask, Away, NotGiven, prepare, read_prepared
from bursar.agent.machine.types import Run
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

RUN = Run("alloc-1", 1, "lab", "a", command=("true",), prepare=True)
PEERS = [pb.Peer(allocation=f"m-{at}", node=f"n{at}", address=f"10.0.0.{at}") for at in range(2)]


def answers(*told: pb.PrepareResponse | None) -> tuple[list[Run], Ask]:
    asked: list[Run] = []

    async def ask(run: Run) -> pb.PrepareResponse:
        asked.append(run)
        if (answer := told[min(len(asked), len(told)) - 1]) is None:
            raise Away
        return answer

    return asked, ask


async def test_it_is_asked_for_until_it_is_there() -> None:
    asked, ask = answers(None, pb.PrepareResponse(wait=True), pb.PrepareResponse(stdin=b"print(1)"))
    found = await prepare(ask, RUN, lambda: False)
    assert found is not None
    assert (found.stdin, len(asked)) == (b"print(1)", 3)


@pytest.mark.parametrize("told", [None, pb.PrepareResponse(wait=True)])
async def test_it_is_not_waited_for_without_end(told: pb.PrepareResponse | None) -> None:
    _, ask = answers(told)
    with pytest.raises(NotGiven):
        await prepare(ask, RUN, lambda: False, seconds_max=0.0)


async def test_who_is_told_to_stop_asks_no_more() -> None:
    over = asyncio.Event()
    _, ask = answers(pb.PrepareResponse(wait=True))
    waiting = asyncio.create_task(prepare(ask, RUN, over.is_set))
    over.set()
    assert await waiting is None


def test_the_variables_of_those_that_run_as_one() -> None:
    found = read_prepared(pb.PrepareResponse(peers=PEERS, rank=1, port=20_007))
    env = found.add_to(
        {"BURSAR_RANK": "forged", "MASTER_PORT": "29500"}, {"BURSAR_RANK": "forged", "MASTER_PORT": "29500"}
    )
    assert env == {
        "BURSAR_RANK": "1",
        "BURSAR_SIZE": "2",
        "BURSAR_PEERS": "10.0.0.0,10.0.0.1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "29500",
    }
