"""The command `bursar quota-service`: its options, and their validation."""

from __future__ import annotations

import ssl
from pathlib import Path

import click


@click.command("quota-service")
@click.option("--url", envvar="BURSAR_URL", help="URL of the API; default: http://127.0.0.1:8080.")
@click.option("--token", envvar="BURSAR_TOKEN", help="The service's token.")
@click.option(
    "--token-file",
    envvar="BURSAR_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token; read again when the server refuses it.",
)
@click.option("--ca-file", envvar="BURSAR_CA_FILE", help="CA certificate of an https API.")
@click.option(
    "--pinned-certificate",
    hidden=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The server's own certificate, trusted for any name.",
)
def quota_service(
    url: str | None,
    token: str | None,
    token_file: Path | None,
    ca_file: str | None,
    pinned_certificate: Path | None,
) -> None:
    """Decide requests at the gate `quota`: approve what fits into the limits, and note why the rest does not.

    `bursar serve` runs it by default. It needs a token of role approver with the gate quota, for the tenants whose
    requests it decides. Any number of services may run.

    \b
    bursar quota-service --url https://bursar:8080 --token-file quota-service.token
    """
    import structlog

    from bursar.client import AsyncClient, BursarError
    from bursar.logs import set_up_logs
    from bursar.parent import ParentGone, die_with_parent
    from bursar.quota_service.service import TokenSource, TokenUnreadable, run

    if (token is None) == (token_file is None):
        raise click.UsageError("give the token with --token-file, or with --token or BURSAR_TOKEN, and not with both")
    set_up_logs()
    trust = _pinned(pinned_certificate) if pinned_certificate is not None else None

    def connect(text: str) -> AsyncClient:
        return AsyncClient(url, text, ca_file=ca_file, ssl_context=trust)

    try:
        die_with_parent()
        raise SystemExit(run(connect, TokenSource(token or "", token_file)))
    except (TokenUnreadable, ParentGone) as error:
        click.echo(f"bursar: {error}", err=True)
    except BursarError as error:
        hint = f"; {error.hint}" if error.hint and error.hint not in error.message else ""
        click.echo(f"bursar: {error.message}{hint}", err=True)
    except BaseExceptionGroup as errors:
        structlog.get_logger().error("quota_service_failed", message="the quota service failed", exc_info=errors)
    raise SystemExit(1)


def _pinned(certificate: Path) -> ssl.SSLContext:
    """Trust exactly this certificate, whatever name the server is reached by: it is the one that it was given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context
