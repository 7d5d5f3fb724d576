"""The entry point: the client's commands, and the server's, each loaded when it is called.

`serve` starts everything on one machine. For more machines its parts run apart, as `api` and `controller`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.main import cli

if TYPE_CHECKING:
    from bursar.config import Settings

DATABASE = click.option(
    "--database-url", envvar="BURSAR_DATABASE_URL", default="", help="PostgreSQL; without one it is embedded."
)
REDIS = click.option(
    "--redis-url", envvar="BURSAR_REDIS_URL", default="", help="Rate limits shared by several API processes."
)
HTTP = click.option(
    "--http", default="127.0.0.1:8080", show_default=True, help="HOST:PORT to serve HTTP on; port 0 picks one."
)
GRPC = click.option("--grpc", default="", help="HOST:PORT to serve gRPC on.")
CERT = click.option(
    "--tls-cert", type=click.Path(path_type=Path, exists=True), help="Serve HTTPS with this certificate."
)
KEY = click.option("--tls-key", type=click.Path(path_type=Path, exists=True), help="The certificate's key.")


TOKEN_FILE = click.option(
    "--admin-token-file", type=click.Path(path_type=Path), help="Write an admin token here, mode 0600."
)


@click.command()
@click.option(
    "--data", type=click.Path(path_type=Path), default=None, help="Data directory of the embedded PostgreSQL."
)
@HTTP
@GRPC
@TOKEN_FILE
@click.option("--show-token", is_flag=True, help="Print the token in that file when ready.")
@DATABASE
@REDIS
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="API processes.")
@click.option("--tls", type=click.Choice(["auto"]), help="auto: HTTPS with a certificate of our own CA.")
@CERT
@KEY
def serve(**options: Any) -> None:
    """Start everything on this machine: PostgreSQL if none is named, the API, the controller."""
    import bursar.serve

    settings = _settings(options)
    raise SystemExit(bursar.serve.run(settings, data=options["data"], tls_auto=options["tls"] == "auto"))


@click.command()
@HTTP
@GRPC
@DATABASE
@REDIS
@CERT
@KEY
@TOKEN_FILE
@click.option("--fd", type=int, default=None, hidden=True, help="A listening socket, inherited.")
def api(fd: int | None, **options: Any) -> None:
    """Serve the API, on a database that others share."""
    import bursar.serve

    raise SystemExit(bursar.serve.run_api(_settings(options), fd))


@click.command()
@DATABASE
def controller(**options: Any) -> None:
    """Run the loops, on a database that others share."""
    import bursar.serve

    raise SystemExit(bursar.serve.run_controller(_settings({"http": "127.0.0.1:0", **options})))


def _settings(options: dict[str, Any]) -> Settings:
    from bursar.config import (
        ConfigError,
        Settings,
        oidc_from_environment,
        parse_address,
        requests_per_minute_from_environment,
    )

    try:
        return Settings(
            http=parse_address(options["http"], "--http"),
            grpc=parse_address(options["grpc"], "--grpc") if options.get("grpc") else None,
            database_url=options.get("database_url", ""),
            redis_url=options.get("redis_url", ""),
            admin_token_file=options.get("admin_token_file"),
            show_token=options.get("show_token", False),
            workers=options.get("workers", 1),
            requests_per_minute=requests_per_minute_from_environment(),
            tls_cert=options.get("tls_cert"),
            tls_key=options.get("tls_key"),
            oidc=oidc_from_environment(),
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def main() -> None:
    cli.add_lazy("serve", "bursar.main:serve", help="Start everything on this machine.")
    cli.add_lazy("api", "bursar.main:api", help="Serve the API alone.")
    cli.add_lazy("controller", "bursar.main:controller", help="Run the loops alone.")
    cli.add_lazy("bench", "bursar.bench.main:bench", help="Measure.")
    cli()


if __name__ == "__main__":
    main()
