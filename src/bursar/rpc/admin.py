"""The `AdminService`: gRPC calls translated into requests to the REST API, in process.

A call passes through the same ASGI application as an HTTP request. Authentication, rate limits, authorisation and
idempotency keys therefore exist once, and refusals are the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import grpc
import msgspec
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from bursar.rpc.problem import DETAILS, details_of, refusal_of, sentence_of, status_of
from bursar.wire.scheduler.v1 import admin_pb2 as pb
from bursar.wire.scheduler.v1 import admin_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
Event = MutableMapping[str, Any]
AsgiApp = Callable[[Event, Callable[[], Awaitable[Event]], Callable[[Event], Awaitable[None]]], Awaitable[None]]
M = TypeVar("M", bound=Message)

TENANTS: Final = "/api/v1/tenants"
USAGE: Final = "/api/v1/usage"
# Fields of an update that are not fields of the tenant.
_BESIDES: Final = frozenset({"name", "limits", "clear", "request_id", "dry_run"})
# REST names of fields that have another name in protobuf.
_RENAMED: Final = {"from": "begin", "to": "end"}


class AdminService(pb_grpc.AdminServiceServicer):
    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def UpdateTenant(  # noqa: N802
        self, request: pb.UpdateTenantRequest, context: Context
    ) -> pb.UpdateTenantResponse:
        changes = flat_of(request)
        if isinstance(changes, str):
            await _refuse(context, _invalid(changes))
        query = {"dryRun": "All"} if request.dry_run else {}
        path = await _tenant_path(context, request.name)
        found = await self._ask(context, "PUT", path, query, msgspec.json.encode(changes))
        return pb.UpdateTenantResponse(tenant=tenant_message(found))

    async def GetTenantUsage(  # noqa: N802
        self, request: pb.GetTenantUsageRequest, context: Context
    ) -> pb.GetTenantUsageResponse:
        path = await _tenant_path(context, request.tenant)
        found = await self._ask(context, "GET", f"{path}/usage", _days(request.days))
        return message_of(found, pb.GetTenantUsageResponse())

    async def GetUserUsage(  # noqa: N802
        self, request: pb.GetUserUsageRequest, context: Context
    ) -> pb.GetUserUsageResponse:
        query = {**({"user": request.user} if request.user else {}), **_days(request.days)}
        found = await self._ask(context, "GET", USAGE, query)
        return message_of(found, pb.GetUserUsageResponse())

    async def _ask(
        self, context: Context, method: str, path: str, query: Mapping[str, str], body: bytes = b""
    ) -> dict[str, Any]:
        """The response to a request; a refusal aborts the call."""
        status, answer = await _put(self._app, method, path, query, _headers(context), body)
        document: dict[str, Any] = msgspec.json.decode(answer)
        if status >= 300:
            await _refuse(context, document)
        return document


# The request.


def flat_of(request: pb.UpdateTenantRequest) -> dict[str, Any] | str:
    """The flat form of a tenant update, or the error."""
    changes: dict[str, Any] = {
        field.name: _plain(value) for field, value in request.ListFields() if field.name not in _BESIDES
    }
    for name, value in changes.items():
        # JSON has no NaN or infinity; null would clear the field.
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} must be a number"
    besides = [(f"max_{name.removeprefix('max_')}", quantity or None) for name, quantity in request.limits.items()]
    for name, value in (*besides, *((name, None) for name in request.clear)):
        if name in changes:
            return f"{name} is named twice"
        changes[name] = value
    if not changes:
        return "nothing to change: name at least one field"
    return {**changes, **({"request_id": request.request_id} if request.request_id else {})}


def _plain(value: Any) -> Any:
    """Whole numbers as integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _days(days: int) -> dict[str, str]:
    return {"days": str(days)} if days else {}


async def _tenant_path(context: Context, name: str) -> str:
    # A name is one path segment: a slash would address another path.
    if not name or "/" in name:
        await _refuse(context, _invalid("give the name of a tenant"))
    return f"{TENANTS}/{name}"


def _headers(context: Context) -> list[tuple[bytes, bytes]]:
    shown = {str(name): value for name, value in context.invocation_metadata() or ()}
    given = {name: shown[name] for name in ("authorization", "x-request-id") if name in shown}
    return [
        (b"content-type", b"application/json"),
        (b"accept", b"application/json"),
        *(
            (name.encode(), one if isinstance(one, bytes) else one.encode("latin-1", "replace"))
            for name, one in given.items()
        ),
    ]


async def _put(
    app: AsgiApp, method: str, path: str, query: Mapping[str, str], headers: list[tuple[bytes, bytes]], body: bytes
) -> tuple[int, bytes]:
    """Send one request to the ASGI application in process; returns status and body."""
    sent: list[Event] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Event:
        if not pieces:
            await asyncio.get_running_loop().create_future()  # the client never disconnects early
        return pieces.pop()

    async def send(event: Event) -> None:
        sent.append(event)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": quote(path).encode(),
        "query_string": urlencode(query).encode(), "headers": headers,
        "client": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return int(sent[0]["status"]), b"".join(one.get("body", b"") for one in sent[1:])


# The answer.


def message_of(document: Mapping[str, Any], message: M) -> M:
    """A REST document as a message with the same field names."""
    return ParseDict({_RENAMED.get(name, name): one for name, one in document.items()}, message, True)


def tenant_message(document: Mapping[str, Any]) -> pb.Tenant:
    metadata, spec = document["metadata"], document.get("spec") or {}
    numbers = {
        "gpu_hours_budget": spec.get("gpuHoursBudget"),
        "node_hours_budget": spec.get("nodeHoursBudget"),
        "fair_share_target": spec.get("fairShareTarget"),
        "burst_allowance": spec.get("burstAllowance"),
        "weight": spec.get("weight"),
    }
    return pb.Tenant(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        limits={name: str(value) for name, value in (spec.get("limits") or {}).items()},
        tier=spec.get("tier", ""),
        parent=spec.get("parent", ""),
        enforcement=spec.get("enforcement", ""),
        display_name=spec.get("displayName", ""),
        billing_mode=(spec.get("billing") or {}).get("mode", ""),
        approval_policy=spec.get("approvalPolicy", ""),
        sensitive=spec.get("sensitive", False),
        **{name: value for name, value in numbers.items() if value is not None},
    )


def _invalid(message: str) -> dict[str, Any]:
    return {"message": message, "details": {"code": "invalid"}}


async def _refuse(context: Context, document: Mapping[str, Any]) -> NoReturn:
    status, refusal = status_of(document), refusal_of(document)
    await context.abort(status, sentence_of(refusal), ((DETAILS, details_of(status, refusal)),))
    raise AssertionError("abort does not return")
