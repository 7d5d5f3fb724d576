"""A click group that imports a command only when it is called.

Each entry has the command's module and its help line, so that `bursar --help` and completion import nothing. A test
compares these lines with the commands' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from bursar.cli.shell import problem


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: `target` is `module:attribute`, `section` is the heading in the help."""

    target: str
    help: str
    section: str


class LazyGroup(click.Group):
    """A group whose `entries` map a command's name to its module; `add_lazy` adds one."""

    def __init__(self, *args: Any, entries: dict[str, CommandEntry] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.entries: dict[str, CommandEntry] = dict(entries or {})

    def add_lazy(self, name: str, target: str, *, help: str, section: str = "Server") -> None:  # noqa: A002
        self.entries[name] = CommandEntry(target, help, section)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.entries, *(name for name in super().list_commands(ctx) if name not in self.entries)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        return load(entry.target) if entry else super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self.entries.items():
            sections.setdefault(entry.section, []).append((name, entry.help))
        width = max((len(name) for name in self.entries), default=0)
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        return [
            CompletionItem(name, help=entry.help) for name, entry in self.entries.items() if name.startswith(incomplete)
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand as error:
            # click suggests similar names only among loaded commands.
            raise click.NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Every error is printed in one form, and its kind gives the exit code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(problem.INTERRUPTED)
        except BrokenPipeError:
            # The reader has closed the pipe, as in `bursar get … | head -1`: end quietly, as SIGPIPE does.
            _stop_writing()
            ctx.exit(problem.PIPE_CLOSED)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except Exception as error:
            ctx.exit(problem.report(error))


def _stop_writing() -> None:
    """Send the rest of standard output nowhere, so that flushing it at the end does not fail."""
    import os
    import sys

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def load(target: str) -> click.Command:
    from importlib import import_module

    module, _, attribute = target.partition(":")
    command = getattr(import_module(module), attribute)
    assert isinstance(command, click.Command), f"{target} is not a command"
    return command
