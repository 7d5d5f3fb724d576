"""The ASGI application: routes a request to its handler, and sends the response.

Every request passes the same steps: find the route, authenticate, apply the rate limit, authorise the role, read a
bounded body, call the handler, and encode the result. All refusals have the same form.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, unquote

import structlog

from bursar.api.http import metrics
from bursar.api.http.body import INLINE_SLOW_BYTES_MAX, weigh
from bursar.api.http.connection import HttpConnection
from bursar.api.http.context import BODY_BYTES_MAX, ApiContext
from bursar.api.http.identity import TENANT_HEADER
from bursar.api.http.problem import answer_of
from bursar.api.http.ratelimit import MemoryRateLimit, RateVerdict, message
from bursar.api.http.route import Answer, BrokenOff, Call, Outcome, Route, Stream
from bursar.api.http.seats import party
from bursar.core.values.access import Identity, Policy, Role
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.ops.runtime.lane import Closed, Overloaded
from bursar.store.db.database import AWAY
from bursar.wire.shared.document import encode

log = structlog.get_logger()

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ANONYMOUS = Identity(user="", role=Role.VIEWER)
BODY_SECONDS_MAX = 30.0
QUERY_CHARS_MAX = 16_384

_SERVING = (Role.APPROVER, Role.SERVICE)  # act for many tenants, each with a limit of its own
RESERVE_PART = 10  # the fraction of a tenant's rate reserved for its administrators: 1 in 10

_PARAMETER = "\0"  # a value that no path segment can have
_ONCE = (b"authorization", b"content-type", b"idempotency-key", b"host", TENANT_HEADER.encode())
_NOSNIFF = (b"x-content-type-options", b"nosniff")
_HSTS = (b"strict-transport-security", b"max-age=31536000")
_GONE: tuple[type[Exception], ...] = (*AWAY, Closed)


_Found = tuple[dict[str, tuple[Route, list[str]]], list[str]] | None


class Router:
    """Routes by the segments of their path; a segment is either a word or a parameter."""

    def __init__(self, routes: list[Route]) -> None:
        self._tree: dict[str, Any] = {}
        for route in routes:
            place = self._tree
            for segment in _segments(route.path):
                place = place.setdefault(_PARAMETER if segment.startswith("{") else segment, {})
            names = [segment[1:-1] for segment in _segments(route.path) if segment.startswith("{")]
            place.setdefault("", {})[route.method] = (route, names)

    def find(self, segments: list[str]) -> _Found:
        """Find the routes at a path, by method, and the values of its parameters."""
        found: _Found = self._find(self._tree, segments, 0, [])
        return found

    def _find(self, place: dict[str, Any], segments: list[str], at: int, values: list[str]) -> Any:
        if at == len(segments):
            return (place[""], values) if "" in place else None
        segment = segments[at]
        if segment and segment in place and (found := self._find(place[segment], segments, at + 1, values)):
            return found
        if _PARAMETER in place and segment:
            return self._find(place[_PARAMETER], segments, at + 1, [*values, segment])
        return None


def _segments(path: str) -> list[str]:
    # Clients may append one slash; a second one is an empty name, which no object has.
    inner = path.removeprefix("/").removesuffix("/")
    return inner.split("/") if inner else []


def _segments_of(scope: AsgiScope) -> list[str]:
    """Split a request's path into segments and decode each by itself: an encoded slash is part of a name."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None or b"%" not in raw:
        return _segments(scope["path"])
    return [unquote(segment) for segment in _segments(raw.decode("ascii", "replace"))]


def _connection(scope: AsgiScope) -> HttpConnection | None:
    """The connection of a request; None if a caller drives the application directly."""
    connection: HttpConnection | None = scope["state"].get("connection") if "state" in scope else None
    return connection


def _know(scope: AsgiScope) -> None:
    """Mark the connection of a valid token, so that the limit on unauthenticated connections no longer counts it."""
    connection = _connection(scope)
    if connection is not None and not connection.is_known:
        connection.know()


def _given_twice(headers: list[tuple[bytes, bytes]]) -> Refusal | None:
    """Refuse a repeated header of identity or routing: a proxy may have checked the other value."""
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            return invalid(f"the header {name.decode()} is given {names.count(name)} times", hint="Send it once.")
    return None


