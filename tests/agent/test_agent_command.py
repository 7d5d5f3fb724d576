"""The command's options, and what the documentation says of them."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bursar.agent.main import agent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"


def options() -> list[click.Option]:
    return [one for one in agent.params if isinstance(one, click.Option)]


def test_every_option_and_variable_is_explained_and_no_other() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)[^|]*\| (?:`(\w+)`)?[^|]*\|", section, re.MULTILINE)
    assert set(rows) == {(one.opts[0], str(one.envvar or "")) for one in options()}


@pytest.mark.parametrize("option", options(), ids=lambda option: option.opts[0])
def test_every_option_has_help(option: click.Option) -> None:
    assert option.help


def test_help_is_shown_without_a_server() -> None:
    shown = CliRunner().invoke(agent, ["--help"])
    assert shown.exit_code == 0
    assert "bursar node token --name gpu-01" in shown.output
