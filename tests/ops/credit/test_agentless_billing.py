"""Nodes without an agent: their heartbeats pay for what runs there, and what is not paid for is told to end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bursar.core.objects.allocation import Phase
from bursar.core.values.money import MICROS, nanocredits
from bursar.ops.credit.agentless_billing import pay_on
from bursar.ops.credit.credit import lapse
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import assert_books_balance, funded, pass_time, stop_clock
from support.credit.paying import WINDOW, account, ended, ends, leases, paid_nodes
from support.nodes import local_nodes
from support.nodes.local_nodes import LocalNodes
from support.runtime.runtime import allocation, bind
from support.scheduling.evictions import status

SECOND = nanocredits("0.01")


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    await stop_clock(runtime)
    await paid_nodes(runtime, "n1")
    return runtime


async def begun(runtime: Runtime, **spec: Any) -> None:
    await allocation(runtime, "default", "train", spec=spec or None, gpu=1)
    await bind(runtime, "default", "train", "n1")
    await ends(runtime, "n1", "train", Phase.RUNNING)


async def heartbeat(runtime: Runtime, seconds: float) -> None:
    await pass_time(runtime, round(seconds * MICROS))
    await pay_on(runtime, ["n1"])


async def test_a_heartbeat_pays_for_what_runs_there(lab: Runtime) -> None:
    await funded(lab, "1")
    await begun(lab)
    await heartbeat(lab, 0)
    await heartbeat(lab, 5)
    held = await account(lab)
    assert (held["posted"], held["held"]) == (nanocredits("1") - 5 * SECOND, WINDOW * SECOND)
    await assert_books_balance(lab)


async def test_what_did_not_begin_costs_nothing(lab: Runtime) -> None:
    await funded(lab, "1")
    await allocation(lab, "default", "train", gpu=1)
    await bind(lab, "default", "train", "n1")
    await heartbeat(lab, 60)
    assert (await account(lab))["posted"] == nanocredits("1")


async def test_without_credit_it_is_told_to_end_when_paid_time_is_over(lab: Runtime) -> None:
    await funded(lab, "0.15")
    await begun(lab)
    await heartbeat(lab, 0)
    await heartbeat(lab, 14)
    assert (await status(lab, "train"))["phase"] == "Running"
    await heartbeat(lab, 1)
    told = await status(lab, "train")
    assert (told["phase"], told["reason"]) == ("Terminating", "CreditExhausted")
    assert "insufficient_credit" in told["message"]
    await ends(lab, "n1", "train", Phase.FAILED, measured=15 * MICROS)
    told = await status(lab, "train")
    assert (told["phase"], told["reason"]) == ("Failed", "CreditExhausted")
    held = await account(lab)
    assert (held["posted"], held["held"], held["gpus"]) == (0, 0, 0)
    await assert_books_balance(lab)


async def test_what_lost_its_lease_while_its_node_was_away_waits_again(lab: Runtime) -> None:
    await funded(lab, "1")
    await begun(lab)
    await heartbeat(lab, 0)
    (lease,) = await leases(lab)
    assert await lapse(lab, {lease["id"]: lease["paid_until"]})
    await heartbeat(lab, 0)
    told = await status(lab, "train")
    assert (told["phase"], told["reason"]) == ("Terminating", "LeaseExpired")
    await ends(lab, "n1", "train", Phase.FAILED)
    assert (await status(lab, "train"))["phase"] == "Pending"


async def test_simulated_nodes_pay_and_end_as_others_do(lab: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_nodes, "HEARTBEAT_SECONDS", 0.02)
    await funded(lab, "0.2")
    nodes = asyncio.create_task(LocalNodes(lab, ["n1"]).run())
    try:
        await allocation(lab, "default", "train", gpu=1)
        await bind(lab, "default", "train", "n1")
        await until(lab, lambda told: told["phase"] == "Running")
        async with asyncio.timeout(30):
            while not await ended(lab):
                await pass_time(lab, MICROS)
                await asyncio.sleep(0.01)
        told = await until(lab, lambda told: told["phase"] == "Failed")
        assert told["reason"] == "CreditExhausted"
        assert (await account(lab))["posted"] >= 0
        await assert_books_balance(lab)
    finally:
        nodes.cancel()
        await asyncio.gather(nodes, return_exceptions=True)


async def until(runtime: Runtime, condition: Any) -> Any:
    async with asyncio.timeout(30):
        while not condition(told := await status(runtime, "train")):  # noqa: ASYNC110 - other tasks change it
            await asyncio.sleep(0.01)
        return told
