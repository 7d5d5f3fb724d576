"""Gangs on a real database: charged when they are whole, once, however their members race."""

import asyncio
from typing import Any

import msgspec
import pytest

from bursar.commands.lifecycle.dispatch import change_command
from bursar.commands.objects.object import ChangeObject
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.allocation import GANG_SIZE, MAX_WAIT
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    GPU,
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    bind_unit,
    code,
    create,
    delete,
    end,
    get,
    gpus,
    namespace,
    node,
    opened,
    refusal,
    tenant,
)
from support.scheduling.schedulers import annotate


def gang(members: int, group: str = "g") -> dict[str, Any]:
    return {"gangScheduling": {"groupId": group, "minMembers": members}}


async def gang_row(runtime: Runtime, group: str = "g") -> tuple[int, bool] | None:
    async with runtime.database.reader() as db:
        row = await db.fetchrow("SELECT members, charged FROM gang WHERE name = $1", group)
    return None if row is None else (row["members"], row["charged"])


async def test_a_waiting_member_that_is_deleted_makes_the_gang_wait_longer(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=8)
    for name in ("a", "b"):
        await allocation(runtime, "default", name, spec=gang(3), gpu=1)
    assert code(await bind(runtime, "default", "a", "n1")) == "stale"
    await delete(runtime, "Allocation", "default", "a")
    assert await gang_row(runtime) == (1, False)
    await allocation(runtime, "default", "c", spec=gang(3), gpu=1)
    assert await gpus(runtime, "tenant:default") in (None, (0, 0))
    await allocation(runtime, "default", "d", spec=gang(3), gpu=1)
    assert await gang_row(runtime) == (3, True)
    assert await gpus(runtime, "tenant:default") == (3, 0)
    assert code(await bind_unit(runtime, "default", dict.fromkeys(("b", "c", "d"), ("n1",)))) == "ok"
    for name in ("b", "c", "d"):
        await assert_counters_equal_charges(runtime)
        await end(runtime, "default", name)
    assert await gang_row(runtime) is None
    assert await gpus(runtime, "tenant:default") == (0, 0)


async def test_a_gang_that_was_charged_takes_further_members_at_once(runtime: Runtime) -> None:
    for name in ("a", "b", "c"):
        await allocation(runtime, "default", name, spec=gang(2), gpu=1)
    assert await gpus(runtime, "tenant:default") == (3, 0)
    await delete(runtime, "Allocation", "default", "a")
    await delete(runtime, "Allocation", "default", "b")
    await allocation(runtime, "default", "d", spec=gang(2), gpu=1)
    assert await gpus(runtime, "tenant:default") == (2, 0)
    await assert_counters_equal_charges(runtime)


async def test_members_in_one_batch_complete_the_gang(runtime: Runtime) -> None:
    answers = await asyncio.gather(
        *(allocation(runtime, "default", f"m{number}", spec=gang(5), gpu=1) for number in range(7))
    )
    assert {code(answer) for answer in answers} == {"ok"}
    assert await gpus(runtime, "tenant:default") == (7, 0)
    assert await gang_row(runtime) == (7, True)
    await assert_counters_equal_charges(runtime)


async def test_last_members_racing_from_two_processes_charge_the_gang_once(runtime: Runtime, database_url: str) -> None:
    async with opened(database_url) as other:
        for round_number in range(12):
            group = f"g{round_number}"
            await allocation(runtime, "default", f"{group}-0", spec=gang(3, group), gpu=1)
            answers = await asyncio.gather(
                allocation(runtime, "default", f"{group}-1", spec=gang(3, group), gpu=1),
                allocation(other, "default", f"{group}-2", spec=gang(3, group), gpu=1),
            )
            assert [code(answer) for answer in answers] == ["ok", "ok"]
            assert await gang_row(runtime, group) == (3, True)
    assert await gpus(runtime, "tenant:default") == (36, 0)
    await assert_counters_equal_charges(runtime)


