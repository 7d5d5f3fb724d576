"""`bursar run`: runs a command on the cluster as if it ran here.

The command becomes an allocation. `run` prints why it is pending, its output and how it ended, and exits with its exit
code. Ctrl-C releases the allocation.
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
from bursar.cli.shell.finite_range import FiniteRange
from bursar.cli.shell.interrupt import Interrupted, InterruptTrap
from bursar.cli.shell.problem import FAILED, Problem
from bursar.cli.workloads.log_follow import Copying, Sink
from bursar.cli.workloads.run_output import ENDED, JsonOutput, QuietOutput, RunOutput, TerminalOutput

if TYPE_CHECKING:
    from bursar.client import Resource

Document = Mapping[str, Any]

GPU = "nvidia.com/gpu"
SIMULATED = "bursar.io/simulated"  # label and taint of simulated nodes
PLACED = frozenset({"Running", "Terminating", *ENDED})
QUEUE_POLL_SECONDS = 3.0  # how often a pending allocation's queue position is read
LOG_IDLE_SECONDS_MAX = 15.0  # after its end the rest of its log is awaited while it grows this often
NAME_CHARS_MAX = 40
MEMORY_BYTES_MIN = 2**20  # below that the unit was forgotten
STDIN_BYTES_MAX = 1 << 20  # the server's limit
STDIN_NOTICE_SECONDS = 5.0


def _variable(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"must be NAME=VALUE, got {text!r}")
        variables[name] = value
    return variables


def _memory(_: click.Context, __: click.Parameter, given: str) -> str:
    """Check --mem: refuse bad sizes, and sizes too small to be meant, such as `--mem 20` for 20 bytes."""
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
@click.option("--gpus", type=FiniteRange(0), metavar="N", help="GPUs on each node; a fraction shares one.")
@click.option("--cpus", default="1", show_default=True, metavar="N", help="CPUs on each node, such as 4 or 500m.")
@click.option(
    "--mem",
    default="",
    callback=_memory,
    metavar="SIZE",
    help="Memory and its limit on each node, such as 16Gi.",
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Number of nodes; the command runs on each.")
@click.option("--name", default="", help="The allocation's name; else one is generated.")
@click.option("--env", multiple=True, callback=_variable, metavar="NAME=VALUE", help="A variable; repeatable.")
@click.option("--workdir", default="", metavar="DIR", help="The working directory on the node.")
@click.option(
    "--priority-class",
    default="",
    metavar="NAME",
    help="The priority class.",
    shell_complete=completers.named("priorityclasses"),
)
@click.option("--queue", default="", metavar="NAME", help="The queue.", shell_complete=completers.named("queues"))
@click.option("--ttl", default="", metavar="TIME", help="The longest it may run, such as 90m or 2h.")
@click.option("--sensitive", is_flag=True, help="Run only on nodes that you have claimed.")
@click.option("--simulated", is_flag=True, help="Allow simulated nodes, which run nothing.")
@click.option("--stdin/--no-stdin", default=None, help="Send standard input; default for a pipe or file.")
@click.option("--detach", is_flag=True, help="Submit, print the allocation's name and exit.")
@click.option("--keep", is_flag=True, help="Do not release the allocation on Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print events as JSON, one per line.")
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
    """Run a command on the cluster and print its output.

    The exit code is the command's own.
    Ctrl-C releases the allocation; a second Ctrl-C exits at once.

    \b
    bursar run --gpus 1 -- python train.py --epochs 3
    bursar run --nodes 2 --gpus 8 --mem 64Gi --env NCCL_DEBUG=INFO -- ./train.sh
    bursar run --detach --name nightly -- make report
    echo 'print(6*7)' | bursar run -- python3 -
    """
    given = standard_input(stdin)
    namespace = connection.effective_namespace
    allocations = connection.client.allocations(namespace)
    name = name or _generated_name(command[0])
    with InterruptTrap() as trap:
        try:
            spec = {**spec_of(command, **wishes), **({"stdin": True} if given else {})}
            document = _submitted(allocations, name, spec)
            if given:
                _send(allocations, name, given)
        except Interrupted as interrupted:
            raise Problem(f"{name} may or may not have been submitted", exit_code=128 + interrupted.number) from None
        output = _output_for(as_json)
        output.submitted(document)
        if not detach:
            nodes, simulated = connection.client.nodes, bool(wishes["simulated"])
            seen = RunProgress(allocations, nodes, document, output, trap, keep=keep, simulated=simulated)
            raise click.exceptions.Exit(seen.through())
    if not as_json:
        click.echo(f"allocation/{name}")


def _submitted(allocations: Resource, name: str, spec: Mapping[str, Any]) -> Document:
    from bursar.cli.workloads.run_flags import with_flags
    from bursar.client.errors import ApiError

    try:
        return allocations.create({"metadata": {"name": name}, "spec": spec})
    except ApiError as error:
        raise with_flags(error) from error


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
            # The size is also the limit, so that work cannot take memory from its neighbours.
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
    """The standard input to send: by default that of a pipe or a file, with --stdin also a terminal's."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return b""
    if wanted is False or (wanted is None and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode))):
        return b""
    if not select.select([0], [], [], STDIN_NOTICE_SECONDS)[0]:
        click.echo("bursar: waiting for standard input; --no-stdin ignores it", err=True)
    with open(0, "rb", closefd=False) as source:
        data = source.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        raise Problem(
            f"standard input has more than {STDIN_BYTES_MAX} bytes",
            "put it into a file that the node can read, or ignore it with --no-stdin",
        )
    return data


