"""`Client`: runs flows with blocking calls."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
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

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self._opened: httpx2.Response | None = None
        self._pieces: Iterator[bytes] | None = None

    def run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                step = resume(flow, self._outcome(step))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            self.close()

    def iterate(self, feed: Feed[T]) -> Generator[T, None, None]:
        try:
            step = next(feed)
            while True:
                if isinstance(step, Give):
                    yield step.value
                    step = feed.send(None)
                else:
                    step = resume(feed, self._outcome(step))
        except StopIteration:
            return
        finally:
            self.close()

    def _outcome(self, step: Step) -> Outcome:
        try:
            return self._do(step)
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            return http.failure(error, str(self._client.base_url).rstrip("/"))

    def _do(self, step: Step) -> Response | bytes | None:
        match step:
            case SendRequest(request):
                response = self._client.send(self._build(request))
                return http.response_of(response, response.content)
            case Open(request):
                return self._open(request)
            case Read():
                assert self._pieces is not None, "a flow opens before it reads"
                return next(self._pieces, None)
            case Pause(seconds):
                time.sleep(seconds)
                return None

    def _open(self, request: HttpRequest) -> Response:
        self.close()
        response = self._client.send(self._build(request), stream=True)
        self._opened = response
        if response.status_code >= 300:
            return http.response_of(response, response.read())
        self._pieces = response.iter_bytes()
        return http.response_of(response, b"")

    def _build(self, request: HttpRequest) -> httpx2.Request:
        return self._client.build_request(**http.arguments(request))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


class _Runner:
    """Runs flows over one HTTP client."""

    _http: httpx2.Client

    def _run(self, flow: Flow[T], /) -> T:
        return _Steps(self._http).run(flow)

    def _iterate(self, feed: Feed[T], /) -> Generator[T, None, None]:
        return _Steps(self._http).iterate(feed)


class Resource(ResourceCalls, _Runner):
    """The objects of one kind. Calling it with a namespace restricts it to that namespace."""

    def __init__(self, client: httpx2.Client, place: ResourcePath) -> None:
        self._http = client
        self._subject = place

    def __call__(self, namespace: str) -> Resource:
        return Resource(self._http, self._subject.within(namespace))


class Client(ClientCalls, _Runner, Kinds[Resource]):
    """A client of one server. The defaults are BURSAR_URL and BURSAR_TOKEN, else the context of `bursar login`."""

    _transport = httpx2.Client
    _resource = Resource

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
