"""The scheduler as real processes, killed and paused in the middle of a backlog: everything is bound, and only once."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from bursar.loops.schedule import COMMIT_WORKER_NODES
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY
from support.process.server import AS_WE_ARE, BURSAR, OwnServer, migrated_directory, started
from support.runtime.runtime import node, opened
from support.scheduling.evictions import assert_books_balance
from support.scheduling.leaders import Leader, load_leader
from support.scheduling.schedulers import acting, is_in, submit, times_bound, until

SOAK = bool(os.environ.get("BURSAR_SOAK"))
BACKLOG = 4000 if SOAK else 1000
KILLS = 8 if SOAK else 2
NODES = 25
WAIT_SECONDS_MAX = 120.0

pytestmark = pytest.mark.timeout(1800 if SOAK else 240)


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    """A server of this module's own: its parts get killed."""
    with migrated_directory() as data, started(data) as running:
        yield running


@pytest.fixture
async def runtime(server: OwnServer) -> AsyncIterator[Runtime]:
    """A runtime of our own on the server's database."""
    elsewhere = server.data / "socket-dir"
    socket = Path(elsewhere.read_text().strip()) if elsewhere.exists() else server.data / "run"
    async with opened(f"postgresql:///bursar?user=bursar&host={quote(str(socket), safe='')}") as one:
        await prepare(one)
        yield one


