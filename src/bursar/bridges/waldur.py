"""Remaining budgets in Waldur: a resource of an offering is a tenant, and its components are the budgets.

Waldur has for each resource the agreed `limits` and the usage reported in its period (`limit_usage`, or
`current_usages` for components that are billed by use). The remaining budget is the difference. For a component
without reported usage Bursar counts the hours itself.

Waldur's client takes seconds and a hundred megabytes to import. Therefore this module runs in a process of its own
(`bursar waldur`), and no other module imports it.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from waldur_api_client import AuthenticatedClient
from waldur_api_client.api.marketplace_provider_resources import marketplace_provider_resources_list
from waldur_api_client.errors import UnexpectedStatus
from waldur_api_client.models.resource import Resource
from waldur_api_client.models.resource_field_enum import ResourceFieldEnum
from waldur_api_client.models.resource_state import ResourceState

from bursar.bridges.budget import SourceAway
from bursar.core.usage.external_budget import Remaining
from bursar.core.values.names import dns_subdomain

REQUEST_SECONDS_MAX = 10.0
READING_BYTES_MAX = 32 << 20  # for all pages together; a resource takes some hundred bytes
ALIVE = (ResourceState.OK, ResourceState.UPDATING, ResourceState.ERRED)
FIELDS = (
    ResourceFieldEnum.UUID,
    ResourceFieldEnum.BACKEND_ID,
    ResourceFieldEnum.LIMITS,
    ResourceFieldEnum.LIMIT_USAGE,
    ResourceFieldEnum.CURRENT_USAGES,
)


@dataclass(frozen=True, slots=True)
class Component:
    """A component of an offering that is a budget of hours, and the hours of one unit."""

    type: str
    hours: float = 1.0


@dataclass(frozen=True, slots=True)
class Waldur:
    """A budget source: some offerings of one Waldur server. The token file is read each time, so it may be replaced."""

    url: str
    token_file: Path
    offerings: tuple[UUID, ...]
    gpu_hours: Component = Component("gpu_hours")
    node_hours: Component = Component("node_hours")
    ca_file: Path | None = None

    @property
    def name(self) -> str:
        return "waldur"

    async def remaining_budgets(self) -> Mapping[str, Remaining]:
        try:
            async with self._client() as client:
                resources = await marketplace_provider_resources_list.asyncio_all(
                    client=client, offering_uuid=list(self.offerings), state=list(ALIVE), field=list(FIELDS)
                )
            return self._budgets(resources)
        except UnexpectedStatus as error:
            raise SourceAway(_said(error)) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise SourceAway(f"{type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SourceAway(f"unexpected answer: {type(error).__name__}: {error}") from error

    def _client(self) -> AuthenticatedClient:
        return AuthenticatedClient(
            base_url=self.url,
            token=self._token(),
            timeout=httpx.Timeout(REQUEST_SECONDS_MAX),
            headers={"User-Agent": "bursar", "Accept-Encoding": "identity"},
            httpx_args={
                "transport": BoundedTransport(
                    verify=ssl.create_default_context(cafile=self.ca_file) if self.ca_file else True
                )
            },
        )

    def _token(self) -> str:
        """The token. An invalid one is refused here, because the HTTP library would quote it in its error."""
        token = self.token_file.read_bytes().strip()
        if not token or not all(33 <= byte <= 126 for byte in token):
            raise SourceAway(f"{self.token_file} has no valid token: one word of ASCII letters, digits and signs")
        return token.decode("ascii")

    def _budgets(self, resources: Iterable[Resource]) -> dict[str, Remaining]:
        """The budgets by tenant; several resources of one tenant are one budget."""
        found: dict[str, Remaining] = {}
        for resource in resources:
            tenant = resource.backend_id
            if not isinstance(tenant, str) or dns_subdomain(tenant):
                continue  # It is not provisioned yet, or its name is not a tenant's.
            before = found.get(tenant, Remaining())
            found[tenant] = Remaining(
                _sum(before.gpu_hours, left_of(resource, self.gpu_hours)),
                _sum(before.node_hours, left_of(resource, self.node_hours)),
                self.name,
            )
        return found


class BoundedTransport(httpx.AsyncHTTPTransport):
    """An HTTP transport that limits the bytes of all answers, so that an endless one cannot exhaust memory."""

    def __init__(self, *, verify: ssl.SSLContext | bool) -> None:
        super().__init__(verify=verify)
        self._capacity = READING_BYTES_MAX

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx.DecodingError("the answer is compressed, although identity was requested", request=request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Bounded(self, response.stream)
        return response

    def take(self, size: int) -> None:
        self._capacity -= size
        if self._capacity < 0:
            raise httpx.ReadError(f"the answer is larger than {READING_BYTES_MAX >> 20} MiB")


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, transport: BoundedTransport, stream: httpx.AsyncByteStream) -> None:
        self._transport = transport
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self._transport.take(len(piece))
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def left_of(resource: Resource, component: Component) -> float | None:
    """The remaining hours of a component; None without a limit or without reported usage."""
    limit = _number(resource.limits, component.type)
    used = _number(resource.limit_usage, component.type)
    if used is None:
        used = _number(resource.current_usages, component.type)
    if limit is None or used is None:
        return None
    return (limit - used) * component.hours


def _number(amounts: Any, component: str) -> float | None:
    """An amount, which Waldur sends as a number, as a string, or not at all."""
    if not amounts or component not in amounts.additional_properties:
        return None
    value = amounts[component]
    number = float(value) if value is not None else math.nan
    return number if math.isfinite(number) else None


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other + (one or 0.0)


def _said(error: UnexpectedStatus) -> str:
    """The HTTP status without the body: an error page is long, and may quote the request."""
    hint = {401: ": the token is not accepted", 403: ": the token may not read these offerings' resources"}
    return f"HTTP {error.status_code}{hint.get(error.status_code, '')}"
