"""The entry point: the client's commands, and the server's, each loaded when it is called.

`serve` starts everything on one machine. For more machines its parts run apart, as `api`, `controller` and `waldur`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.main import cli
from bursar.cli.shell.connection import Connection, connected
from bursar.core.values.wording import counted

if TYPE_CHECKING:
    from bursar.client import AsyncClient
    from bursar.config import ServerSettings
    from bursar.sim.rest import RestNodes
    from bursar.sim.shape import NodeShape
    from bursar.sim.stream import AgentNodes

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
GRPC_ADVERTISE = click.option(
    "--grpc-advertise", default="", help="HOST:PORT that agents are told to call, where it is not that of --grpc."
)
GRPC_HOST = click.option(
    "--grpc-host", multiple=True, metavar="HOST", help="Another name or address that agents call gRPC by; repeatable."
)
GRPC_INSECURE = click.option(
    "--grpc-insecure", is_flag=True, help="Serve gRPC without certificates, on loopback only; nodes are believed."
)
GRPC_ADMIN = click.option(
    "--grpc-admin", default="", help="HOST:PORT to serve AdminService on: gRPC for administrators, by token."
)
METRICS = click.option(
    "--metrics", default="", help="HOST:PORT to serve /metrics on without a token, and nothing else."
)
CERT = click.option(
    "--tls-cert", type=click.Path(path_type=Path, exists=True), help="Serve HTTPS with this certificate."
)
KEY = click.option("--tls-key", type=click.Path(path_type=Path, exists=True), help="The certificate's key.")


CONNECTIONS = click.option(
    "--connections", default=20_000, show_default=True, type=click.IntRange(16), metavar="N",
    help="HTTP connections that an API process has open at once.",
)  # fmt: skip
PER_ADDRESS = click.option(
    "--connections-per-address", default=512, show_default=True, type=click.IntRange(1), metavar="N",
    help="How many of them one address may have that have shown no good token.",
)  # fmt: skip
TOKEN_FILE = click.option(
    "--admin-token-file", type=click.Path(path_type=Path), help="Write an admin token here, mode 0600."
)


@click.command()
@click.option(
    "--data", type=click.Path(path_type=Path), default=None, help="Data directory of the embedded PostgreSQL."
)
@HTTP
@GRPC
@GRPC_ADVERTISE
@GRPC_HOST
@GRPC_INSECURE
@GRPC_ADMIN
@METRICS
@TOKEN_FILE
@click.option("--show-token", is_flag=True, help="Print the token in that file when ready.")
@DATABASE
@REDIS
@click.option("--restored", is_flag=True, help="The database was put back to a backup; said once, at the first start.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="API processes.")
@click.option(
    "--user",
    envvar="BURSAR_USER",
    default="",
    help="Started by root, serve as this user; by default bursar.",
)
@click.option("--tls", type=click.Choice(["auto"]), help="auto: HTTPS with a certificate of our own CA.")
@CERT
@KEY
@CONNECTIONS
@PER_ADDRESS
def serve(**options: Any) -> None:
    """Start everything on this machine: PostgreSQL if none is named, the API, the controller."""
    import bursar.serve

    settings = _settings(options)
    raise SystemExit(bursar.serve.run(settings, data=options["data"], tls_auto=options["tls"] == "auto"))


@click.command()
@HTTP
@GRPC
@GRPC_ADVERTISE
@GRPC_HOST
@GRPC_INSECURE
@GRPC_ADMIN
@METRICS
@DATABASE
@REDIS
@CERT
@KEY
@CONNECTIONS
@PER_ADDRESS
@TOKEN_FILE
@click.option("--fd", type=int, default=None, hidden=True, help="A listening socket, inherited.")
@click.option("--metrics-fd", type=int, default=None, hidden=True, help="A listening socket for /metrics, inherited.")
@click.option("--grpc-shared", is_flag=True, hidden=True, help="Others serve gRPC at the same address.")
def api(fd: int | None, metrics_fd: int | None, **options: Any) -> None:
    """Serve the API, on a database that others share."""
    import bursar.serve

    raise SystemExit(bursar.serve.run_api(_settings(options), fd, metrics_fd))


@click.command()
@DATABASE
def controller(**options: Any) -> None:
    """Run the loops, on a database that others share."""
    import bursar.serve

    raise SystemExit(bursar.serve.run_controller(_settings({"http": "127.0.0.1:0", **options})))


@click.command()
@DATABASE
def waldur(**options: Any) -> None:
    """Read what is left of tenants' budgets from Waldur, for a database that others share.

    Set by the environment: BURSAR_WALDUR_URL, BURSAR_WALDUR_TOKEN_FILE, BURSAR_WALDUR_OFFERINGS. `bursar serve` starts
    it by itself where they are set.
    """
    import bursar.serve

    raise SystemExit(bursar.serve.run_waldur(_settings({"http": "127.0.0.1:0", **options})))


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
@click.option("--grpc", default="", help="HOST:PORT where agents are served, where it is not as the server says.")
@click.option("--insecure", is_flag=True, help="Speak gRPC without certificates, on loopback.")
@click.option("--rest", is_flag=True, help="Speak REST, as nodes without an agent do.")
@connected
def nodes(connection: Connection, keep: bool, **options: Any) -> None:
    """Register nodes that run what is bound to them, in pretence, until interrupted.

    With an administrator's token. They speak as agents do, over gRPC, where the server offers it; else over REST.
    An allocation's annotations say how it runs: bursar.io/sim-seconds, for how long; bursar.io/sim-exit, with which
    exit code it ends.

    \b
    bursar sim nodes --count 8 --gpus 8 --run-seconds 60
    """
    import asyncio

    from bursar.sim.shape import NodeShape

    if options["rest"] and (options["grpc"] or options["insecure"]):
        raise click.UsageError("--rest goes without --grpc and --insecure")
    if options["insecure"] and not options["grpc"]:
        raise click.UsageError("--insecure needs --grpc HOST:PORT")
    ways = {name: options.pop(name) for name in ("run_seconds", "stop_seconds", "grpc", "insecure", "rest")}
    asyncio.run(_simulate(connection, NodeShape(**options), keep, ways))


async def _simulate(connection: Connection, shape: NodeShape, keep: bool, ways: dict[str, Any]) -> None:
    import asyncio
    import signal

    from bursar.client import AsyncClient
    from bursar.sim.rest import simulate

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    where = connection.client.context

    def end() -> None:
        stop.set()
        # Whoever asks again does not want to wait for the nodes' removal.
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)

    def ready() -> None:
        print(
            f"{counted(shape.count, 'simulated node')} {'is' if shape.count == 1 else 'are'} ready; Ctrl-C ends them",
            flush=True,
        )

    def tell() -> None:
        if _in_foreground():
            line = f"{counted(simulated.running, 'allocation')} running, {simulated.ended} ended"
            print(f"\r{line}\x1b[K", end="\n" if stop.is_set() else "", file=sys.stderr, flush=True)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, end)
    async with AsyncClient(where.url, where.token, ca_file=where.ca_file) as client:
        simulated = await _simulated(client, shape, **ways)
        left = await simulate(simulated, stop, ready=ready, tell=tell, keep=keep)
    print(f"{counted(simulated.ended, 'allocation')} ended")
    if left:
        print(f"{counted(left, 'node')} left: something still runs there", file=sys.stderr)


def _in_foreground() -> bool:
    """Whether standard error is a terminal, and this process is the one that its user looks at: no job with `&`."""
    import os

    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


async def _simulated(
    client: AsyncClient,
    shape: NodeShape,
    *,
    run_seconds: float | None,
    stop_seconds: float,
    grpc: str,
    insecure: bool,
    rest: bool,
) -> AgentNodes | RestNodes:
    """Nodes that speak as agents do, where the server can hear them."""
    from bursar.sim.fake_executor import FakeBehaviour
    from bursar.sim.rest import RestNodes
    from bursar.sim.stream import AgentNodes, find_address

    address = "" if rest else grpc or await find_address(client)
    if not address:
        return RestNodes(client, shape, default_seconds=run_seconds, stop_seconds=stop_seconds)
    return AgentNodes(client, shape, address, FakeBehaviour(run_seconds, stop_seconds), insecure=insecure)


def _settings(options: dict[str, Any]) -> ServerSettings:
    from bursar.config import (
        CONNECTIONS_MAX,
        CONNECTIONS_PER_ADDRESS_MAX,
        ConfigError,
        ServerSettings,
        oidc_from_environment,
        parse_address,
        requests_per_minute_from_environment,
        waldur_from_environment,
    )

    try:
        return ServerSettings(
            http=parse_address(options["http"], "--http"),
            grpc=parse_address(options["grpc"], "--grpc") if options.get("grpc") else None,
            database_url=options.get("database_url", ""),
            redis_url=options.get("redis_url", ""),
            admin_token_file=options.get("admin_token_file"),
            show_token=options.get("show_token", False),
            workers=options.get("workers", 1),
            restored=options.get("restored", False),
            user=options.get("user", ""),
            requests_per_minute=requests_per_minute_from_environment(),
            tls_cert=options.get("tls_cert"),
            tls_key=options.get("tls_key"),
            oidc=oidc_from_environment(),
            grpc_advertise=(
                parse_address(options["grpc_advertise"], "--grpc-advertise") if options.get("grpc_advertise") else None
            ),
            grpc_hosts=tuple(options.get("grpc_host", ())),
            grpc_insecure=options.get("grpc_insecure", False),
            grpc_shared=options.get("grpc_shared", False),
            metrics=parse_address(options["metrics"], "--metrics") if options.get("metrics") else None,
            grpc_admin=parse_address(options["grpc_admin"], "--grpc-admin") if options.get("grpc_admin") else None,
            waldur=waldur_from_environment(),
            connections=options.get("connections", CONNECTIONS_MAX),
            connections_per_address=options.get("connections_per_address", CONNECTIONS_PER_ADDRESS_MAX),
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def main() -> None:
    cli.add_lazy("serve", "bursar.main:serve", help="Start everything on this machine.")
    cli.add_lazy("api", "bursar.main:api", help="Serve the API alone.")
    cli.add_lazy("controller", "bursar.main:controller", help="Run the loops alone.")
    cli.add_lazy("waldur", "bursar.main:waldur", help="Read budgets from Waldur alone.")
    cli.add_lazy("agent", "bursar.agent.main:agent", help="Run a node's part.")
    cli.add_lazy("sim", "bursar.main:sim", help="Simulate nodes.")
    cli.add_lazy("bench", "bursar.bench.main:bench", help="Measure.")
    cli()


if __name__ == "__main__":
    main()
