"""Flows: what the SDK does, written once.

A flow is a generator. It yields what it needs done, one step at a time, and is sent what came of it; it never does
I/O itself. Two small drivers, sync.py and aio.py, do the steps. A failure to connect is thrown into the flow, which
decides what to do about it.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import uuid4

import msgspec

from bursar.client.errors import ApiError, ConnectionFailed, api_error

T = TypeVar("T")
Y = TypeVar("Y")

# An object as the API shows it: plain dicts, lists and values.
Document: TypeAlias = dict[str, Any]

JSON = "application/json"
IDEMPOTENCY_KEY = "idempotency-key"
READING = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    # How long the server may stay silent; None is the client's own setting.
    silence_seconds_max: float | None = None


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send the request and read all of its answer: gets a Response."""

    request: HttpRequest


@dataclass(frozen=True, slots=True)
class Open:
    """The same, but a success is left to be read piece by piece; at most one is open in a flow."""

    request: HttpRequest


@dataclass(frozen=True, slots=True)
class Read:
    """The next piece of what was opened: gets bytes, or None at the end."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Give(Generic[T]):
    """Hand a value to whoever iterates."""

    value: T


Step: TypeAlias = SendRequest | Open | Read | Pause
# A flow that comes to one result, and one that gives values on the way.
Flow: TypeAlias = Generator[Step, Any, T]
Feed: TypeAlias = Generator[Step | Give[T], Any, None]


# What came of a step.
Outcome: TypeAlias = Response | bytes | ConnectionFailed | None


def resume(flow: Generator[Y, Any, Any], outcome: Outcome) -> Y:
    """Tells a flow what came of its last step, and gets the next one."""
    return flow.throw(outcome) if isinstance(outcome, ConnectionFailed) else flow.send(outcome)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often, and for how long in all, a request is tried while the trouble may pass by itself."""

    attempts_max: int = 5
    seconds_max: float = 60.0

    def pause_seconds(self, attempt: int, asked: float = 0.0) -> float:
        """What the server asked for; else twice as long each time, spread so that clients do not come back together."""
        return asked or min(10.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


ONCE = Retries(attempts_max=1)


def exchange(request: HttpRequest, retries: Retries) -> Flow[Response]:
    """A request and its successful answer; anything else is raised.

    Every request may be repeated: reading changes nothing, and a write carries a key under which the server
    recognises it.
    """
    request = repeatable(request)
    waited_seconds = 0.0
    for attempt in range(1, retries.attempts_max + 1):
        try:
            return (yield from _attempt(request))
        except (ConnectionFailed, ApiError) as trouble:
            seconds = retries.pause_seconds(attempt, getattr(trouble, "retry_after", 0.0))
            waited_seconds += seconds
            if not trouble.passing or attempt == retries.attempts_max or waited_seconds > retries.seconds_max:
                raise
        yield Pause(seconds)
    raise AssertionError("the last attempt either returns or raises")


def repeatable(request: HttpRequest) -> HttpRequest:
    """The request with a key of its own, if it is a write that has none."""
    if request.method in READING or any(name.lower() == IDEMPOTENCY_KEY for name in request.headers):
        return request
    return replace(request, headers={**request.headers, IDEMPOTENCY_KEY: str(uuid4())})


def _attempt(request: HttpRequest) -> Flow[Response]:
    response = yield SendRequest(request)
    assert isinstance(response, Response)
    if response.status >= 300:
        raise error_of(response)
    return response


def json_of(request: HttpRequest, retries: Retries) -> Flow[Any]:
    """A request and what its answer says; None where it says nothing."""
    response = yield from exchange(request, retries)
    return decoded(response)


def document_of(request: HttpRequest, retries: Retries) -> Flow[Document]:
    document = yield from json_of(request, retries)
    if not isinstance(document, dict):
        raise not_ours("its answer is not an object")
    return document


def decoded(response: Response) -> Any:
    if not response.body:
        return None
    if not _is_json(response):
        return response.body.decode(errors="replace")
    try:
        return msgspec.json.decode(response.body)
    except msgspec.DecodeError as error:
        raise not_ours(str(error)) from None


def error_of(response: Response) -> ApiError:
    """What an answer that is no success means."""
    try:
        document = msgspec.json.decode(response.body) if _is_json(response) else None
    except msgspec.DecodeError:
        document = None
    # What comes from a proxy on the way is a page; its first line is all that helps.
    text = "" if _is_json(response) else response.body.decode(errors="replace").strip().partition("\n")[0][:200]
    return api_error(response.status, document, response.headers, text and f"{response.status}: {text}")


def not_ours(fault: str) -> ConnectionFailed:
    return ConnectionFailed(f"what answers there does not speak Bursar's API: {fault}", "check the URL", passing=False)


def encoded(body: object) -> bytes:
    """A body as JSON; the typed objects of `bursar.wire` are written as the API names their fields."""
    return msgspec.json.encode(body)


def _is_json(response: Response) -> bool:
    return "json" in response.headers.get("content-type", "")
