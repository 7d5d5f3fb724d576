"""`AsyncClient`: runs flows with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import httpx2

from bursar.client import http
from bursar.client.calls import ResourcePath
from bursar.client.flow import (
    Feed,
    Flow,
    Give,
    HttpRequest,
    Open,
    Outcome,
    Pause,
    Read,
    Response,
    SendRequest,
    Step,
    resume,
)
from bursar.client.kinds import Kinds
from bursar.client.table import ClientCalls, ResourceCalls

T = TypeVar("T")


class _Steps:
    """Performs the steps of one flow."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._opened: httpx2.Response | None = None
        self._pieces: AsyncIterator[bytes] | None = None

    async def run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                step = resume(flow, await self._outcome(step))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            await self.close()

    async def iterate(self, feed: Feed[T]) -> AsyncGenerator[T, None]:
        try:
            step = next(feed)
            while True:
                if isinstance(step, Give):
                    yield step.value
                    step = feed.send(None)
                else:
                    step = resume(feed, await self._outcome(step))
        except StopIteration:
            return
        finally:
            await self.close()

    async def _outcome(self, step: Step) -> Outcome:
        try:
            return await self._do(step)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            return http.failure(error, str(self._client.base_url).rstrip("/"))

    async def _do(self, step: Step) -> Response | bytes | None:
        match step:
            case SendRequest(request):
                response = await self._client.send(self._build(request))
                return http.response_of(response, response.content)
            case Open(request):
                return await self._open(request)
            case Read():
                assert self._pieces is not None, "a flow opens before it reads"
                return await anext(self._pieces, None)
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return None

    async def _open(self, request: HttpRequest) -> Response:
        await self.close()
        response = await self._client.send(self._build(request), stream=True)
        self._opened = response
        if response.status_code >= 300:
            return http.response_of(response, await response.aread())
        self._pieces = response.aiter_bytes()
        return http.response_of(response, b"")

    def _build(self, request: HttpRequest) -> httpx2.Request:
        return self._client.build_request(**http.arguments(request))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()
            self._opened = None


class _AsyncRunner:
    """Runs flows over one HTTP client."""

    _http: httpx2.AsyncClient

    async def _run(self, flow: Flow[T], /) -> T:
        return await _Steps(self._http).run(flow)

    def _iterate(self, feed: Feed[T], /) -> AsyncGenerator[T, None]:
        return _Steps(self._http).iterate(feed)


class AsyncResource(ResourceCalls, _AsyncRunner):
    """The objects of one kind. Calling it with a namespace restricts it to that namespace."""

    def __init__(self, client: httpx2.AsyncClient, place: ResourcePath) -> None:
        self._http = client
        self._subject = place

    def __call__(self, namespace: str) -> AsyncResource:
        return AsyncResource(self._http, self._subject.within(namespace))


class AsyncClient(ClientCalls, _AsyncRunner, Kinds[AsyncResource]):
    """A client of one server. The defaults are BURSAR_URL and BURSAR_TOKEN, else the context of `bursar login`."""

    _transport = httpx2.AsyncClient
    _resource = AsyncResource

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
