"""Root starts the server and keeps nothing of it that serves."""

import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from bursar.osuser import OsUserError, find_user, hand_over, system_user
from support.process.agents import until
from support.process.server import BURSAR, OwnServer, data_directory, free_port, started

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def server() -> Iterator[OwnServer]:
    with data_directory() as data, started(data, user="") as running:
        yield running


def test_only_the_parent_stays_root(server: OwnServer) -> None:
    # The quota service is started when the server is ready, and becomes the user before it becomes the program.
    until(lambda: any(is_quota_service(one) for one in descendants(server.process.pid)), "the quota service")
    owners = {one: status(one) for one in descendants(server.process.pid)}
    serving = [
        pid for pid, (command, *_) in owners.items() if "bursar.main" in command or "bursar.commit_worker" in command
    ]
    databases = [pid for pid, (command, *_) in owners.items() if "postgres" in command and pid not in serving]
    assert len(serving) >= 2
    assert databases
    for pids, name in ((serving, "bursar"), (databases, "bursar-db")):
        user = find_user(name)
        assert user is not None
        for pid in pids:
            _, uids, groups, effective = owners[pid]
            assert uids == {user.uid}, owners[pid]
            assert groups <= set(user.groups)
            assert effective == 0
    token = (server.data / "quota-service.token").stat()
    assert (token.st_uid, token.st_mode & 0o777) == (system_user("bursar").uid, 0o600)


@pytest.mark.parametrize("part", ["api", "controller"])
def test_a_part_that_root_starts_by_itself_keeps_nothing_of_it(server: OwnServer, part: str, tmp_path: Path) -> None:
    """Root opens its sockets and writes its token, and is gone before anything is accepted."""
    (http, scraped), token = (f"127.0.0.1:{free_port()}" for _ in range(2)), tmp_path / "token"
    options = ["--http", http, "--metrics", scraped, "--admin-token-file", str(token)] if part == "api" else []
    with subprocess.Popen(
        [str(BURSAR), part, "--database-url", database_url(server), *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            user = system_user("bursar")
            command, uids, groups, effective = status(process.pid)
            assert f"bursar.main {part}" in command
            assert (uids, effective) == ({user.uid}, 0)
            assert groups <= {user.gid, *user.groups}
            if part == "api":
                headers = {"authorization": f"Bearer {token.read_text().strip()}"}
                assert (token.stat().st_uid, token.stat().st_mode & 0o077) == (0, 0)
                with httpx2.Client(headers=headers, trust_env=False) as client:
                    assert client.get(f"http://{http}/api/v1/tenants").status_code == 200
                    assert client.get(f"http://{scraped}/metrics").status_code == 200
        finally:
            process.terminate()
            assert process.wait(30) == 0


def test_what_root_ran_before_is_handed_over_and_served_with_tls_and_metrics_apart() -> None:
    """The data directory of an earlier version: its cluster is another user's, and its key is root's alone."""
    nobody = find_user("nobody")
    assert nobody is not None
    address = f"127.0.0.1:{free_port()}"
    with data_directory() as data:
        with started(data, tls=True) as server:
            token = server.token
        for path in (data / "postgres", *(data / "postgres").rglob("*")):
            os.chown(path, nobody.uid, nobody.gid, follow_symlinks=False)
        (data / "tls").chmod(0o700)
        (data / "tls" / "server.key").chmod(0o600)
        with started(data, tls=True, user="", options=["--metrics", address]) as server:
            assert server.token == token
            trust = ssl.create_default_context(cafile=data / "tls" / "ca.crt")
            with httpx2.Client(base_url=server.url, verify=trust, trust_env=False) as client:
                assert client.get("/metrics").status_code == 401
                assert client.get("/metrics", headers={"authorization": f"Bearer {token}"}).status_code == 200
            with httpx2.Client(base_url=f"http://{address}", trust_env=False) as client:
                assert "bursar_revision" in client.get("/metrics").text
                assert client.get("/api/v1/tenants").status_code == 404
                assert client.post("/metrics").status_code == 405
        user = system_user("bursar")
        assert (data / "tls" / "ca.key").stat().st_mode & 0o077 == 0
        assert (data / "tls" / "server.key").stat().st_gid == user.gid


def test_a_file_that_the_user_cannot_read_is_named_before_anything_starts(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("secret")
    key.chmod(0o600)
    with pytest.raises(OsUserError, match=f"who cannot read {key}\nGive it to that user .chown bursar {key}"):
        hand_over(system_user("bursar"), [key])


def test_a_directory_that_is_closed_to_the_user_shows_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    needed, other = closed / "inner" / "needed", closed / "other"
    for path in (needed, other):
        path.write_text("text")
        path.chmod(0o644)
    over = hand_over(system_user("bursar"), [needed])
    assert over.refused([needed, other]) == [other]
    assert other.read_text() == "text"  # for us nothing has changed


def test_only_root_chooses_a_user() -> None:
    over = hand_over(system_user("bursar"), [])
    command = over.command([os.path.realpath("/bin/sh"), "-c", 'exec "$0" -P -m bursar.main "$@"', *serve("root")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 1
    assert "--user root: only root can run the server as another user" in done.stderr


def test_a_user_that_is_root_by_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OsUserError, match="choose a user without privileges"):
        system_user("root")


def test_a_user_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OsUserError, match="no user bursar-unknown, and it could not be created"):
        system_user("bursar-unknown")


def is_quota_service(pid: int) -> bool:
    """Whether a process is the quota service, and no longer its launcher, which is root for a moment."""
    command, uids, *_ = status(pid)
    return "quota-service" in command and uids == {system_user("bursar").uid}


def serve(user: str) -> list[str]:
    return [str(BURSAR.with_name("python")), "serve", "--http", "127.0.0.1:0", "--user", user]


def database_url(server: OwnServer) -> str:
    """As the processes of the server have it."""
    for pid in descendants(server.process.pid):
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(b"BURSAR_DATABASE_URL="):
                return one.partition(b"=")[2].decode()
    raise AssertionError("no process has the URL of the database")


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # gone meanwhile
    found, new = set[int](), {pid}
    while new:
        new = {one for one, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def status(pid: int) -> tuple[str, set[int], set[int], int]:
    """Its command, all its uids, its groups and its capabilities; nothing of one that is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return "", set(), set(), 0
    uids, groups = ({int(one) for one in lines[name].split()} for name in ("Uid", "Groups"))
    return command, uids, groups | {int(lines["Gid"].split()[0])}, int(lines["CapEff"], 16)