async def prepare(runtime: Runtime) -> None:
    """Enough capacity for several backlogs."""
    for number in range(NODES):
        await node(runtime, f"n{number}", cpu=8 * BACKLOG // NODES)


async def submit_all(runtime: Runtime, stem: str) -> list[str]:
    """A backlog, in portions: the scheduler is busy with it for a while."""
    names = [f"{stem}-{number}" for number in range(BACKLOG)]
    for at in range(0, BACKLOG, 100):
        await asyncio.gather(*(submit_once(runtime, name) for name in names[at : at + 100]))
    return names


async def submit_once(runtime: Runtime, name: str) -> None:
    """Submit until it is taken: a database that is killed again and again may be away for longer than a lane waits."""
    for _ in range(60):
        try:
            return await submit(runtime, name, cpu=1)
        except AWAY:
            if await exists(runtime, name):
                return None
    raise AssertionError(f"{name} was not taken")


async def exists(runtime: Runtime, name: str) -> bool:
    try:
        async with runtime.database.reader() as db:
            return bool(await db.fetchval("SELECT count(*) FROM object WHERE kind = 'Allocation' AND name = $1", name))
    except AWAY:
        return False


# Looking. A database that is away is waited for.


async def bound(runtime: Runtime, stem: str) -> dict[str, int]:
    """How often each of a backlog was bound."""
    try:
        return {name: times for name, times in (await times_bound(runtime)).items() if name.startswith(f"{stem}-")}
    except AWAY:
        return {}


async def eventually(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while not await holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {WAIT_SECONDS_MAX:g} s") from None


async def bound_more_than(runtime: Runtime, stem: str, count: int) -> None:
    async def enough() -> bool:
        return len(await bound(runtime, stem)) > count

    await eventually(enough, f"more than {count} are bound")


async def assert_all_bound_once(runtime: Runtime, stem: str, names: list[str]) -> None:
    await bound_more_than(runtime, stem, len(names) - 1)
    assert await bound(runtime, stem) == dict.fromkeys(names, 1)
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT name FROM placement WHERE starts_with(name, $1)", f"{stem}-")
    assert sorted(row["name"] for row in rows) == sorted(names)
    await assert_books_balance(runtime)


# What processes there are.


def child(parent: int, word: str) -> int:
    """The pid of the process's child whose command line has this word; 0 while there is none."""
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if word in command_of(pid) and parent_of(pid) == parent:
            return pid
    return 0


def command_of(pid: int) -> str:
    """Empty when it has ended, also where nobody has asked yet how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def part(server: OwnServer, word: str) -> int:
    return child(server.process.pid, word)


async def kill(server: OwnServer, word: str) -> None:
    """Kill a part of the server, and wait until it has been replaced."""
    old = part(server, word)
    assert old > 0
    os.kill(old, signal.SIGKILL)

    async def replaced() -> bool:
        return part(server, word) not in (0, old)

    await eventually(replaced, f"another {word}")


async def leader(runtime: Runtime) -> Leader | None:
    try:
        found = await load_leader(runtime.database)
    except AWAY:
        return None
    return found if found.leads else None


def pid_of(one: Leader) -> int:
    return int(one.holder.split("/")[1])


# One server.


async def test_what_is_submitted_is_bound_and_runs(server: OwnServer, runtime: Runtime) -> None:
    async with acting(runtime):
        await asyncio.to_thread(_submit, server, "quick")
        await until(runtime, "quick", is_in("Succeeded"))


def _submit(server: OwnServer, name: str) -> None:
    metadata = {"name": name, "annotations": {"bursar.io/sim-seconds": "0.05"}}
    with server.client() as client:
        client.allocations("default").create({"metadata": metadata, "spec": {"resources": {"requests": {"cpu": "1"}}}})


async def test_a_controller_that_is_killed_again_and_again_binds_everything_once(
    server: OwnServer, runtime: Runtime
) -> None:
    submitting = asyncio.create_task(submit_all(runtime, "kill"))
    for turn in range(KILLS):
        await bound_more_than(runtime, "kill", turn * BACKLOG // (2 * KILLS))
        await kill(server, "bursar.main controller")
    await assert_all_bound_once(runtime, "kill", await submitting)


async def test_a_database_that_is_killed_in_the_middle_loses_and_repeats_nothing(
    server: OwnServer, runtime: Runtime
) -> None:
    submitting = asyncio.create_task(submit_all(runtime, "crash"))
    for turn in range(KILLS):
        await bound_more_than(runtime, "crash", turn * BACKLOG // (2 * KILLS))
        await kill(server, "/postgres -D")
    await assert_all_bound_once(runtime, "crash", await submitting)


# Several controllers.


@contextmanager
def controller(url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(BURSAR), "controller", "--database-url", url, *AS_WE_ARE]
    with log.open("wb") as errors, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            assert process.wait(30) == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_a_leader_of_many_nodes_has_a_commit_worker_which_does_not_outlive_it(
    database_url: str, tmp_path: Path, end: signal.Signals
) -> None:
    """However the leader ends: by a signal of its own, or by the Ctrl-C of a terminal, which is sent to its group."""
    async with opened(database_url) as runtime:
        await asyncio.gather(*(node(runtime, f"n{number}", cpu=8) for number in range(COMMIT_WORKER_NODES)))
        command = [str(BURSAR), "controller", "--database-url", database_url, *AS_WE_ARE]
        with (
            (tmp_path / "log").open("wb") as errors,
            subprocess.Popen(command, stderr=errors, start_new_session=True) as leading,
        ):
            try:

                async def has_commit_worker() -> bool:
                    return child(leading.pid, "bursar.commit_worker") > 0

                await eventually(has_commit_worker, "the leader has a commit worker")
                worker = child(leading.pid, "bursar.commit_worker")
                if end == signal.SIGINT:
                    os.killpg(leading.pid, end)
                else:
                    leading.send_signal(end)
                leading.wait(30)

                async def is_gone() -> bool:
                    return not command_of(worker)

                await eventually(is_gone, "the commit worker is gone")
            finally:
                leading.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()


async def test_a_leader_that_was_paused_past_its_term_commits_nothing_more(database_url: str, tmp_path: Path) -> None:
    """It is paused in the middle of committing plans; when it wakes another has bound the rest."""
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    async with opened(database_url) as runtime:
        await prepare(runtime)
        with controller(database_url, logs[0]) as one, controller(database_url, logs[1]) as two:

            async def somebody_leads() -> bool:
                return await leader(runtime) is not None

            await eventually(somebody_leads, "somebody leads")
            first = await leader(runtime)
            assert first is not None
            paused = pid_of(first)
            assert paused in (one.pid, two.pid)
            submitting = asyncio.create_task(submit_all(runtime, "pause"))
            await bound_more_than(runtime, "pause", BACKLOG // 10)
            os.kill(paused, signal.SIGSTOP)

            async def another_leads() -> bool:
                found = await leader(runtime)
                return found is not None and found.fence > first.fence

            await eventually(another_leads, "another leads")
            second = await leader(runtime)
            assert second is not None
            assert pid_of(second) == ({one.pid, two.pid} - {paused}).pop()
            names = await submitting
            await bound_more_than(runtime, "pause", BACKLOG // 2)
            os.kill(paused, signal.SIGCONT)
            log = logs[0] if paused == one.pid else logs[1]

            async def knows() -> bool:
                return "leadership_ended" in log.read_text()

            await eventually(knows, "who was paused knows that it leads no more")
            await assert_all_bound_once(runtime, "pause", names)
            still = await leader(runtime)
            assert still is not None
            assert (still.holder, still.fence) == (second.holder, second.fence)