class App:
    def __init__(self, context: ApiContext, routes: list[Route]) -> None:
        self._context = context
        self._router = Router(routes)
        self._streams: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def __call__(self, scope: AsgiScope, receive: Receive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = _request_id(headers.get("x-request-id", ""))
        call = self._call(scope, headers, request_id)
        route: Route | None = None
        rate: RateVerdict | None = None
        if isinstance(call, Refusal):
            outcome: Outcome = call
        else:
            route = call.route
            outcome, rate = await self._handle(call, scope, receive)
        if isinstance(outcome, Refusal):
            outcome = _refused(outcome, scope, call, request_id)
        status = 200
        told = _told(scope, request_id, rate)
        if isinstance(outcome, Stream):
            await self._stream(outcome, told, receive, send, request_id)
        else:
            status = outcome.status
            await _send_answer(outcome, told, scope, send)
        _account(scope, route, status, time.perf_counter() - started, request_id)

    def _call(self, scope: AsgiScope, headers: dict[str, str], request_id: str) -> Call | Refusal:
        """Find the route of a request."""
        method = scope["method"]
        if len(headers) != len(scope["headers"]) and (refusal := _given_twice(scope["headers"])):
            return refusal
        # No object has a name with a NUL character: PostgreSQL cannot even be queried for it.
        found = self._router.find(_segments_of(scope)) if "\0" not in scope["path"] else None
        if found is None:
            return Refusal(
                Code.NOT_FOUND, "the server could not find the requested resource", "See /docs for all paths."
            )
        methods, values = found
        entry = methods.get(method) or (methods.get("GET") if method == "HEAD" else None)
        if entry is None:
            offered = ", ".join(sorted(methods))
            return Refusal(Code.METHOD_NOT_ALLOWED, f"{method} is not supported here", f"Supported: {offered}.")
        route, names = entry
        parameters = dict(zip(names, values, strict=True))
        return Call(self._context, route, ANONYMOUS, request_id, parameters, {}, headers)

    async def _handle(self, call: Call, scope: AsgiScope, receive: Receive) -> tuple[Outcome, RateVerdict | None]:
        """Process a request; an unexpected error becomes a 503, or a 500 with the request's id."""
        rate: RateVerdict | None = None
        try:
            if not call.route.public:
                identity = await self._context.authenticate(call.headers)
                if isinstance(identity, Refusal):
                    return identity, None
                call.identity = identity
                _know(scope)
                rate = await self._take(identity, call.route)
                if rate is not None and not rate.allowed:
                    return _limited(identity, rate), rate
                if refusal := _forbidden(self._context.policy, identity, call.route):
                    return refusal, rate
            if refusal := _read_query(call, scope) or _dry_run_missing(call):
                return refusal, rate
            if scope["method"] not in ("GET", "HEAD"):
                body = await _read_body(receive, call.headers)
                if isinstance(body, Refusal):
                    return body, rate
                call.body = body
                if len(body) > INLINE_SLOW_BYTES_MAX and (refusal := await weigh(call)):
                    return refusal, rate
            return await call.route.handler(call), rate
        except Overloaded as error:
            return Refusal(Code.OVERLOADED, str(error), "Nothing happened: send the request again later.",
                           retry_after_seconds=error.retry_after_seconds), rate  # fmt: skip
        except _GONE as error:
            log.warning(
                "database_unavailable",
                message="the database is away or takes no changes; the request is answered with 503",
                path=scope["path"],
                error=repr(error),
                request_id=call.request_id,
            )
            return Refusal(
                Code.UNAVAILABLE,
                "the database is unavailable or takes no changes now",
                "Try again; a write that carries a request_id is safe to repeat.",
                retry_after_seconds=1,
            ), rate
        except Exception:
            log.exception(
                "request_failed",
                message="a request failed unexpectedly and is answered with 500",
                path=scope["path"],
                method=scope["method"],
                request_id=call.request_id,
            )
            return Answer(500, _internal(call.request_id)), rate

    async def _take(self, identity: Identity, route: Route) -> RateVerdict | None:
        if identity.role is Role.SYSTEM_ADMIN or route.free:
            return None
        limits = self._context.limits
        limit = self._context.requests_per_minute
        if identity.role in _SERVING:
            limit = self._context.service_requests_per_minute
        if isinstance(limits, MemoryRateLimit):
            rate = limits.take_now(party(identity), limit)
        else:
            rate = await limits.take(party(identity), limit)
        if rate.allowed or identity.role is not Role.TENANT_ADMIN:
            return rate
        # A tenant admin keeps a reserve, to be able to stop a flood of their tenant's requests.
        reserve = await limits.take(f"reserve:{identity.tenant}", max(1, limit // RESERVE_PART))
        return reserve if reserve.allowed else rate

    async def _stream(
        self, stream: Stream, told: list[tuple[bytes, bytes]], receive: Receive, send: AsgiSend, request_id: str
    ) -> None:
        headers = [
            (b"content-type", stream.media_type.encode()),
            (b"cache-control", b"no-cache"),
            *told,
            *((name.lower().encode(), value.encode()) for name, value in stream.headers.items()),
        ]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_until_left(stream, request_id, receive, send)
        finally:
            try:
                await stream.pieces.aclose()
            except Exception:
                log.exception(
                    "stream_not_closed", message="the source of a stream could not be closed", request_id=request_id
                )

    async def _send_until_left(self, stream: Stream, request_id: str, receive: Receive, send: AsgiSend) -> None:
        sender = asyncio.create_task(_send_pieces(stream, send))
        leaver = asyncio.create_task(_wait_for_leave(receive))
        self._streams.add(sender)
        if self._is_closing:
            sender.cancel()  # Clients reconnect at once, until the listener is closed.
        try:
            await asyncio.wait((sender, leaver), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._streams.discard(sender)
            here = not leaver.done()
            for task in (sender, leaver):
                task.cancel()
            await asyncio.gather(sender, leaver, return_exceptions=True)
            error = None if sender.cancelled() else sender.exception()
            if isinstance(error, BrokenOff):
                log.info(
                    "stream_broken_off",
                    message="a stream was cut off before its end",
                    request_id=request_id,
                    error=str(error),
                )
            elif error is not None:
                log.error(
                    "stream_failed", message="a stream failed unexpectedly", request_id=request_id, exc_info=error
                )
            if here and not stream.breaks and (sender.cancelled() or error is not None):
                await send({"type": "http.response.body", "body": b""})

    def end_streams(self) -> None:
        """Disconnect watchers on shutdown; they resume at another process."""
        self._is_closing = True
        for task in self._streams:
            task.cancel()


def _refused(refusal: Refusal, scope: AsgiScope, call: Call | Refusal, request_id: str) -> Answer:
    if isinstance(call, Refusal):
        metrics.count_refusal(refusal, scope["method"], "")
        return answer_of(refusal, request_id)
    resource, kind = call.route.resource, call.route.kind
    metrics.count_refusal(refusal, scope["method"], resource)
    name = call.parameters.get("name", "") or call.subject
    return answer_of(refusal, request_id, resource=resource, kind=kind.name if kind is not None else "", name=name)


def _account(scope: AsgiScope, route: Route | None, status: int, seconds: float, request_id: str) -> None:
    metrics.observe(route, scope["method"], status, seconds)
    if status >= 500:
        log.info(
            "request_answered", message="a request was answered with a server error", method=scope["method"],
            path=scope["path"], status=status, seconds=round(seconds, 4), request_id=request_id,
        )  # fmt: skip


def _request_id(given: str) -> str:
    """The caller's request id if it is short and plain, else a new one."""
    if given and len(given) <= 64 and given.isascii() and given.isprintable():
        return given
    return f"{random.getrandbits(64):016x}"  # identifies a request in the log; no secret


def _forbidden(policy: Policy, identity: Identity, route: Route) -> Refusal | None:
    if not route.resource or policy.allows(identity, route.verb, route.resource, route.subresource):
        return None
    what = f"{route.resource}/{route.subresource}" if route.subresource else route.resource
    return Refusal(
        Code.FORBIDDEN,
        f"role {identity.role} may not {route.verb} {what}",
        "Ask an administrator for a token with a role that may: docs/security.md has the table.",
    )


def _limited(identity: Identity, rate: RateVerdict) -> Refusal:
    return Refusal(Code.RATE_LIMITED, message(identity, rate.limit), "Slow down, or ask for a higher limit.",
                   retry_after_seconds=rate.retry_after_seconds)  # fmt: skip


def _read_query(call: Call, scope: AsgiScope) -> Refusal | None:
    raw = scope["query_string"]
    if not raw:
        return None
    if len(raw) > QUERY_CHARS_MAX:
        return invalid(f"the query is longer than {QUERY_CHARS_MAX} characters")
    try:
        call.query = dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64))
    except ValueError:
        return invalid("the query is malformed")
    if any("\0" in value for value in call.query.values()):
        return invalid("the query must not contain a NUL character")
    return None


def _dry_run_missing(call: Call) -> Refusal | None:
    """Refuse a dry run for a handler that does not support it."""
    if not call.query.get("dryRun") or call.route.method == "GET" or call.route.offers_dry_run:
        return None
    return invalid("dryRun is not supported here", hint="Send the request without dryRun to make the change.")


async def _read_body(receive: Receive, headers: Mapping[str, str]) -> bytes | Refusal:
    """Read the body, bounded in size and in time."""
    length = headers.get("content-length", "")
    too_large = Refusal(Code.TOO_LARGE, f"the body is larger than {BODY_BYTES_MAX} bytes", "Send less at once.")
    if length.isdigit() and int(length) > BODY_BYTES_MAX:
        return too_large
    deadline = _Deadline(BODY_SECONDS_MAX)
    try:
        return await _receive_body(receive, too_large)
    except asyncio.CancelledError:
        if not deadline.passed:
            raise
        return Refusal(
            Code.TIMEOUT,
            f"the body did not come within {BODY_SECONDS_MAX:g} seconds",
            "Nothing happened: send the request again.",
        )
    finally:
        deadline.lift()


async def _receive_body(receive: Receive, too_large: Refusal) -> bytes | Refusal:
    pieces: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            # A truncated body may mean something else: a DELETE without its options deletes.
            return invalid("the body ended early")
        pieces.append(event.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_BYTES_MAX:
            return too_large
        if not event.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Deadline:
    """A deadline that cancels the present task. Each request with a body has one; asyncio.timeout costs more."""

    __slots__ = ("_task", "_timer", "passed")

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end)

    def _end(self) -> None:
        self.passed = True
        if self._task is not None:
            self._task.cancel()

    def lift(self) -> None:
        self._timer.cancel()
        if self.passed and self._task is not None:
            self._task.uncancel()


def _told(scope: AsgiScope, request_id: str, rate: RateVerdict | None) -> list[tuple[bytes, bytes]]:
    """The headers of every response."""
    told = [(b"x-request-id", request_id.encode("latin-1")), _NOSNIFF]
    if scope.get("scheme") == "https":
        told.append(_HSTS)
    if rate is not None:
        told += [
            (b"x-ratelimit-limit", b"%d" % rate.limit),
            (b"x-ratelimit-remaining", b"%d" % rate.remaining),
            (b"x-ratelimit-reset", b"%d" % rate.reset_epoch_seconds),
        ]
    return told


async def _send_answer(answer: Answer, told: list[tuple[bytes, bytes]], scope: AsgiScope, send: AsgiSend) -> None:
    headers = [
        (b"content-type", answer.media_type.encode()),
        (b"content-length", b"%d" % len(answer.body)),
        *told,
    ]
    headers += [(name.lower().encode(), value.encode("utf-8", "replace")) for name, value in answer.headers.items()]
    body = b"" if scope["method"] == "HEAD" else answer.body
    connection = _connection(scope)
    if connection is not None and connection.answer(scope, answer.status, headers, body):
        return
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_pieces(stream: Stream, send: AsgiSend) -> None:
    async for piece in stream.pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _internal(request_id: str) -> bytes:
    return encode(
        {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": f"an internal error; the log has it under request {request_id}",
            "reason": "InternalError",
            "details": {"code": "internal", "requestId": request_id},
            "code": 500,
        }
    )
