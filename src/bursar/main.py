"""The entry point of the command line: client and server commands, each imported when it is called.

`serve` starts everything on one machine. On several machines `api`, `controller` and `waldur` run separately.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.main import cli
from bursar.cli.shell.connection import Connection, connected
from bursar.cli.shell.finite_range import FiniteRange
from bursar.core.values.wording import counted

if TYPE_CHECKING:
    from bursar.client import AsyncClient
    from bursar.config import ServerSettings
    from bursar.sim.rest import RestNodes
    from bursar.sim.shape import NodeShape
    from bursar.sim.stream import AgentNodes

DATABASE = click.option(
    "--database-url",
    envvar="BURSAR_DATABASE_URL",
    default="",
    help="URL of the PostgreSQL database; default: embedded.",
)
REDIS = click.option(
    "--redis-url", envvar="BURSAR_REDIS_URL", default="", help="Redis for rate limits shared by several API processes."
)
HTTP = click.option(
    "--http", default="127.0.0.1:8080", show_default=True, help="HOST:PORT to serve HTTP on; port 0 picks one."
)
GRPC = click.option("--grpc", default="", help="HOST:PORT to serve gRPC on.")
GRPC_ADVERTISE = click.option(
    "--grpc-advertise", default="", help="HOST:PORT that agents connect to, if it differs from --grpc."
)
GRPC_HOST = click.option(
    "--grpc-host", multiple=True, metavar="HOST", help="Additional host of the gRPC server certificate; repeatable."
)
GRPC_INSECURE = click.option(
    "--grpc-insecure", is_flag=True, help="Serve gRPC without certificates, on loopback only; node names are trusted."
)
GRPC_ADMIN = click.option(
    "--grpc-admin", default="", help="HOST:PORT to serve AdminService on: gRPC for administrators, by token."
)
METRICS = click.option("--metrics", default="", help="HOST:PORT to serve /metrics without a token, and nothing else.")
USER = click.option(
    "--user",
    envvar="BURSAR_USER",
    default="",
    help="If root starts it, run it as this user; default: bursar.",
)
CERT = click.option(
    "--tls-cert", type=click.Path(path_type=Path, exists=True), help="Serve HTTPS with this certificate."
)
KEY = click.option("--tls-key", type=click.Path(path_type=Path, exists=True), help="The certificate's key.")


CONNECTIONS = click.option(
    "--connections", default=20_000, show_default=True, type=click.IntRange(16), metavar="N",
    help="Maximum number of open HTTP connections per API process.",
)  # fmt: skip
PER_ADDRESS = click.option(
    "--connections-per-address", default=512, show_default=True, type=click.IntRange(1), metavar="N",
    help="Maximum number of these per address without a valid token.",
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
@click.option(
    "--restored", is_flag=True, help="The database was restored from a backup; give it once, at the first start."
)
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Number of API processes.")
@click.option("--no-quota-service", is_flag=True, help="Do not decide requests at the gate quota.")
@USER
@click.option("--tls", type=click.Choice(["auto"]), help="auto: serve HTTPS with a certificate of Bursar's own CA.")
@CERT
@KEY
@CONNECTIONS
@PER_ADDRESS
def serve(**options: Any) -> None:
    """Start everything on this machine: the API, the controller, the quota service and, without --database-url,
    PostgreSQL."""
    import bursar.logs
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
@USER
@click.option("--fd", type=int, default=None, hidden=True, help="A listening socket, inherited.")
@click.option("--metrics-fd", type=int, default=None, hidden=True, help="A listening socket for /metrics, inherited.")
@click.option("--grpc-shared", is_flag=True, hidden=True, help="Others serve gRPC at the same address.")
def api(fd: int | None, metrics_fd: int | None, **options: Any) -> None:
    """Serve the API on a shared database."""
    import bursar.logs
    import bursar.serve

    raise SystemExit(bursar.serve.run_api(_settings(options), fd, metrics_fd))


@click.command()
@DATABASE
@USER
def controller(**options: Any) -> None:
    """Run the controller on a shared database: scheduling, jobs, node liveness, housekeeping."""
    import bursar.logs
    import bursar.serve

    raise SystemExit(bursar.serve.run_controller(_settings({"http": "127.0.0.1:0", **options})))


@click.command()
@DATABASE
@USER
def waldur(**options: Any) -> None:
    """Read the remaining budgets of tenants from Waldur into a shared database.

    Configured by BURSAR_WALDUR_URL, BURSAR_WALDUR_TOKEN_FILE and BURSAR_WALDUR_OFFERINGS. `bursar serve` starts it if
    they are set.
    """
    import bursar.logs
    import bursar.serve

    raise SystemExit(bursar.serve.run_waldur(_settings({"http": "127.0.0.1:0", **options})))


@click.group()
def sim() -> None:
    """Simulate nodes."""


@sim.command()
@click.option("--count", required=True, type=click.IntRange(1, 9999), help="Number of nodes.")
@click.option("--gpus", default=8, show_default=True, type=click.IntRange(0, 1024), help="GPUs per node.")
@click.option("--cpu", default=96, show_default=True, type=click.IntRange(1), help="CPUs per node.")
@click.option("--memory", default="768Gi", show_default=True, help="Memory per node.")
@click.option("--prefix", default="sim", show_default=True, help="Prefix of node names.")
@click.option("--zones", default=2, show_default=True, type=click.IntRange(1), help="Number of zones.")
@click.option("--racks", default=8, show_default=True, type=click.IntRange(1), help="Number of racks.")
@click.option("--run-seconds", type=FiniteRange(0), help="Default run time of an allocation.")
@click.option("--stop-seconds", default=0.0, type=FiniteRange(0), help="Time that a stopped allocation takes to end.")
@click.option("--keep", is_flag=True, help="Keep the nodes registered at the end.")
@click.option("--grpc", default="", help="gRPC address for agents, if it differs from the one the server announces.")
@click.option("--insecure", is_flag=True, help="Use gRPC without certificates, on loopback.")
@click.option("--rest", is_flag=True, help="Use REST, as nodes without an agent do.")
@connected
def nodes(connection: Connection, keep: bool, **options: Any) -> None:
    """Register simulated nodes, which pretend to run the work placed on them, until interrupted.

    Needs an administrator's token. The nodes use gRPC, as agents do, if the server offers it; else REST.
    Annotations of an allocation set its run time (bursar.io/sim-seconds) and its exit code (bursar.io/sim-exit).

    \b
    bursar sim nodes --count 8 --gpus 8 --run-seconds 60
    """
    import asyncio

    from bursar.sim.shape import NodeShape

    if options["rest"] and (options["grpc"] or options["insecure"]):
        raise click.UsageError("--rest cannot be combined with --grpc or --insecure")
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
        # A second signal ends the process without waiting for the removal of the nodes.
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)

    def ready() -> None:
        print(
            f"{counted(shape.count, 'simulated node')} {'is' if shape.count == 1 else 'are'} ready; Ctrl-C ends them",
            flush=True,
        )

    def progress() -> None:
        if _in_foreground():
            line = f"{counted(simulated.running, 'allocation')} running, {simulated.ended} ended"
            print(f"\r{line}\x1b[K", end="\n" if stop.is_set() else "", file=sys.stderr, flush=True)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, end)
    async with AsyncClient(where.url, where.token, ca_file=where.ca_file) as client:
        simulated = await _simulated(client, shape, **ways)
        left = await simulate(simulated, stop, ready=ready, progress=progress, keep=keep)
    print(f"{counted(simulated.ended, 'allocation')} ended")
    if left:
        print(f"{counted(left, 'node')} kept: work is still placed there", file=sys.stderr)


def _in_foreground() -> bool:
    """Whether standard error is a terminal and this process is in its foreground process group, not a `&` job."""
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
    """Simulated nodes over gRPC if the server serves it, else over REST."""
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
        service_requests_per_minute_from_environment,
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
            quota_service=not options.get("no_quota_service", True),
            restored=options.get("restored", False),
            user=options.get("user", ""),
            requests_per_minute=requests_per_minute_from_environment(),
            service_requests_per_minute=service_requests_per_minute_from_environment(),
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
    # Objects created at start-up stay: garbage collection would take a tenth of the time and find nothing.
    gc.set_threshold(50_000, 20, 50)
    cli.add_lazy("serve", "bursar.main:serve", help="Start everything on this machine.")
    cli.add_lazy("api", "bursar.main:api", help="Serve only the API.")
    cli.add_lazy("controller", "bursar.main:controller", help="Run only the controller.")
    cli.add_lazy("waldur", "bursar.main:waldur", help="Read budgets from Waldur.")
    cli.add_lazy("quota-service", "bursar.quota_service.main:quota_service", help="Decide requests by quota.")
    cli.add_lazy("agent", "bursar.agent.main:agent", help="Run the node agent.")
    cli.add_lazy("sim", "bursar.main:sim", help="Simulate nodes.")
    cli.add_lazy("bench", "bursar.bench.main:bench", help="Run benchmarks.")
    cli()


if __name__ == "__main__":
    main()
