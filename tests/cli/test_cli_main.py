"""The commands there are: found without being loaded, loaded without the heavy libraries, and each with its help."""

import os
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from bursar.cli.main import ENTRIES, cli
from bursar.cli.shell.lazy import CommandEntry, LazyGroup, load

# What no command may need before it asks the server something.
HEAVY = {"httpx2", "asyncio", "yaml", "rich", "asyncpg", "uvicorn", "cryptography", "msgspec"}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_list_says_of_a_command_what_it_says_of_itself(name: str) -> None:
    command = load(ENTRIES[name].target)
    assert command.get_short_help_str(1000) == ENTRIES[name].help
    assert command.name == name


def test_help_shows_every_command_and_loads_none() -> None:
    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    for name, entry in ENTRIES.items():
        assert f"  {name.ljust(10)}  {entry.help}\n" in shown.output


@pytest.mark.parametrize("command", ["--help", "version", "get --help", "context list", "gett"])
def test_what_asks_no_server_loads_nothing_heavy(command: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print({HEAVY!r} & {{*sys.modules}}, file=sys.stderr))
from bursar.cli.main import cli
cli({command.split()!r}, prog_name="bursar")
"""
    environment = {**os.environ, "BURSAR_CONFIG": "/nonexistent/config.yaml"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.stderr.strip().endswith("set()"), ran.stderr


def test_every_command_and_subcommand_explains_itself() -> None:
    runner = CliRunner()
    for path in _paths(cli, []):
        shown = runner.invoke(cli, [*path, "--help"])
        assert shown.exit_code == 0, path
        assert "Usage: " in shown.output


def _paths(group: click.Group, before: list[str]) -> list[list[str]]:
    context = click.Context(group)
    paths = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert command.help, name
        paths.append([*before, name])
        if isinstance(command, click.Group):
            paths += _paths(command, [*before, name])
    return paths


def test_others_can_add_commands() -> None:
    group = LazyGroup("x", entries={"get": CommandEntry("bursar.cli.objects.get:get", "Show.", "Objects")})
    group.add_lazy("serve", "no.such.module:serve", help="Start everything.")
    shown = CliRunner().invoke(group, ["--help"])
    assert "serve  Start everything." in shown.output


def test_a_mistyped_command_is_guessed() -> None:
    shown = CliRunner().invoke(cli, ["descibe"])
    assert shown.exit_code == 2
    assert "Did you mean 'describe'?" in shown.output


def test_a_bug_is_not_told_as_if_it_were_expected() -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError

    group = LazyGroup("x")
    group.add_command(broken, "broken")
    assert isinstance(CliRunner().invoke(group, ["broken"]).exception, ZeroDivisionError)


def test_interrupting_is_quiet() -> None:
    @click.command()
    def endless() -> None:
        raise KeyboardInterrupt

    group = LazyGroup("x")
    group.add_command(endless, "endless")
    shown = CliRunner().invoke(group, ["endless"])
    assert (shown.exit_code, shown.output) == (130, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    shown = CliRunner().invoke(cli, ["completion", shell])
    assert shown.exit_code == 0
    assert "_BURSAR_COMPLETE" in shown.output


def _completed(words: str, **environment: str) -> list[str]:
    """What bash is offered after these words."""
    surroundings = {
        **os.environ,
        "BURSAR_CONFIG": "/nonexistent/config.yaml",
        "_BURSAR_COMPLETE": "bash_complete",
        "COMP_WORDS": f"bursar {words}",
        "COMP_CWORD": str(len(f"bursar {words}".split(" ")) - 1),
        **environment,
    }
    ran = subprocess.run([sys.executable, "-m", "bursar.cli"], capture_output=True, text=True, env=surroundings)
    assert ran.stderr == ""
    return [line.partition(",")[2] for line in ran.stdout.splitlines() if line]


def test_commands_are_completed() -> None:
    assert _completed("de") == ["describe", "delete"]


def test_kinds_are_completed() -> None:
    assert _completed("get al") == ["allocations"]
    assert _completed("create t") == ["tenants", "tiers"]


def test_completion_is_silent_and_soon_over_when_nobody_answers() -> None:
    # An address that swallows packets, where a connection neither fails nor succeeds.
    started = time.monotonic()
    assert _completed("get allocations tr", BURSAR_URL="http://192.0.2.1:1") == []
    assert time.monotonic() - started < 5
