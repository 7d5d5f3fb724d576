"""`bursar kubeconfig`: a kubectl configuration with the current server, CA and token."""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.output import to_yaml
from bursar.cli.shell.problem import Problem

if TYPE_CHECKING:
    from bursar.client.contexts import Context


@click.command()
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@namespace_option
@connected
def kubeconfig(connection: Connection, output: Path | None) -> None:
    """Write a configuration for kubectl.

    \b
    bursar kubeconfig --output kubeconfig
    kubectl --kubeconfig kubeconfig get allocations
    """
    context = connection.client.context
    if not context.token:
        raise Problem("the context has no token", "run `bursar login URL`, or set BURSAR_TOKEN")
    text = to_yaml(document(context, connection.effective_namespace))
    if output is None:
        click.echo(text, nl=False)
    else:
        _write_secret(output, text)
        click.echo(f"Wrote {output}.", err=True)
    if context.url.startswith("http:"):
        click.echo(
            "  warning: kubectl sends no token over plain http, so the server will refuse it; "
            "serve with --tls auto, or with a certificate",
            err=True,
        )


def document(context: Context, namespace: str) -> dict[str, Any]:
    name = context.name or "bursar"
    cluster = {"server": context.url}
    if context.ca_file:
        cluster["certificate-authority-data"] = b64encode(_authority(context.ca_file)).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": {"token": context.token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        "current-context": name,
    }


def _authority(ca_file: str) -> bytes:
    try:
        return Path(ca_file).read_bytes()
    except OSError as error:
        raise Problem(f"the CA file cannot be read: {error}") from None


def _write_secret(path: Path, text: str) -> None:
    """Write the file with mode 0600 from its creation on."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
    except OSError as error:
        raise Problem(f"{path} cannot be written: {error}") from None
