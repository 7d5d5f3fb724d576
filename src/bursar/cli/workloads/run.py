"""`bursar run`: a command on the cluster, as if it ran here.

It is submitted as an allocation and seen through: why it waits, what it writes, how it ends. Whoever interrupts it
releases it, and the exit code is the command's own.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.shell import completers
from bursar.cli.shell.connection import Connection, connected, namespace_option
from bursar.cli.shell.interrupt import Interrupted, InterruptTrap
from bursar.cli.shell.problem import FAILED, Problem
from bursar.cli.workloads.log_follow import Copying, Sink
from bursar.cli.workloads.run_output import ENDED, JsonOutput, QuietOutput, RunOutput, TerminalOutput

if TYPE_CHECKING:
    from bursar.client import Resource

Document = Mapping[str, Any]

GPU = "nvidia.com/gpu"
SIMULATED = "bursar.io/simulated"  # the label and the taint of a node that only acts as if it ran something
PLACED = frozenset({"Running", "Terminating", *ENDED})
# How often somebody who watches is told its place in line.
LOOK_SECONDS = 3.0
# When it has ended, what it wrote last is waited for, unless nothing comes for so long.
REST_SECONDS_MAX = 15.0
NAME_CHARS_MAX = 40
MEMORY_BYTES_MIN = 2**20  # less is a unit that was forgotten
STDIN_BYTES_MAX = 1 << 20  # as the server has it
SILENT_SECONDS = 5.0


def _variable(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"must be NAME=VALUE, got {text!r}")
        variables[name] = value
    return variables


def _memory(_: click.Context, __: click.Parameter, given: str) -> str:
    """A size that somebody means: `--mem 20` would be 20 bytes."""
    from bursar.core.values.quantity import QuantityError, amount

    if not given:
        return given
    try:
        size = amount("memory", given)
    except QuantityError:
        raise click.BadParameter(f"{given[:40]} is not a size; use {_sizes_like(given)}") from None
    if size < MEMORY_BYTES_MIN:
        unit = f"; did you mean {given}Gi?" if given.isdigit() else ""
        raise click.BadParameter(f"{given} is {size} bytes, too little for any command{unit}")
    return given


def _sizes_like(given: str) -> str:
    """Suggest sizes that are valid: 20G or 20Gi for 20GB."""
    meant = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([kKMGTP])i?[bB]?", given)
    if meant is None:
        return "a number with a unit, such as 500Mi or 20Gi"
    number, unit = meant[1], meant[2].upper()
    return f"{number}{unit.lower() if unit == 'K' else unit} or {number}{unit}i"


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--gpus", type=click.FloatRange(0), metavar="N", help="GPUs on each node; a fraction is part of one.")
@click.option("--cpus", default="1", show_default=True, metavar="N", help="CPUs on each node, such as 4 or 500m.")
@click.option(
    "--mem",
    default="",
    callback=_memory,
    metavar="SIZE",
    help="Memory on each node, such as 16Gi: what it gets, and no more.",
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="On how many nodes; the command runs on each.")
@click.option("--name", default="", help="The allocation's name; else one is made up.")
@click.option("--env", multiple=True, callback=_variable, metavar="NAME=VALUE", help="A variable; repeatable.")
@click.option("--workdir", default="", metavar="DIR", help="The command's directory on the node.")
@click.option(
    "--priority-class",
    default="",
    metavar="NAME",
    help="Its priority.",
    shell_complete=completers.named("priorityclasses"),
)
@click.option("--queue", default="", metavar="NAME", help="Where it waits.", shell_complete=completers.named("queues"))
@click.option("--ttl", default="", metavar="TIME", help="The longest it may run, such as 90m or 2h.")
@click.option("--sensitive", is_flag=True, help="On nodes that you have claimed, and on no others.")
@click.option("--simulated", is_flag=True, help="Also on simulated nodes, which act as if they ran it.")
@click.option(
    "--stdin/--no-stdin",
    default=None,
    help="Give the command the standard input. It gets that of a pipe or a file.",
)
@click.option("--detach", is_flag=True, help="Submit it, print its name, and leave it alone.")
@click.option("--keep", is_flag=True, help="Let it go on when this command is interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print what happens as JSON, one line for each event.")
@namespace_option
@connected
def run(
    connection: Connection,
    command: Sequence[str],
    name: str,
    stdin: bool | None,
    detach: bool,
    keep: bool,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Run a command on the cluster, and see it through.

    It waits for its turn, prints what the command writes, and ends with the command's exit code.
    Ctrl-C releases it; a second one leaves at once.

    \b
    bursar run --gpus 1 -- python train.py --epochs 3
    bursar run --nodes 2 --gpus 8 --mem 64Gi --env NCCL_DEBUG=INFO -- ./train.sh
    bursar run --detach --name nightly -- make report
    echo 'print(6*7)' | bursar run -- python3 -
    """
    given = standard_input(stdin)
    namespace = connection.effective_namespace
    allocations = connection.client.allocations(namespace)
    name = name or _made_up(command[0])
    with InterruptTrap() as trap:
        try:
            spec = {**spec_of(command, **wishes), **({"stdin": True} if given else {})}
            document = _submitted(allocations, name, spec)
            if given:
                _send(allocations, name, given)
        except Interrupted as interrupted:
            raise Problem(f"{name} may or may not have been submitted", exit_code=128 + interrupted.number) from None
        teller = _teller(as_json)
        teller.submitted(document)
        if not detach:
            nodes, simulated = connection.client.nodes, bool(wishes["simulated"])
            seen = RunProgress(allocations, nodes, document, teller, trap, keep=keep, simulated=simulated)
            raise click.exceptions.Exit(seen.through())
    if not as_json:
        click.echo(f"allocation/{name}")