def _send(allocations: Resource, name: str, data: bytes) -> None:
    """Send the standard input, and delete the allocation if that fails. A conflict means that a retry had sent it."""
    from bursar.client import BursarError, Conflict

    try:
        allocations.send_stdin(name, data)
    except Conflict:
        return
    except BursarError:
        allocations.delete(name)
        raise


def _generated_name(program: str) -> str:
    """A unique name that begins with the program's."""
    from secrets import token_hex

    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(program).stem.lower()).strip("-")[:NAME_CHARS_MAX].strip("-")
    return f"{stem or 'run'}-{token_hex(4)}"


def _output_for(as_json: bool) -> RunOutput:
    if as_json:
        return JsonOutput()
    return TerminalOutput() if sys.stderr.isatty() else QuietOutput()


class RunProgress:
    """One allocation from its submission to its end."""

    def __init__(
        self,
        allocations: Resource,
        nodes: Resource,
        document: Document,
        output: RunOutput,
        trap: InterruptTrap,
        *,
        keep: bool,
        simulated: bool,
    ) -> None:
        self._allocations = allocations
        self._simulated = simulated  # simulated nodes were allowed
        self._simulated_nodes: list[str] = []  # the simulated nodes that it was placed on
        self._name = str(document["metadata"]["name"])
        self._uid = str(document["metadata"].get("uid") or "")
        self._last = document
        self._nodes = nodes
        self._output = output
        self._trap = trap
        self._keep = keep
        count = int((document.get("spec") or {}).get("nodes") or 1)
        sink: Sink = output.sink(named=count > 1)
        self._copying = Copying(allocations, self._name, sink)
        self._epoch = 0  # of the placement whose log is copied

    def through(self) -> int:
        """Follow the allocation to its end, and return the exit code."""
        try:
            self._trap.release()
            self._until_ended()
            self._rest()
        except Interrupted as interrupted:
            return self._leave(interrupted.number)
        return self._verdict()

    # Following it.

    def _until_ended(self) -> None:
        """Show the current state, then every change; read the queue position from time to time while it is pending."""
        from bursar.client import NotFound

        self._look(self._last)
        while not self._ended:
            if self._watched(QUEUE_POLL_SECONDS if self._awaits_queue_position else None):
                continue
            try:
                self._look(self._allocations.get(self._name))
            except NotFound:
                self._look(_gone(self._last, {}))

    def _watched(self, seconds: float | None) -> bool:
        """Show changes until the end or until the queue position matters (not) any more; False after a timeout."""
        awaited = self._awaits_queue_position
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
                if self._ended or self._awaits_queue_position != awaited:
                    return True
        return False

    @property
    def _awaits_queue_position(self) -> bool:
        """Whether the queue position is to be shown."""
        return self._output.wants_queue_position and self._phase == "Pending"

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
        self._output.update(self._name, status)
        if self._phase in PLACED and nodes and epoch > self._epoch:
            self._epoch = epoch
            if self._simulated:
                # A simulated node has no log to wait for.
                self._simulated_nodes = [one for one in nodes if self._is_simulated(one)]
            self._copying.begin([one for one in nodes if one not in self._simulated_nodes], epoch)

    def _rest(self) -> None:
        """Print the rest of the log, with warnings about parts that could not be read."""
        whole = self._copying.wait(idle_seconds_max=LOG_IDLE_SECONDS_MAX)
        self._output.finish()
        for copy in self._copying.copies:
            if copy.error is not None and self._is_simulated(copy.node):
                self._simulated_nodes.append(copy.node)
            elif copy.error is not None:
                self._output.warn(f"the log on {copy.node} could not be read: {copy.error.message}")
        for node in self._simulated_nodes:
            self._output.warn(f"{node} is simulated: nothing was really run")
        for gap in self._copying.gaps():
            self._output.warn(gap)
        if not whole:
            self._output.warn(f"the log is incomplete; `bursar logs {self._name}` may have the rest")

    def _is_simulated(self, node: str) -> bool:
        from bursar.client import BursarError

        try:
            labels = self._nodes.get(node)["metadata"].get("labels") or {}
        except BursarError:
            return False
        return labels.get(SIMULATED) == "true"

    # Its end.

    def _leave(self, number: int) -> int:
        """After a signal: release the allocation unless --keep is given, and wait for its end. A second one exits."""
        code = 128 + number
        try:
            if self._ended:
                return code  # Only the end of its log was missing.
            if self._keep:
                self._output.warn(f"{self._name} continues; `bursar logs -f {self._name}` prints its output")
                return code
            self._output.warn(f"releasing {self._name}; interrupt again to exit at once")
            self._release()
            self._until_ended()
            self._rest()
        except Interrupted:
            self._output.warn(f"{self._name} is still stopping")
            return code
        self._output.ended(self._name, self._status, code)
        return code

    def _release(self) -> None:
        from bursar.client import BursarError, NotFound

        with suppress(NotFound):
            try:
                self._allocations.delete(self._name)
            except NotFound:
                raise
            except BursarError as error:
                hint = f"it may still run: bursar delete allocation {self._name}"
                raise Problem(f"{self._name} could not be released: {error.message}", hint) from error

    def _verdict(self) -> int:
        status = self._status
        code = status.get("exitCode")
        code = int(code or 0) if self._phase == "Succeeded" else int(code or FAILED)
        if self._simulated_nodes and not self._simulated:
            code = code or FAILED  # the command was not really run
        self._output.ended(self._name, status, code)
        return code


def _gone(before: Document, last: Document) -> Document:
    """The allocation as deleted; if the last event has no status, its status before."""
    status = dict(last.get("status") or before.get("status") or {})
    if status.get("phase") not in ENDED:
        status |= {"phase": "Cancelled", "message": status.get("message") or "deleted"}
    return {**before, "status": status}
