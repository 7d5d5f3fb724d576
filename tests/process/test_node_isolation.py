"""Tenants who are strangers share a node with a real root agent: what one does, leaves or breaks never reaches another.

The bombs are small: their limits are far below what the machine has.
"""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bursar.agent.host.sandbox import find_sandbox
from bursar.client import Client
from support.process.agents import Agent, joined_agent, until
from support.process.server import OwnServer, migrated_directory, started

FOUND = find_sandbox()
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not FOUND.isolates, reason=f"nothing can be isolated here: {FOUND.why}"),
]
ENDS = ("Succeeded", "Failed", "Stopped")
GIGANTIC = 300  # seconds that nothing here takes


@pytest.fixture(scope="module")
def context() -> Iterator[OwnServer]:
    with migrated_directory() as data, started(data) as running:
        with running.client() as client:
            for tenant in ("acme", "rival"):
                client.tenants.create({"metadata": {"name": tenant}})
                labels = {"bursar.io/tenant": tenant}
                client.namespaces.create({"metadata": {"name": tenant, "labels": labels}})
            client.settings.patch("system", {"spec": {"limits": {"sensitive_pool_size": "10"}}})
        yield running


@pytest.fixture
def admin(context: OwnServer) -> Iterator[Client]:
    with context.client() as one:
        yield one


@pytest.fixture
def name() -> str:
    return f"w-{uuid.uuid4().hex[:8]}"


@contextmanager
def isolating(context: OwnServer, admin: Client, name: str, home: Path, *options: str) -> Iterator[Agent]:
    """An agent under root without a configured user for commands."""
    with joined_agent(context, admin, name, home, "--run-as", "nobody", *options) as agent:
        yield agent


def start(client: Client, tenant: str, name: str, node: str, text: str, **spec: Any) -> None:
    resources = spec.pop("resources", {"requests": {"cpu": "100m"}})
    client.allocations(tenant).create(
        {
            "metadata": {"name": name},
            "spec": {
                "resources": resources,
                "nodeSelector": {"only": node},
                "command": ["sh", "-c", text],
                **spec,
            },
        }
    )


def status(client: Client, tenant: str, name: str) -> dict[str, Any]:
    return dict(client.allocations(tenant).get(name)["status"])


def in_phase(client: Client, tenant: str, name: str, *phases: str) -> dict[str, Any]:
    def arrived() -> dict[str, Any] | None:
        found = status(client, tenant, name)
        return found if found.get("phase") in phases else None

    found: dict[str, Any] = until(arrived, f"{name} becoming {' or '.join(phases)}", 120.0)
    return found


def output(agent: Agent, uid: str) -> str:
    files = sorted((agent.data / "work" / "placements").glob(f"{uid}.*/output.*"))
    return "".join(path.read_text(errors="replace") for path in files)


def said(client: Client, agent: Agent, tenant: str, name: str, text: str, **spec: Any) -> str:
    """What a command has written, when it is over."""
    start(client, tenant, name, agent.name, text, **spec)
    in_phase(client, tenant, name, *ENDS)
    return output(agent, client.allocations(tenant).get(name)["metadata"]["uid"])


def test_the_attack_of_one_tenant_on_the_next(context: OwnServer, admin: Client, name: str, tmp_path: Path) -> None:
    """Code left in HOME, secrets in a neighbour's environment, and a neighbour killed: none of it works."""
    trap = "import os; print('PWNED', os.environ['BURSAR_TENANT'], os.environ.get('API_KEY'))"
    site = "$(python3 -c 'import site; print(site.getusersitepackages())')"
    leave = f'd={site}; mkdir -p $d /tmp/x; echo "{trap}" | tee $d/usercustomize.py /tmp/x/usercustomize.py; echo $d'
    with isolating(context, admin, name, tmp_path) as agent:
        left = said(admin, agent, "acme", f"{name}-leave", leave)
        assert "usercustomize" not in left
        assert "PWNED" in left  # tee wrote it
        later = said(admin, agent, "rival", f"{name}-later", "python3 -c 'print(1)'", env={"API_KEY": "later-secret"})
        assert later == "1\n"
        # While both run, one looks for the other and kills whatever it finds.
        start(admin, "rival", f"{name}-victim", name, f"sleep {GIGANTIC}", env={"API_KEY": "top-secret"})
        in_phase(admin, "rival", f"{name}-victim", "Running")
        hunt = (
            "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ | grep API_KEY; done 2>/dev/null;"
            f" ls -A {agent.data}/work {agent.data}/*.pem; kill -9 -1; echo survived"
        )
        found = said(admin, agent, "acme", f"{name}-hunt", f"({hunt}) 2>&1")
        assert "top-secret" not in found
        assert "key.pem" not in found
        assert "journal" not in found
        assert status(admin, "rival", f"{name}-victim")["phase"] == "Running"
        admin.allocations("rival").delete(f"{name}-victim")