def _submitted(allocations: Resource, name: str, spec: Mapping[str, Any]) -> Document:
    from bursar.cli.workloads.run_flags import told_in_flags
    from bursar.client.errors import ApiError

    try:
        return allocations.create({"metadata": {"name": name}, "spec": spec})
    except ApiError as error:
        raise told_in_flags(error) from error


def spec_of(
    command: Sequence[str],
    *,
    gpus: float | None,
    cpus: str,
    mem: str,
    nodes: int | None,
    env: Mapping[str, str],
    workdir: str,
    priority_class: str,
    queue: str,
    ttl: str,
    sensitive: bool = False,
    simulated: bool = False,
) -> dict[str, Any]:
    requests = {"cpu": cpus, "memory": mem, GPU: f"{gpus:g}" if gpus else ""}
    wishes = {
        "resources": {
            "requests": {resource: amount for resource, amount in requests.items() if amount},
            # Who asks for so much means it as a limit, too: more would be taken from the neighbours.
            **({"limits": {"memory": mem}} if mem else {}),
        },
        "nodes": nodes,
        "command": list(command),
        "env": [{"name": one, "value": value} for one, value in env.items()],
        "workingDir": workdir,
        "priorityClass": priority_class,
        "queue": queue,
        "ttl": ttl,
        "sensitive": sensitive,
        "scheduling": {"tolerations": [{"key": SIMULATED, "operator": "Exists"}]} if simulated else None,
    }
    return {field: value for field, value in wishes.items() if value}


def standard_input(wanted: bool | None) -> bytes:
    """What the command reads: all of a pipe or a file, unless nobody wants that; of a terminal, if somebody does."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return b""
    if wanted is False or (wanted is None and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode))):
        return b""
    if not select.select([0], [], [], SILENT_SECONDS)[0]:
        click.echo("bursar: waiting for standard input; --no-stdin leaves it alone", err=True)
    with open(0, "rb", closefd=False) as source:
        data = source.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        raise Problem(
            f"standard input has more than {STDIN_BYTES_MAX} bytes",
            "put it into a file that the node can read, or leave it alone: --no-stdin",
        )
    return data


def _send(allocations: Resource, name: str, data: bytes) -> None:
    """What cannot be sent is not waited for on a node. That it was sent before was an answer that got lost."""
    from bursar.client import BursarError, Conflict

    try:
        allocations.send_stdin(name, data)
    except Conflict:
        return
    except BursarError:
        allocations.delete(name)
        raise


def _made_up(program: str) -> str:
    """After the program, and unlike any other's."""
    from secrets import token_hex

    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(program).stem.lower()).strip("-")[:NAME_CHARS_MAX].strip("-")
    return f"{stem or 'run'}-{token_hex(4)}"


def _teller(as_json: bool) -> RunOutput:
    if as_json:
        return JsonOutput()
    return TerminalOutput() if sys.stderr.isatty() else QuietOutput()


