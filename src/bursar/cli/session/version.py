"""`bursar version`."""

from __future__ import annotations

from typing import Any

import click

from bursar import __version__


@click.command()
@click.option("--server", is_flag=True, help="Also show the server's version.")
@click.option("--context", metavar="NAME", help="The context to use; else the current one.")
@click.option("--url", help="The server's URL.  [env: BURSAR_URL]")
def version(server: bool, **options: Any) -> None:
    """Show the version."""
    click.echo(f"bursar {__version__}")
    if server:
        from bursar.cli.shell.connection import make_client

        with make_client(**options) as client:
            answer = client.request("GET", "/version")
        click.echo(f"server {answer['gitVersion']} at {client.context.url}")
