"""Controllers that are killed while they tell somebody, or reconcile: it is told, and posted once, all the same."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bursar.core.values.money import nanocredits
from bursar.ops.credit.credit import top_up
from bursar.ops.objects.webhook import add_webhook
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects.webhook import Webhook
from support.api.site import eventually
from support.credit.metering import (
    POOL,
    assert_books_balance,
    balance,
    done,
    ended,
    event,
    furnish,
    lapse,
    lease,
    pass_time,
    send,
)
from support.process.receivers import HANG, receiving
from support.process.server import AS_WE_ARE, BURSAR
from support.runtime.runtime import opened


@asynccontextmanager
async def controller(url: str, log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [str(BURSAR), "controller", "--database-url", url, *AS_WE_ARE]
    with log.open("ab") as errors, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, 30)


async def is_all_told(runtime: Runtime) -> bool:
    async with runtime.database.reader() as db:
        left: int = await db.fetchval("SELECT count(*) FROM notice_delivery")
    return left == 0


async def test_a_controller_killed_between_sending_and_recording_has_it_sent_again(
    database_url: str, tmp_path: Path
) -> None:
    async with opened(database_url) as runtime, receiving(HANG) as receiver:
        made = await add_webhook(runtime, Webhook("hook", url=receiver.url, allow_local=True))
        assert isinstance(made, tuple)
        done(await top_up(runtime, POOL, nanocredits("5"), actor="test"))
        async with controller(database_url, tmp_path / "log"):
            await receiver.comes(1)
        async with runtime.database.reader() as db:
            await db.execute("UPDATE notice_delivery SET next_at = now()")  # its claim is over
        async with controller(database_url, tmp_path / "log"):
            await receiver.comes(2)
            await eventually(lambda: is_all_told(runtime))
        assert len(set(receiver.ids)) == 1
        assert all(one.is_signed_with(made[1]) for one in receiver.got)
    assert made[1].encode() not in (tmp_path / "log").read_bytes()


async def test_controllers_killed_while_they_reconcile_post_everything_once(database_url: str, tmp_path: Path) -> None:
    async with opened(database_url) as runtime:
        await furnish(runtime, "1000")
        leases = [await lease(runtime, f"job-{index}") for index in range(200)]
        await pass_time(runtime, 60, *leases)
        await lapse(runtime, *leases)
        await send(runtime, *(event(f"job-{index}", 1, 5) for index in range(200)))

        async def some_are_done(least: int) -> bool:
            return sum(row["reconciled_at"] is not None for row in await ended(runtime, *leases)) >= least

        async with controller(database_url, tmp_path / "log"):
            await eventually(lambda: some_are_done(1))
        async with controller(database_url, tmp_path / "log"), controller(database_url, tmp_path / "log"):
            await eventually(lambda: some_are_done(200))
        assert await balance(runtime) == nanocredits("1000") - 200 * nanocredits("0.2")
        await assert_books_balance(runtime)