class RunProgress:
    """One allocation, from when it was submitted to its end."""

    def __init__(
        self,
        allocations: Resource,
        nodes: Resource,
        document: Document,
        teller: RunOutput,
        trap: InterruptTrap,
        *,
        keep: bool,
        simulated: bool,
    ) -> None:
        self._allocations = allocations
        self._simulated = simulated  # simulated nodes were asked for
        self._pretended: list[str] = []  # those that it was on
        self._name = str(document["metadata"]["name"])
        self._uid = str(document["metadata"].get("uid") or "")
        self._last = document
        self._nodes = nodes
        self._teller = teller
        self._trap = trap
        self._keep = keep
        count = int((document.get("spec") or {}).get("nodes") or 1)
        sink: Sink = teller.sink(named=count > 1)
        self._copying = Copying(allocations, self._name, sink)
        self._epoch = 0  # of which the log is being copied

    def through(self) -> int:
        """See it through; the exit code."""
        try:
            self._trap.release()
            self._until_ended()
            self._rest()
        except Interrupted as interrupted:
            return self._leave(interrupted.number)
        return self._verdict()

    # Waiting for it.

    def _until_ended(self) -> None:
        """What stands is looked at, then every change; while it waits, now and then also its place in line."""
        from bursar.client import NotFound

        self._look(self._last)
        while not self._ended:
            if self._watched(LOOK_SECONDS if self._in_line else None):
                continue
            try:
                self._look(self._allocations.get(self._name))
            except NotFound:
                self._look(_gone(self._last, {}))

    def _watched(self, seconds: float | None) -> bool:
        """Look at changes until it must be watched in another way, or the time is up, which is False."""
        in_line = self._in_line
        events = self._allocations.watch(
            field_selector=f"metadata.name={self._name}",
            resource_version=str(self._last["metadata"]["resourceVersion"]),
            timeout_seconds=seconds,
        )
        with closing(events):
            for event in events:
                is_ours = event.object["metadata"].get("uid") in ("", None, self._uid)
                if event.type == "DELETED" or not is_ours:
                    self._look(_gone(self._last, event.object if is_ours else {}))
                else:
                    self._look(event.object)
                if self._ended or self._in_line != in_line:
                    return True
        return False

    @property
    def _in_line(self) -> bool:
        """Whether somebody wants to know its place in line."""
        return self._teller.wants_places and self._phase == "Pending"

    @property
    def _status(self) -> Document:
        return self._last.get("status") or {}

    @property
    def _phase(self) -> str:
        return str(self._status.get("phase") or "Pending")

    @property
    def _ended(self) -> bool:
        return self._phase in ENDED

    def _look(self, document: Document) -> None:
        self._last = document
        status, epoch = self._status, int(self._status.get("epoch") or 0)
        nodes = [str(one["name"]) for one in status.get("nodes") or []]
        self._teller.stands(self._name, status)
        if self._phase in PLACED and nodes and epoch > self._epoch:
            self._epoch = epoch
            if self._simulated:
                # Asked for, and so expected: a simulated node has no log that could be waited for.
                self._pretended = [one for one in nodes if self._is_simulated(one)]
            self._copying.begin([one for one in nodes if one not in self._pretended], epoch)

    def _rest(self) -> None:
        """What it wrote last; if that cannot be had, that is said."""
        whole = self._copying.wait(idle_seconds_max=REST_SECONDS_MAX)
        self._teller.finish()
        for copy in self._copying.copies:
            if copy.error is not None and self._is_simulated(copy.node):
                self._pretended.append(copy.node)
            elif copy.error is not None:
                self._teller.warn(f"the log on {copy.node} could not be read: {copy.error.message}")
        for node in self._pretended:
            self._teller.warn(f"{node} is simulated: nothing was really run")
        for gap in self._copying.gaps():
            self._teller.warn(gap)
        if not whole:
            self._teller.warn(f"not all of the log came in time; `bursar logs {self._name}` may have the rest")

    def _is_simulated(self, node: str) -> bool:
        from bursar.client import BursarError

        try:
            labels = self._nodes.get(node)["metadata"].get("labels") or {}
        except BursarError:
            return False
        return labels.get(SIMULATED) == "true"

    # Its end.

    def _leave(self, number: int) -> int:
        """We were told to stop: so is the work, unless it is to be kept. A second time ends the wait for it."""
        code = 128 + number
        try:
            if self._ended:
                return code  # Only its last words were still to come.
            if self._keep:
                self._teller.warn(f"{self._name} goes on; `bursar logs -f {self._name}` shows what it writes")
                return code
            self._teller.warn(f"releasing {self._name}; interrupt again to leave at once")
            self._release()
            self._until_ended()
            self._rest()
        except Interrupted:
            self._teller.warn(f"{self._name} goes on ending by itself")
            return code
        self._teller.ended(self._name, self._status, code)
        return code

    def _release(self) -> None:
        from bursar.client import BursarError, NotFound

        with suppress(NotFound):
            try:
                self._allocations.delete(self._name)
            except NotFound:
                raise
            except BursarError as error:
                hint = f"it may go on: bursar delete allocation {self._name}"
                raise Problem(f"{self._name} could not be released: {error.message}", hint) from error

    def _verdict(self) -> int:
        status = self._status
        code = status.get("exitCode")
        code = int(code or 0) if self._phase == "Succeeded" else int(code or FAILED)
        if self._pretended and not self._simulated:
            code = code or FAILED  # somebody expects that it was run
        self._teller.ended(self._name, status, code)
        return code


def _gone(before: Document, last: Document) -> Document:
    """As it was when it was deleted; where that is not told, as it was before."""
    status = dict(last.get("status") or before.get("status") or {})
    if status.get("phase") not in ENDED:
        status |= {"phase": "Cancelled", "message": status.get("message") or "it was deleted"}
    return {**before, "status": status}
