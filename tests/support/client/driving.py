"""Drives flows by hand: they are told what came of each request, and say what they ask for next."""

from collections.abc import Generator, Mapping
from typing import Any

from bursar.client import ConnectionFailed, Retries
from bursar.client.calls import ResourcePath
from bursar.client.flow import HttpRequest, Outcome, Response, SendRequest, resume

JSON = {"content-type": "application/json"}
LOST = ConnectionFailed("the cable was cut")
ALLOCATIONS = ResourcePath("allocations", True, Retries(), "ml-team")


def answer(status: int, body: bytes = b"{}", headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, {**JSON, **(headers or {})}, body)


def drive(flow: Generator[Any, Any, Any], *outcomes: Outcome) -> tuple[list[Any], Any]:
    """The steps a flow takes when these come of its requests, and its result. Pauses are over at once."""
    waiting = list(outcomes)
    steps = []
    try:
        step = next(flow)
        while True:
            steps.append(step)
            step = resume(flow, waiting.pop(0) if isinstance(step, SendRequest) else None)
    except StopIteration as end:
        assert not waiting, "everything prepared was asked for"
        return steps, end.value


def sent(steps: list[Any]) -> list[HttpRequest]:
    return [step.request for step in steps if isinstance(step, SendRequest)]
