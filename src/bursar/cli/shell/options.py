"""Options and arguments that several commands share, beside those of the connection."""

from __future__ import annotations

import click

from bursar.cli.shell import completers
from bursar.core.values.duration import DurationError, parse_seconds

json_option = click.option("--json", "as_json", is_flag=True, help="Print the API's answer.")
node_argument = click.argument("name", metavar="NODE", shell_complete=completers.named("nodes"))
grace_period_option = click.option(
    "--grace-period", type=click.IntRange(0), metavar="SECONDS", help="How long running work may take to stop."
)


def seconds_of(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """An option's duration, such as 1h30m, in seconds."""
    try:
        return None if value is None else parse_seconds(value)
    except DurationError as error:
        raise click.BadParameter(str(error)) from None
