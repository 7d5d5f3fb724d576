"""The command's options, and what the documentation says of them."""

import os
import pwd
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bursar.agent.host import sandbox
from bursar.agent.main import _check_user, agent
from bursar.agent.run import AgentSettings, AgentStartError, _locked

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"


def options() -> list[click.Option]:
    return [one for one in agent.params if isinstance(one, click.Option)]


def test_every_option_and_variable_is_explained_and_no_other() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| (?:`(\w+)`)?[^|]*\|", section, re.MULTILINE)
    assert set(rows) == {(one.opts[0], str(one.envvar or "")) for one in options()}


@pytest.mark.parametrize("option", options(), ids=lambda option: option.opts[0])
def test_every_option_has_help(option: click.Option) -> None:
    assert option.help


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must say")
def test_root_says_whom_commands_run_as_where_it_cannot_isolate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: "")
    refused = CliRunner().invoke(agent, ["--server", "http://127.0.0.1:1", "--data", str(tmp_path)])
    assert refused.exit_code == 2
    assert "bubblewrap" in refused.output
    assert "--run-as USER" in refused.output
    assert "--run-as root" in refused.output


@pytest.mark.parametrize("url", ["http://bursar.example:8080", "http://10.0.0.1", "http://[2001:db8::1]:8080"])
def test_a_token_does_not_travel_in_clear(tmp_path: Path, url: str) -> None:
    refused = CliRunner().invoke(agent, ["--server", url, "--data", str(tmp_path), "--run-as", "root"])
    assert refused.exit_code == 2
    assert "unencrypted" in refused.output
    assert "https://" in refused.output


@pytest.mark.parametrize("text", ["70000", "0-10", "9-1", "a-b", "70000-"])
def test_a_range_of_users_that_is_none(tmp_path: Path, text: str) -> None:
    options = ["--server", "http://127.0.0.1:1", "--data", str(tmp_path), "--run-as", "root", "--run-as-range", text]
    refused = CliRunner().invoke(agent, options)
    assert refused.exit_code == 2
    assert "70000-73999" in refused.output


def test_a_user_that_nobody_is(tmp_path: Path) -> None:
    options = ["--server", "http://127.0.0.1:1", "--data", str(tmp_path), "--run-as", "no-such-user"]
    refused = CliRunner().invoke(agent, options)
    assert refused.exit_code == 2
    assert "this machine has no user 'no-such-user'" in refused.output


@pytest.mark.parametrize("name", [None, pwd.getpwuid(os.geteuid()).pw_name])
def test_who_is_not_root_runs_commands_as_itself(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    if name is None:
        return _check_user(None)
    with pytest.raises(click.UsageError, match="only root"):
        _check_user(name)
    return _check_user(pwd.getpwuid(65534).pw_name)


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(AgentStartError, match="chmod go-w"), _locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o755)
    with _locked(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give something away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(AgentStartError, match=r"belongs to another user .* --data DIR"), _locked(tmp_path):
        pass


def test_help_is_shown_without_a_server() -> None:
    shown = CliRunner().invoke(agent, ["--help"])
    assert shown.exit_code == 0
    assert "bursar node token --name gpu-01" in shown.output


@pytest.mark.parametrize(
    ("more", "pids_max", "groups"), [((), 4096, False), (("--pids-max", "64", "--run-as-groups"), 64, True)]
)
def test_what_bounds_placements_unless_it_is_said_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], pids_max: int, groups: bool
) -> None:
    """As far as the settings that the agent is run with; what becomes of them the executor's tests say."""
    seen: list[AgentSettings] = []
    monkeypatch.setattr("bursar.agent.run.run", seen.append)
    me = pwd.getpwuid(os.geteuid()).pw_name
    options = ["--server", "http://127.0.0.1:1", "--data", str(tmp_path), "--run-as", me, *more]
    assert CliRunner().invoke(agent, options).exit_code == 0
    assert [(one.pids_max, one.run_as_groups) for one in seen] == [(pids_max, groups)]


def test_groups_are_those_of_a_user_that_is_named(tmp_path: Path) -> None:
    refused = CliRunner().invoke(agent, ["--server", "http://127.0.0.1:1", "--data", str(tmp_path), "--run-as-groups"])
    assert refused.exit_code == 2
    assert "--run-as USER" in refused.output
