"""Flows: the logic of the SDK without I/O, shared by both clients.

A flow is a generator. It yields one step at a time and receives its outcome. Two drivers, sync.py and aio.py, perform
the steps. A connection failure is thrown into the flow, which decides whether to retry.
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
    # How long the server may send nothing; None is the client's own setting.
    silence_seconds_max: float | None = None


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]  # lower-case names
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request and read its whole answer. The outcome is a Response."""

    request: HttpRequest


@dataclass(frozen=True, slots=True)
class Open:
    """Send a request and leave a successful body to be read in pieces; a flow has at most one open."""

    request: HttpRequest


@dataclass(frozen=True, slots=True)
class Read:
    """Read the next piece of the open body. The outcome is bytes, or None at the end."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Give(Generic[T]):
    """Give a value to the caller's iteration."""

    value: T


Step: TypeAlias = SendRequest | Open | Read | Pause
# A flow has one result, a feed gives any number of values.
Flow: TypeAlias = Generator[Step, Any, T]
Feed: TypeAlias = Generator[Step | Give[T], Any, None]


# The outcome of a step.
Outcome: TypeAlias = Response | bytes | ConnectionFailed | None


def resume(flow: Generator[Y, Any, Any], outcome: Outcome) -> Y:
    """Send a flow the outcome of its last step, and return the next step."""
    return flow.throw(outcome) if isinstance(outcome, ConnectionFailed) else flow.send(outcome)


@dataclass(frozen=True, slots=True)
class Retries:
    """The number of attempts, and the seconds for all of them, while an error is transient."""

    attempts_max: int = 5
    seconds_max: float = 60.0

    def pause_seconds(self, attempt: int, asked: float = 0.0) -> float:
        """The server's Retry-After, else exponential backoff with jitter."""
        return asked or min(10.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


ONCE = Retries(attempts_max=1)


def exchange(request: HttpRequest, retries: Retries) -> Flow[Response]:
    """Send a request, with retries, and return its successful answer; raise any other.

    Every request may be repeated: reads change nothing, and writes carry an idempotency key.
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
    """The request, with an idempotency key if it is a write without one."""
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
    """Send a request and decode its answer; None if it is empty."""
    response = yield from exchange(request, retries)
    return decoded(response)


def document_of(request: HttpRequest, retries: Retries) -> Flow[Document]:
    document = yield from json_of(request, retries)
    if not isinstance(document, dict):
        raise not_bursar("its answer is not an object")
    return document


def decoded(response: Response) -> Any:
    if not response.body:
        return None
    if not _is_json(response):
        return response.body.decode(errors="replace")
    try:
        return msgspec.json.decode(response.body)
    except msgspec.DecodeError as error:
        raise not_bursar(str(error)) from None


def error_of(response: Response) -> ApiError:
    """The exception for an answer that is not a success."""
    try:
        document = msgspec.json.decode(response.body) if _is_json(response) else None
    except msgspec.DecodeError:
        document = None
    # A proxy answers with a page, of which only the first line helps.
    text = "" if _is_json(response) else response.body.decode(errors="replace").strip().partition("\n")[0][:200]
    return api_error(response.status, document, response.headers, text and f"{response.status}: {text}")


def not_bursar(fault: str) -> ConnectionFailed:
    return ConnectionFailed(f"the server does not speak Bursar's API: {fault}", "check the URL", passing=False)


def encoded(body: object) -> bytes:
    """A body as JSON; typed objects of `bursar.wire` get the API's field names."""
    return msgspec.json.encode(body)


def _is_json(response: Response) -> bool:
    return "json" in response.headers.get("content-type", "")
