"""The command `bursar agent`: its options, and their validation."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

if TYPE_CHECKING:
    from bursar.agent.host.sandbox import Users

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@click.command()
@click.option(
    "--server",
    "servers",
    envvar="BURSAR_URL",
    multiple=True,
    metavar="URL",
    help="URL of the API to join; repeatable, the first that answers is used.",
)
@click.option("--name", envvar="BURSAR_NODE", help="Node name; default: this machine's host name.")
@click.option(
    "--token-file",
    envvar="BURSAR_NODE_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token of `bursar node token`; read when the node joins.",
)
@click.option(
    "--data",
    envvar="BURSAR_AGENT_DATA",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the node's key, its journal and the output of its work.",
)
@click.option("--ca-file", envvar="BURSAR_CA_FILE", default="", help="CA certificate of an https API.")
@click.option(
    "--grpc",
    envvar="BURSAR_AGENT_GRPC",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC address of the control plane, if it differs from the one the API announces; repeatable.",
)
@click.option(
    "--listen",
    envvar="BURSAR_AGENT_LISTEN",
    default="",
    metavar="HOST:PORT",
    help="Listen address for calls of the control plane; default: any port on all addresses, or on loopback if the"
    " server is there.",
)
@click.option(
    "--advertise",
    envvar="BURSAR_AGENT_ADVERTISE",
    default="",
    metavar="HOST[:PORT]",
    help="Address that the control plane calls, if it differs from --listen.",
)
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label of the node when it first joins; repeatable."
)
@click.option(
    "--taint",
    "taints",
    multiple=True,
    metavar="KEY[=VALUE]:EFFECT",
    help="Taint of the node when it first joins; repeatable.",
)
@click.option("--fake-gpus", type=click.IntRange(0, 1024), help="Report this many simulated GPUs.")
@click.option(
    "--run-as",
    envvar="BURSAR_AGENT_RUN_AS",
    metavar="USER",
    help="User of commands without a sandbox; required if the agent is root, and may be root. In a sandbox every tenant"
    " has its own user.",
)
@click.option(
    "--run-as-groups",
    envvar="BURSAR_AGENT_RUN_AS_GROUPS",
    is_flag=True,
    help="Put sandboxed commands of all tenants into the groups of --run-as: they share the files of these groups.",
)
@click.option(
    "--run-as-range",
    envvar="BURSAR_AGENT_RUN_AS_RANGE",
    default="70000-73999",
    show_default=True,
    metavar="FIRST-LAST",
    help="Range of uids for tenants, one each, freed by a wipe; no other user may have them.",
)
@click.option(
    "--share",
    "shared",
    envvar="BURSAR_AGENT_SHARE",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory that sandboxed commands may write to, as its permissions allow; repeatable.",
)
@click.option(
    "--pids-max",
    envvar="BURSAR_AGENT_PIDS_MAX",
    type=click.IntRange(min=16),
    default=4096,
    show_default=True,
    help="Maximum number of processes and threads of one placement.",
)
@click.option(
    "--disk-reserve",
    envvar="BURSAR_AGENT_DISK_RESERVE",
    default="",
    metavar="QUANTITY",
    help="Free disk space to preserve by stopping placements that fill the disk; default: 4Gi, or 5% if that is less.",
)
@click.option(
    "--wipe-hook",
    envvar="BURSAR_AGENT_WIPE_HOOK",
    default="",
    metavar="COMMAND",
    help="Shell command that wipes this node after sensitive work, run as the agent's own user; exit 0 is success.",
)
@click.option(
    "--wipe-seconds",
    envvar="BURSAR_AGENT_WIPE_SECONDS",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    help="Timeout of the wipe hook.",
)
@click.option("--insecure", is_flag=True, help="Use no certificates, with a server on this machine; needs --grpc.")
@click.option("--drain-on-stop", is_flag=True, help="Stop all placements on this node when the agent stops.")
def agent(**options: Any) -> None:
    """Run the node agent: it starts, supervises and stops the work that is placed on this machine.

    It joins with a token the first time, and then uses a certificate that renews itself. Work keeps running
    while the agent is stopped, and is adopted when the agent starts again.

    \b
    bursar node token --name gpu-01 > token          # an administrator
    bursar agent --server https://bursar:8080 --name gpu-01 --token-file token
    """
    import bursar.logs  # noqa: F401 - before whatever imports structlog
    from bursar.agent.executor.wipe import Wipe
    from bursar.agent.run import AgentSettings, run

    _check(options)
    _check_user(options["run_as"], groups=options["run_as_groups"])
    settings = AgentSettings(
        name=options.pop("name") or socket.gethostname().lower(),
        data=options.pop("data") or default_data_directory(),
        labels=dict(map(_label, options.pop("labels"))),
        taints=tuple(map(_taint, options.pop("taints"))),
        users=_users(options.pop("run_as_range")),
        disk_reserve_bytes=_bytes("--disk-reserve", options.pop("disk_reserve")),
        wipe=Wipe(options.pop("wipe_hook"), options.pop("wipe_seconds")),
        **options,
    )
    raise SystemExit(run(settings))


def _check(options: dict[str, Any]) -> None:
    from bursar.core.values.address import is_address, is_loopback, is_loopback_host

    for url in options["servers"]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise click.UsageError(f"--server must be an http or https URL, as in https://bursar:8080, got {url!r}")
        if parts.scheme == "http" and not is_loopback_host(parts.hostname or ""):
            raise click.UsageError(
                f"the token would go to {url} unencrypted: use https://…, with --ca-file for a private CA."
                " http:// is for a server on this machine"
            )
    for name, text in [("--grpc", one) for one in options["grpc"]] + [("--listen", options["listen"])]:
        if text and not is_address(text):
            raise click.UsageError(f"{name} must be HOST:PORT, as in 127.0.0.1:50051, got {text!r}")
    if not options["insecure"]:
        if not options["servers"]:
            raise click.UsageError("give the server with --server URL or BURSAR_URL")
        return
    if not options["grpc"]:
        raise click.UsageError("--insecure needs --grpc HOST:PORT, the address of a server's --grpc on this machine")
    if not all(is_loopback(one) for one in (*options["grpc"], options["listen"] or "localhost:0")):
        raise click.UsageError("--insecure is for a server on this machine only: omit it, and join with a token")


def _check_user(name: str | None, *, groups: bool = False) -> None:
    """Running commands as root must be explicit: they could read the node's key and every file."""
    from bursar.agent.host.environment import user
    from bursar.agent.host.sandbox import find_sandbox

    if name is None:
        if groups:
            raise click.UsageError("--run-as-groups needs --run-as USER, whose groups it uses")
        if os.geteuid() == 0 and (why := find_sandbox().why):
            raise click.UsageError(
                f"tenants cannot be isolated from each other: {why}. The agent is root, so without isolation"
                " --run-as USER must name the user of all commands, as in --run-as nobody (or --run-as root)"
            )
        return
    try:
        changed = user(name).changed
    except KeyError:
        raise click.UsageError(f"this machine has no user {name!r}; give one with --run-as USER") from None
    if changed and os.geteuid() != 0:
        raise click.UsageError(f"only root can run commands as another user: omit --run-as {name}")


def _users(text: str) -> Users:
    from bursar.agent.host.sandbox import Users

    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last) < 2**31):
        raise click.UsageError(f"--run-as-range must be FIRST-LAST, as in 70000-73999, got {text!r}")
    return Users(int(first), int(last))


def _bytes(option: str, text: str) -> int | None:
    from bursar.core.values.quantity import QuantityError, amount

    try:
        return amount("ephemeral-storage", text) if text else None
    except QuantityError as error:
        raise click.UsageError(f"{option}: {error}") from None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"--label must be KEY=VALUE, got {text!r}")
    return key, value


def _taint(text: str) -> dict[str, str]:
    what, _, effect = text.rpartition(":")
    key, _, value = what.partition("=")
    if not key or effect not in EFFECTS:
        raise click.UsageError(f"--taint must be KEY[=VALUE]:EFFECT with one of {', '.join(EFFECTS)}, got {text!r}")
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


def default_data_directory() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/bursar-agent")
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "bursar-agent"