async def test_last_members_racing_for_capacity_that_one_gang_has_leave_the_other_waiting(
    runtime: Runtime, database_url: str
) -> None:
    await tenant(runtime, "lab", limits={GPU: 2})
    await namespace(runtime, "lab", "lab")
    async with opened(database_url) as other:
        for round_number in range(8):
            names = [f"{side}{round_number}" for side in "ab"]
            for name in names:
                await allocation(runtime, "lab", f"{name}-0", spec=gang(2, name), gpu=1)
            answers = await asyncio.gather(
                allocation(runtime, "lab", f"{names[0]}-1", spec=gang(2, names[0]), gpu=1),
                allocation(other, "lab", f"{names[1]}-1", spec=gang(2, names[1]), gpu=1),
            )
            assert sorted(map(code, answers)) == ["ok", "quota_exceeded"]
            assert await gpus(runtime, "tenant:lab") == (2, 0)
            await assert_counters_equal_charges(runtime)
            for name in names:
                for number in range(2):
                    await delete(runtime, "Allocation", "lab", f"{name}-{number}")
            assert await gpus(runtime, "tenant:lab") == (0, 0)


async def test_a_member_that_joins_while_the_last_one_leaves_is_counted(runtime: Runtime, database_url: str) -> None:
    """The gang's row is removed by the one who leaves; the one who waited for it must not believe in the old row."""
    await allocation(runtime, "default", "leaving", spec=gang(2), gpu=1)
    async with opened(database_url) as other, other.database.reader() as db:
        transaction = db.transaction()
        await transaction.start()
        await db.execute("SELECT 1 FROM gang WHERE name = 'g' FOR NO KEY UPDATE")
        joining = asyncio.create_task(allocation(runtime, "default", "joining", spec=gang(2), gpu=1))
        async with other.database.reader() as watcher, asyncio.timeout(5):
            while not await watcher.fetchval(  # noqa: ASYNC110
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            ):
                await asyncio.sleep(0.01)
        await db.execute("DELETE FROM object WHERE name = 'leaving'")
        await db.execute("DELETE FROM gang WHERE name = 'g'")
        await transaction.commit()
    assert code(await joining) == "ok"
    assert await gang_row(runtime) == (1, False)
    assert code(await allocation(runtime, "default", "last", spec=gang(2), gpu=1)) == "ok"
    assert await gpus(runtime, "tenant:default") == (2, 0)


async def test_editing_a_member_read_before_its_gang_was_charged_keeps_the_charge(runtime: Runtime) -> None:
    """What an object holds may change without a new revision: an edit made from the old reading must not undo it."""
    await allocation(runtime, "default", "a", spec=gang(2), gpu=1)
    before = await get(runtime, "Allocation", "default", "a")
    text = msgspec.json.decode(before.doc)
    text["metadata"]["labels"] = {"team": "red"}
    one = msgspec.convert(text, BY_NAME["Allocation"].type)
    command = change_command(BY_NAME["Allocation"], before, one, TEST, spec_changed=False)
    await allocation(runtime, "default", "b", spec=gang(2), gpu=1)
    assert await gpus(runtime, "tenant:default") == (2, 0)
    assert isinstance(command, ChangeObject)
    assert code(await object_ops.submit(runtime, command, tenant="test")) == "ok"
    assert await gpus(runtime, "tenant:default") == (2, 0)
    after = await get(runtime, "Allocation", "default", "a")
    assert after.labels == {"team": "red"}
    assert not after.charge.due
    await assert_counters_equal_charges(runtime)


@pytest.mark.parametrize("said", [{GANG_SIZE: "3"}, {MAX_WAIT: "9s"}])
async def test_annotations_that_size_a_gang_stay_as_they_were(runtime: Runtime, said: dict[str, str]) -> None:
    notes = {GANG_SIZE: "2", MAX_WAIT: "60s"}
    spec = {"gangScheduling": {"groupId": "ring"}}
    metadata = {"name": "a", "namespace": "default", "annotations": notes}
    assert code(await create(runtime, "Allocation", {"metadata": metadata, "spec": spec})) == "ok"
    reply = await annotate(runtime, "Allocation", "default", "a", said)
    assert code(reply) == "immutable"
    assert "gang" in refusal(reply).message
    assert code(await annotate(runtime, "Allocation", "default", "a", {"note": "anything else"})) == "ok"
