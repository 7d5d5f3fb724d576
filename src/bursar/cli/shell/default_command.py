"""A click group with a default command: `bursar quota physics` means `bursar quota show physics`."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem


class DefaultCommandGroup(click.Group):
    """A group that runs its command `default` if the first word is none of its commands."""

    def __init__(self, *args: Any, default: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in (*self.commands, *ctx.help_option_names) and not (ctx.resilient_parsing and not args):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        """Complete the commands, and the arguments of the default one."""
        command = self.commands[self.default]
        within = click.Context(command, info_name=self.default, parent=ctx, resilient_parsing=True)
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        words = [item for one in arguments[:1] for item in one.shell_complete(within, incomplete)]
        return [*super().shell_complete(ctx, incomplete), *words]
