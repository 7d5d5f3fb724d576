"""The how-to pages: each command is one that the command line has, and an administrator's are run."""

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bursar.cli.main import cli
from bursar.client import Client
from bursar.client.errors import Unavailable
from bursar.main import sim
from support.process.agents import until
from support.process.server import BURSAR, Server, migrated_directory, started

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "howto").glob("*-*.md"))
DEAD = "gpu-0007"  # on these pages a node that is gone, and that no test has
pytestmark = pytest.mark.timeout(300)


def commands(page: Path, prompts: str) -> list[str]:
    blocks = re.findall(r"^ *```console\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return re.findall(rf"^ *{prompts} (.*)$", "".join(blocks), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_there_is(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ca.crt", "gpu-0003.token"):
        (tmp_path / name).touch()
    found = commands(page, r"(?:ann|node)?\$")
    assert found
    for line in found:
        words = shlex.split(re.split(r" [<>] ", line)[0])
        assert words[0] == "bursar", line
        parse(words[1:])


def parse(words: list[str]) -> None:
    """Read the words as the program would, and do nothing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="bursar")
    while isinstance(command, click.Group) and words:
        if words[0] == "agent":
            from bursar.agent.main import agent

            command, words = agent, words[1:]
            break
        if words[0] == "sim":
            command, words = sim, words[1:]
            continue
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no {words[0]}"
        command, words = found, words[1:]
    command.make_context(str(command.name), list(words), parent=context)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an administrator of a server with two simulated nodes."""
    home = tmp_path_factory.mktemp("home")
    with migrated_directory() as data, started(data) as server:
        environment = {**server.environment, "BURSAR_CONFIG": str(home / "config.yaml"), "PATH": path()}
        words = [str(BURSAR), "sim", "nodes", "--count", "2", "--prefix", "gpu", "--run-seconds", "1"]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as nodes:
            try:
                assert nodes.stdout is not None
                assert "2 simulated nodes are ready" in nodes.stdout.readline()
                await_cluster(server)
                yield environment
            finally:
                nodes.send_signal(signal.SIGINT)


def path() -> str:
    return f"{BURSAR.parent}:{os.environ['PATH']}"


def await_cluster(server: Server) -> None:
    """Until the nodes are ready, and a leader answers what the pages ask it."""
    with server.client() as client:
        until(lambda: all(one["status"].get("phase") == "Ready" for one in client.nodes.list()), "the nodes")
        until(lambda: leads(client), "a leader")


def leads(client: Client) -> bool:
    try:
        client.request("GET", "/api/v1/metrics/queues")
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_an_administrator_types_works(page: Path, context: dict[str, str], tmp_path: Path) -> None:
    for line in commands(page, r"\$"):
        if DEAD in line:
            continue
        done = subprocess.run(
            ["sh", "-c", line], env=context, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