@pytest.fixture
def ruth(context: OwnServer, admin: Client) -> Iterator[Client]:
    """A user of tenant rival."""
    wanted = {"role": "user", "tenant": "rival", "user": "ruth", "ttl": "1h"}
    with Client(context.url, token=admin.request("POST", "/api/v1/tokens", body=wanted)["status"]["token"]) as one:
        yield one


@pytest.mark.parametrize("shared", [False, True], ids=["in a sandbox", "where a directory is shared"])
def test_code_that_one_tenant_leaves_never_runs_in_sensitive_work_of_another(
    context: OwnServer, admin: Client, ruth: Client, name: str, tmp_path: Path, shared: bool
) -> None:
    """A sandbox leaves nothing behind. In a directory that tenants share things stay, so a claim begins with a wipe."""
    common = tmp_path / "common"
    common.mkdir()
    common.chmod(0o1777)
    trap = "import os; print('PWNED', os.environ.get('API_KEY'))"
    places = f"{common} ~ /tmp"
    leave = f'for d in {places}; do echo "{trap}" > $d/usercustomize.py && chmod 644 $d/usercustomize.py; done; true'
    work = {"env": {"API_KEY": "the-patients-name", "PYTHONPATH": f"{common}:/tmp"}}
    options = ("--share", str(common), "--wipe-hook", f"find {common} -mindepth 1 -delete") if shared else ()
    with isolating(context, admin, name, tmp_path, *options) as agent:
        said(admin, agent, "acme", f"{name}-leave", leave)
        careless = said(admin, agent, "rival", f"{name}-careless", "python3 -c 'print(1)'", **work)
        assert ("PWNED" in careless) is shared
        states = [ruth.claim(name)["status"]["claim"]["state"]]
        assert states == (["Wiping"] if shared else ["Claimed"])
        careful = said(ruth, agent, "rival", f"{name}-careful", "python3 -c 'print(1)'", sensitive=True, **work)
        assert careful == "1\n"


def test_work_of_a_tenant_that_demands_isolation_stays_off_a_node_without(
    context: OwnServer, admin: Client, name: str, tmp_path: Path
) -> None:
    admin.tenants.create({"metadata": {"name": name}, "spec": {"isolation": "required"}})
    admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    with joined_agent(context, admin, name, tmp_path, "--run-as", "root"):
        start(admin, name, "careful", name, "true")
        found = until(lambda: reason_of(admin, name, "careful"), "a reason being told")
        assert found["code"] == "no_matching_nodes"
        assert {"constraint": "not isolating tenants", "nodes": 1} in found["excluded"]
    with isolating(context, admin, name, tmp_path):
        in_phase(admin, name, "careful", "Succeeded")


def reason_of(client: Client, tenant: str, name: str) -> dict[str, Any] | None:
    """Why it waits, once the scheduler has looked at it with the node being there."""
    told: dict[str, Any] = client.allocations(tenant).explain(name)["reason"] or {}
    return told if told.get("excluded") else None


def test_a_fork_bomb_harms_nobody_else(context: OwnServer, admin: Client, name: str, tmp_path: Path) -> None:
    bomb = (
        "import os, time\nn = 0\n"
        "while n < 200:\n"
        " try:\n"
        "  if os.fork() == 0:\n"
        f"   time.sleep({GIGANTIC})\n"
        "  n += 1\n"
        " except OSError:\n"
        "  break\n"
        "print('stopped at', n)"
    )
    with isolating(context, admin, name, tmp_path, "--pids-max", "32") as agent:
        start(admin, "rival", f"{name}-calm", name, f"sleep {GIGANTIC}")
        in_phase(admin, "rival", f"{name}-calm", "Running")
        told = said(admin, agent, "acme", f"{name}-forks", f'python3 -c "{bomb}"')
        assert int(told.split()[-1]) < 32
        assert status(admin, "rival", f"{name}-calm")["phase"] == "Running"
        assert said(admin, agent, "rival", f"{name}-more", "echo fine") == "fine\n"
        admin.allocations("rival").delete(f"{name}-calm")


def test_a_memory_bomb_ends_at_what_was_requested(context: OwnServer, admin: Client, name: str, tmp_path: Path) -> None:
    """Also where nobody said a limit, and in shared memory."""
    with isolating(context, admin, name, tmp_path):
        start(admin, "rival", f"{name}-calm", name, f"sleep {GIGANTIC}")
        in_phase(admin, "rival", f"{name}-calm", "Running")
        resources = {"requests": {"cpu": "100m", "memory": "64Mi"}}
        for kind, text in (
            ("heap", "exec python3 -c 'b = bytearray(256 << 20)'"),
            ("shm", "exec dd if=/dev/zero of=/dev/shm/x bs=1M count=256"),
        ):
            start(admin, "acme", f"{name}-{kind}", name, text, resources=resources)
            end = in_phase(admin, "acme", f"{name}-{kind}", *ENDS)
            assert (end["phase"], end["reason"]) == ("Failed", "OOMKilled")
        assert status(admin, "rival", f"{name}-calm")["phase"] == "Running"
        admin.allocations("rival").delete(f"{name}-calm")


