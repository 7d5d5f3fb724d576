"""The command `bursar agent`."""

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
    envvar="BURSAR_URL",
    multiple=True,
    metavar="URL",
    help="The API to join at; repeatable, the first that answers is asked.",
)
@click.option("--name", envvar="BURSAR_NODE", help="The node's name; this machine's host name by default.")
@click.option(
    "--token-file",
    envvar="BURSAR_NODE_TOKEN_FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the token of `bursar node token` is; read when the node joins.",
)
@click.option(
    "--data",
    envvar="BURSAR_AGENT_DATA",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the node's key, its journal and the output of its work are kept.",
)
@click.option("--ca-file", envvar="BURSAR_CA_FILE", default="", help="The CA of an https API.")
@click.option(
    "--grpc",
    envvar="BURSAR_AGENT_GRPC",
    multiple=True,
    metavar="HOST:PORT",
    help="Where agents are served, where that is not as the API says; repeatable.",
)
@click.option(
    "--listen",
    envvar="BURSAR_AGENT_LISTEN",
    default="",
    metavar="HOST:PORT",
    help="Where the control plane may call the agent: all addresses and any port, or loopback if the server is there.",
)
@click.option(
    "--advertise",
    envvar="BURSAR_AGENT_ADVERTISE",
    default="",
    metavar="HOST[:PORT]",
    help="What the control plane is told to call, where that is another.",
)
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="A label, when the node first joins; repeatable.")
@click.option(
    "--taint", multiple=True, metavar="KEY[=VALUE]:EFFECT", help="A taint, when the node first joins; repeatable."
)
@click.option("--fake-gpus", type=click.IntRange(0, 1024), help="Pretend to have so many GPUs.")
@click.option(
    "--run-as",
    envvar="BURSAR_AGENT_RUN_AS",
    metavar="USER",
    help="Whom commands run as, where tenants are not isolated: root must say, and may name itself. Where they are,"
    " every tenant has a user of its own.",
)
@click.option(
    "--run-as-groups",
    envvar="BURSAR_AGENT_RUN_AS_GROUPS",
    is_flag=True,
    help="Put isolated commands of all tenants into the groups of --run-as: files of these groups they then share.",
)
@click.option(
    "--run-as-range",
    envvar="BURSAR_AGENT_RUN_AS_RANGE",
    default="70000-73999",
    show_default=True,
    metavar="FIRST-LAST",
    help="The uids that tenants get, one each, given back by a wipe; nobody else may have them.",
)
@click.option(
    "--share",
    envvar="BURSAR_AGENT_SHARE",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A directory that isolated commands may write to, as its permissions allow; repeatable.",
)
@click.option(
    "--pids-max",
    envvar="BURSAR_AGENT_PIDS_MAX",
    type=click.IntRange(min=16),
    default=4096,
    show_default=True,
    help="How many processes and threads one placement may have.",
)
@click.option(
    "--disk-reserve",
    envvar="BURSAR_AGENT_DISK_RESERVE",
    default="",
    metavar="QUANTITY",
    help="How much of the disk is kept free, by ending what fills it; 4Gi, or a twentieth where that is less.",
)
@click.option(
    "--wipe-hook",
    envvar="BURSAR_AGENT_WIPE_HOOK",
    default="",
    metavar="COMMAND",
    help="What wipes this node after sensitive work, run by the shell as the agent's own user; exit 0 is done.",
)
@click.option(
    "--wipe-seconds",
    envvar="BURSAR_AGENT_WIPE_SECONDS",
    type=click.IntRange(min=1),
    default=3600,
    show_default=True,
    help="How long that may take: it has failed then.",
)
@click.option("--insecure", is_flag=True, help="Without certificates, to a server on this machine; needs --grpc.")
@click.option("--drain-on-stop", is_flag=True, help="Stop what runs here when the agent is stopped.")
def agent(**options: Any) -> None:
    """Run this machine's part: start and stop what is placed here, and tell how it goes.

    The first time, it joins with a token. From then on it is known by a certificate that renews itself.
    What runs here goes on when the agent stops, and is taken up again when it starts.

    \b
    bursar node token --name gpu-01 > token          # an administrator
    bursar agent --server https://bursar:8080 --name gpu-01 --token-file token
    """
    from bursar.agent.executor.wipe import Wipe
    from bursar.agent.run import AgentSettings, run

    _check(options)
    _check_user(options["run_as"], groups=options["run_as_groups"])
    settings = AgentSettings(
        name=options["name"] or socket.gethostname().lower(),
        data=options["data"] or default_data_directory(),
        servers=options["server"],
        grpc=options["grpc"],
        token_file=options["token_file"],
        ca_file=options["ca_file"],
        listen=options["listen"],
        advertise=options["advertise"],
        labels=dict(_label(text) for text in options["label"]),
        taints=tuple(_taint(text) for text in options["taint"]),
        fake_gpus=options["fake_gpus"],
        run_as=options["run_as"],
        run_as_groups=options["run_as_groups"],
        users=_users(options["run_as_range"]),
        shared=options["share"],
        pids_max=options["pids_max"],
        disk_reserve_bytes=_bytes("--disk-reserve", options["disk_reserve"]),
        insecure=options["insecure"],
        drain_on_stop=options["drain_on_stop"],
        wipe=Wipe(options["wipe_hook"], options["wipe_seconds"]),
    )
    raise SystemExit(run(settings))


def _check(options: dict[str, Any]) -> None:
    from bursar.core.values.address import is_address, is_loopback, is_loopback_host

    for url in options["server"]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise click.UsageError(f"--server must be an http or https URL, as in https://bursar:8080, got {url!r}")
        if parts.scheme == "http" and not is_loopback_host(parts.hostname or ""):
            raise click.UsageError(
                f"the token would go to {url} in clear, for anybody on the way to join with: name it as https://…,"
                " with --ca-file where it has a CA of its own. http:// is for a server on this machine"
            )
    for name, text in [("--grpc", one) for one in options["grpc"]] + [("--listen", options["listen"])]:
        if text and not is_address(text):
            raise click.UsageError(f"{name} must be HOST:PORT, as in 127.0.0.1:50051, got {text!r}")
    if not options["insecure"]:
        if not options["server"]:
            raise click.UsageError("name the server with --server URL or BURSAR_URL")
        return
    if not options["grpc"]:
        raise click.UsageError("--insecure needs --grpc HOST:PORT, the address of a server's --grpc on this machine")
    if not all(is_loopback(one) for one in (*options["grpc"], options["listen"] or "localhost:0")):
        raise click.UsageError("--insecure is for a server on this machine only: leave it out, and join with a token")


def _check_user(name: str | None, *, groups: bool = False) -> None:
    """What is run as root can read the node's key, and everything else: nobody gets that by leaving something out."""
    from bursar.agent.host.environment import user
    from bursar.agent.host.sandbox import find_sandbox

    if name is None:
        if groups:
            raise click.UsageError("--run-as-groups says to use the groups of --run-as USER: name the user")
        if os.geteuid() == 0 and (why := find_sandbox().why):
            raise click.UsageError(
                f"tenants cannot be isolated from each other: {why}. Without that, say whom all commands run as with"
                " --run-as USER, as in --run-as nobody: the agent is root. If they should be root as well, say"
                " --run-as root"
            )
        return
    try:
        changed = user(name).changed
    except KeyError:
        raise click.UsageError(f"there is no user {name!r} on this machine; name one with --run-as USER") from None
    if changed and os.geteuid() != 0:
        raise click.UsageError(f"only root can run commands as another user: leave --run-as {name} out")


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
