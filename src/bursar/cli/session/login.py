"""`bursar login`: stores a server and a token after checking them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from bursar.cli.shell.connection import DEFAULT_NAMESPACE
from bursar.cli.shell.problem import UNAVAILABLE, Problem


@click.command()
@click.argument("url")
@click.option("--token", metavar="TOKEN", help="The token, or - for standard input; else a prompt asks for it.")
@click.option("--context", metavar="NAME", help="The name of the context; else the host's name.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False), help="The CA of the server's certificate.")
@click.option("-n", "--namespace", default="", metavar="NAME", help="The default namespace.")
@click.option("--tenant", default="", metavar="NAME", help="The tenant, for members of several.")
def login(url: str, token: str | None, context: str | None, ca_file: str | None, namespace: str, tenant: str) -> None:
    """Store a server and its token.

    \b
    bursar login https://bursar.example.com
    bursar login https://bursar.example.com -n my-team
    bursar login http://127.0.0.1:8080 --token - < admin-token
    """
    from bursar.client.contexts import Context, Contexts, config_path, is_loopback, load, save

    url = checked_url(url)
    secret = _secret(token)
    name = context or _named_after(url)
    user, visible = _try(url, secret, ca_file, tenant)
    chosen = namespace or next(iter(visible), "")
    path = config_path()
    contexts = load(path)
    stored = Context(url, secret, str(Path(ca_file).absolute()) if ca_file else "", chosen, name, tenant)
    save(path, Contexts(name, {**contexts.known, name: stored}))
    click.echo(f'Logged in to {url} as {user}; context "{name}" is now the current one ({path}).')
    if chosen and not namespace:
        others = f"; yours are {', '.join(visible)}: -n chooses another" if len(visible) > 1 else ""
        click.echo(f'The default namespace is "{chosen}"{others}.')
    for variable in ("BURSAR_URL", "BURSAR_TOKEN"):
        if os.environ.get(variable):
            click.echo(f"  warning: {variable} is set and overrides this context: unset {variable}", err=True)
    if url.startswith("http:") and not is_loopback(url):
        click.echo("  warning: plain http sends the token unencrypted; use https", err=True)


def _named_after(url: str) -> str:
    """The context's name: host and port, because one machine may run several servers."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "default"


def checked_url(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"https://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.BadParameter(f"{url!r} is not an http or https URL", param_hint="URL")
    return parts.geturl().rstrip("/")


def _secret(token: str | None) -> str:
    if token == "-":  # noqa: S105 - standard input
        token = sys.stdin.read()
    elif token is None:
        token = str(click.prompt("Token", hide_input=True, err=True))
    if not token.strip():
        raise Problem("the token is empty")
    return token.strip()


def _try(url: str, token: str, ca_file: str | None, tenant: str) -> tuple[str, list[str]]:
    """Check the token: return its user, and the visible namespaces if `default` is not among them."""
    from bursar.cli.session.whoami import username
    from bursar.cli.shell.connection import make_client, visible_namespaces
    from bursar.client.errors import ApiError, ConnectionFailed

    try:
        with make_client(url=url, token=token, ca_file=ca_file, tenant=tenant) as client:
            user = username(client.whoami())
            try:
                client.namespaces.get(DEFAULT_NAMESPACE)
            except ApiError:
                return user, visible_namespaces(client)
            return user, []
    except ConnectionFailed as error:
        # No hint about choosing a server: the URL was just typed.
        raise Problem(error.message, error.hint, UNAVAILABLE) from None