@contextmanager
def loop_mounted(folder: Path, kind: str, size_bytes: int) -> Iterator[Path]:
    """A small disk of its own."""
    if not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"there is no mkfs.{kind}")
    image, point = folder / "disk.img", folder / "disk"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


FILL = "i=0; while [ $i -lt {count} ]; do dd if=/dev/zero of=$HOME/x$i bs=1M count=4 2>&1 || exit; i=$((i+1)); done"


def test_a_disk_bomb_ends_and_its_neighbours_go_on(
    context: OwnServer, admin: Client, name: str, tmp_path: Path
) -> None:
    """The one that grows, not the one that has much."""
    with (
        loop_mounted(tmp_path, "ext4", 512 << 20) as disk,
        isolating(context, admin, name, disk, "--disk-reserve", "200Mi") as agent,
    ):
        keep = f"dd if=/dev/zero of=$HOME/kept bs=1M count=64 2>/dev/null; echo kept; sleep {GIGANTIC}"
        start(admin, "rival", f"{name}-calm", name, keep)
        uid = admin.allocations("rival").get(f"{name}-calm")["metadata"]["uid"]
        until(lambda: "kept" in output(agent, uid), "what is large and does not grow")
        guarded = agent.data / "work" / "homes"
        bomb = FILL.format(count=60) + f"; sleep {GIGANTIC}"
        start(admin, "acme", f"{name}-bomb", name, bomb)
        end = in_phase(admin, "acme", f"{name}-bomb", *ENDS)
        assert (end["phase"], end["reason"]) == ("Failed", "DiskFull")
        assert status(admin, "rival", f"{name}-calm")["phase"] == "Running"
        assert len(list(guarded.iterdir())) == 1
        admin.allocations("rival").delete(f"{name}-calm")
        until(lambda: not list(guarded.iterdir()), "all homes being removed")


def test_who_keeps_more_than_its_limit_is_ended(context: OwnServer, admin: Client, name: str, tmp_path: Path) -> None:
    with isolating(context, admin, name, tmp_path):
        resources = {"requests": {"cpu": "100m", "ephemeral-storage": "16Mi"}}
        text = f"dd if=/dev/zero of=/tmp/x bs=1M count=40 2>/dev/null; sleep {GIGANTIC}"
        start(admin, "acme", f"{name}-over", name, text, resources=resources)
        end = in_phase(admin, "acme", f"{name}-over", *ENDS)
        assert (end["phase"], end["reason"]) == ("Failed", "DiskLimitExceeded")


def test_btrfs_itself_keeps_a_placement_within_its_limit(
    context: OwnServer, admin: Client, name: str, tmp_path: Path
) -> None:
    with loop_mounted(tmp_path, "btrfs", 512 << 20) as disk:
        subprocess.run(["btrfs", "quota", "enable", str(disk)], check=True, capture_output=True)
        with isolating(context, admin, name, disk, "--disk-reserve", "1Mi") as agent:
            resources = {"requests": {"cpu": "100m", "ephemeral-storage": "64Mi"}}
            text = "dd if=/dev/urandom of=$HOME/x bs=1M count=128 conv=fsync 2>&1; btrfs subvolume create ~/more 2>&1"
            told = said(admin, agent, "acme", f"{name}-over", text, resources=resources)
            assert "Disk quota exceeded" in told
            assert "cannot create subvolume: Operation not permitted" in told
            assert not list((agent.data / "work" / "homes").iterdir())


def test_a_node_says_whether_it_isolates(context: OwnServer, admin: Client, name: str, tmp_path: Path) -> None:
    def shown() -> tuple[str, str, str]:
        found = admin.nodes.get(name)["status"]
        told: dict[str, str] = next((one for one in found["conditions"] if one["type"] == "Isolated"), {})
        return found.get("isolation", ""), told.get("status", ""), told.get("message", "")

    with isolating(context, admin, name, tmp_path):
        until(lambda: shown() == ("bubblewrap", "True", ""), "the node saying that it isolates")
    with joined_agent(context, admin, name, tmp_path, "--run-as", "root"):
        until(lambda: shown() == ("none", "False", "commands run as root"), "the node saying that it does not")


def test_devices_are_those_that_every_command_needs(
    context: OwnServer, admin: Client, name: str, tmp_path: Path
) -> None:
    with isolating(context, admin, name, tmp_path) as agent:
        seen = said(admin, agent, "acme", f"{name}-look", "ls /dev; test -e /dev/kmsg || echo none")
        wanted = {"core", "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty"}
        assert set(seen.split()) == wanted | {"urandom", "zero", "none"}
