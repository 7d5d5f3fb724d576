"""Outputs of `bursar run`: sentences for a terminal, JSON events for a program, or only the command's own output."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any, Protocol

import click

from bursar.cli.shell.output import due
from bursar.cli.workloads.log_follow import LineSink, Sink
from bursar.core.credit.shortfall import end_words, recorded_shortfall, time_left
from bursar.core.objects.approval import AWAITING_APPROVAL

Document = Mapping[str, Any]

ENDED = frozenset({"Succeeded", "Failed", "Cancelled"})
STOPPED = frozenset({"Preempted", "Drained", "Evicted", "NodeLost"})  # reasons of work that was placed and stopped


class RunOutput(Protocol):
    @property
    def wants_queue_position(self) -> bool:
        """Whether to read the queue position from time to time."""

    def submitted(self, document: Document) -> None: ...

    def update(self, name: str, status: Document) -> None:
        """Take the current status, which may be unchanged."""

    def sink(self, *, named: bool) -> Sink:
        """The sink for the command's output."""

    def finish(self) -> None:
        """Flush the command's output after its end."""

    def warn(self, message: str) -> None: ...

    def ended(self, name: str, status: Document, code: int) -> None: ...


class QuietOutput:
    """The command's output, and the reason if it failed."""

    wants_queue_position = False

    def __init__(self) -> None:
        self._lines: LineSink | None = None

    def submitted(self, document: Document) -> None:
        del document

    def update(self, name: str, status: Document) -> None:
        del name, status

    def sink(self, *, named: bool) -> Sink:
        self._lines = LineSink(named=named)
        return self._lines

    def finish(self) -> None:
        if self._lines is not None:
            self._lines.finish()

    def warn(self, message: str) -> None:
        click.echo(f"bursar: {message}", err=True)

    def ended(self, name: str, status: Document, code: int) -> None:
        phase = str(status.get("phase") or "")
        if phase == "Succeeded" or _says_only_its_exit_code(status):
            return
        why = status.get("message") or status.get("reason") or f"exit code {code}"
        click.echo(f"bursar: {name} {phase.lower()}: {why}", err=True)


def _says_only_its_exit_code(status: Document) -> bool:
    """Whether the exit code says it all: the command ran on one node and was not stopped."""
    nodes = [str(one["name"]) for one in status.get("nodes") or ()]
    known = ("", f"exit code {status.get('exitCode')} on {nodes[0]}" if len(nodes) == 1 else "")
    return "exitCode" in status and (status.get("message") or "") in known


class TerminalOutput(QuietOutput):
    """A line for every change that a person may want to see."""

    wants_queue_position = True

    def __init__(self) -> None:
        super().__init__()
        self._said = ""

    def submitted(self, document: Document) -> None:
        metadata = document["metadata"]
        self._say(f"{metadata['namespace']}/{metadata['name']} submitted")

    def update(self, name: str, status: Document) -> None:
        """Print the status, except before the first reason is known and at the end, which `ended` prints."""
        phase = status.get("phase") or "Pending"
        if phase not in ENDED and (phase != "Pending" or status.get("message")):
            self._say(f"{name} {status_line(status)}", status_line(status, when=str))

    def ended(self, name: str, status: Document, code: int) -> None:
        if status.get("phase") != "Succeeded" and not status.get("message"):
            status = {**status, "message": f"exit code {code}"}
        super().ended(name, status, code)

    def _say(self, line: str, fact: str = "") -> None:
        """Print a line unless it repeats the last fact. A distance to a time changes by itself and is no new fact."""
        if (fact or line) != self._said:
            self._said = fact or line
            click.echo(f"bursar: {line}", err=True)


def status_line(status: Document, *, when: Callable[[object], str] | None = None) -> str:
    """The status as one line."""
    phase = str(status.get("phase") or "Pending")
    where = ", ".join(str(one["name"]) for one in status.get("nodes") or [])
    if phase == "Pending":
        message, stopped = why_pending(status)
        # Some messages already begin with "waiting" or "awaiting".
        parts = [message if message.startswith(("waiting ", "awaiting ")) else f"pending: {message}"]
        if status.get("queuePosition"):
            parts.append(f"queue position {status['queuePosition']}")
        if status.get("estimatedStartTime"):
            parts.append(f"starts {(when or due)(status['estimatedStartTime'])}")
        if stopped:
            parts.append(f"stopped earlier: {stopped}")
        return "; ".join(parts)
    if phase == "Terminating":
        notice = status.get("eviction") or {}
        return f"is being stopped: {notice['message']}" if notice.get("message") else "is being stopped"
    words = {"Scheduled": "starts", "Running": "runs"}.get(phase, phase.lower())
    return "; ".join([f"{words} on {where}" if where else words, *_shortfall(status)])


def _shortfall(status: Document) -> Iterator[str]:
    """The warning of a lease that could not be extended: `out of credit: ends in 115 s unless topped up`."""
    noted = [
        short
        for one in status.get("nodes") or ()
        if (short := recorded_shortfall(str(one.get("unpaid") or ""), str(one.get("paidUntil") or "")))
    ]
    if noted:
        first = min(noted)
        yield end_words(first.code, time_left(first.until - time.time()))


def why_pending(status: Document) -> tuple[str, str]:
    """The current reason of a pending allocation, and the reason of an earlier stop."""
    message = str(status.get("message") or "")
    if status.get("reason") == AWAITING_APPROVAL:
        return message, ""
    conditions = status.get("conditions") or ()
    waiting = (one for one in conditions if one["type"] == "Scheduled" and one["status"] == "False")
    scheduled: Document = next(waiting, {})
    current = str(scheduled.get("message") or "")
    if scheduled.get("reason") == status.get("reason") or status.get("reason") == AWAITING_APPROVAL or not current:
        return message or "the scheduler has not tried it yet", ""
    return current, message if status.get("reason") in STOPPED else ""


class JsonOutput:
    """One JSON object per line for each event."""

    wants_queue_position = True

    def __init__(self) -> None:
        self._said: Document = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._lock = Lock()

    def submitted(self, document: Document) -> None:
        metadata = document["metadata"]
        self._emit("submitted", {name: metadata.get(name) for name in ("namespace", "name", "uid")})

    def update(self, name: str, status: Document) -> None:
        shown = ("phase", "reason", "message", "queuePosition", "estimatedStartTime", "epoch")
        what: dict[str, Any] = {"name": name, **{one: status[one] for one in shown if status.get(one)}}
        if nodes := [one["name"] for one in status.get("nodes") or []]:
            what["nodes"] = nodes
        if what != self._said:
            self._said = what
            self._emit("status", what)

    def sink(self, *, named: bool) -> Sink:
        del named
        return self._log

    def _log(self, node: str, data: bytes) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        decoder = self._decoders.setdefault(node, make(errors="replace"))
        if text := decoder.decode(data):
            self._emit("log", {"node": node, "text": text})

    def finish(self) -> None:
        for node, decoder in self._decoders.items():
            if text := decoder.decode(b"", True):
                self._emit("log", {"node": node, "text": text})

    def warn(self, message: str) -> None:
        self._emit("warning", {"message": message})

    def ended(self, name: str, status: Document, code: int) -> None:
        end = {one: status[one] for one in ("phase", "reason", "message") if status.get(one)}
        self._emit("ended", {"name": name, **end, "exitCode": code})

    def _emit(self, event: str, what: Document) -> None:
        with self._lock:
            click.echo(json.dumps({"event": event, **what}, ensure_ascii=False))
