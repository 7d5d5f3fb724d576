"""The entry point: the client's commands, and the server's, each loaded when it is called.

`serve` starts everything on one machine. For more machines its parts run apart, as `api` and `controller`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.connection import Connection, connected
from bursar.cli.main import cli

if TYPE_CHECKING:
    from bursar.config import Settings
    from bursar.sim.shape import Shape

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


@click.group()
def sim() -> None:
    """Simulate nodes."""


@sim.command()
@click.option("--count", required=True, type=click.IntRange(1, 9999), help="How many nodes.")
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(0, 1024), help="GPUs on each.")
@click.option("--cpu", default=96, show_default=True, type=click.IntRange(1), help="CPUs on each.")
@click.option("--memory", default="768Gi", show_default=True, help="Memory on each.")
@click.option("--prefix", default="sim", show_default=True, help="What their names begin with.")
@click.option("--zones", default=2, show_default=True, type=click.IntRange(1), help="Zones they are spread over.")
@click.option("--racks", default=8, show_default=True, type=click.IntRange(1), help="Racks they are spread over.")
@click.option("--run-seconds", type=click.FloatRange(0), help="How long an allocation runs that does not say it.")
@click.option("--stop-seconds", default=0.0, type=click.FloatRange(0), help="How long what is told to stop takes.")
@click.option("--keep", is_flag=True, help="Leave the nodes registered at the end.")
@connected
def nodes(connection: Connection, run_seconds: float | None, stop_seconds: float, keep: bool, **shape: Any) -> None:
    """Register nodes that run what is bound to them, in pretence, until interrupted.

    With an administrator's token. An allocation's annotations say how it runs:
    bursar.io/sim-seconds, for how long; bursar.io/sim-exit, with which exit code it ends.

    \b
    bursar sim nodes --count 8 --gpus 8 --run-seconds 60
    """
    import asyncio

    from bursar.sim.shape import Shape

    asyncio.run(_simulate(connection, Shape(**shape), run_seconds, stop_seconds, keep))


async def _simulate(
    connection: Connection, shape: Shape, run_seconds: float | None, stop_seconds: float, keep: bool
) -> None:
    import asyncio
    import signal

    from bursar.client import AsyncClient
    from bursar.sim.rest import RestNodes, simulate

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    where, is_terminal = connection.client.context, sys.stderr.isatty()

    def end() -> None:
        stop.set()
        # Whoever asks again does not want to wait for the nodes' removal.
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)

    def ready() -> None:
        print(f"{shape.count} simulated nodes are ready; Ctrl-C ends them", flush=True)

    def tell() -> None:
        if is_terminal:
            line = f"{simulated.running} allocations running, {simulated.ended} ended"
            print(f"\r{line}\x1b[K", end="\n" if stop.is_set() else "", file=sys.stderr, flush=True)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, end)
    async with AsyncClient(where.url, where.token, ca_file=where.ca_file) as client:
        simulated = RestNodes(client, shape, default_seconds=run_seconds, stop_seconds=stop_seconds)
        left = await simulate(simulated, stop, ready=ready, tell=tell, keep=keep)
    print(f"{simulated.ended} allocations ended")
    if left:
        print(f"{left} nodes still run something, and are left", file=sys.stderr)


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
    cli.add_lazy("sim", "bursar.main:sim", help="Simulate nodes.")
    cli.add_lazy("bench", "bursar.bench.main:bench", help="Measure.")
    cli()


if __name__ == "__main__":
    main()
