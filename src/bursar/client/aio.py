"""`AsyncClient`: the flows, driven by asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import httpx2

from bursar.client import apply, calls, credit, http, log, usage, watch, webhook
from bursar.client.calls import ResourcePath
from bursar.client.contexts import Context, resolve
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
    Retries,
    SendRequest,
    Step,
    resume,
)
from bursar.client.kinds import Kinds, place_of

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class _Errands:
    """Does the steps of one flow."""

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


class _Driven(Generic[S]):
    """Something whose calls are flows about a subject."""

    _http: httpx2.AsyncClient
    _subject: S


def _call(flow: Callable[Concatenate[S, P], Flow[T]]) -> Callable[Concatenate[_Driven[S], P], Coroutine[Any, Any, T]]:
    async def method(self: _Driven[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await _Errands(self._http).run(flow(self._subject, *args, **kwargs))

    update_wrapper(method, flow)
    return method


def _each(
    feed: Callable[Concatenate[S, P], Feed[T]],
) -> Callable[Concatenate[_Driven[S], P], AsyncGenerator[T, None]]:
    def method(self: _Driven[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[T, None]:
        return _Errands(self._http).iterate(feed(self._subject, *args, **kwargs))

    update_wrapper(method, feed)
    return method


class AsyncResource(_Driven[ResourcePath]):
    """The objects of one kind: in one namespace after being called with its name, else in all."""

    def __init__(self, client: httpx2.AsyncClient, place: ResourcePath) -> None:
        self._http = client
        self._subject = place

    def __call__(self, namespace: str) -> AsyncResource:
        return AsyncResource(self._http, self._subject.within(namespace))

    get = _call(calls.get)
    page = _call(calls.page)
    list = _each(calls.list_)
    table = _call(calls.table)
    watch = _each(watch.watch)
    create = _call(calls.create)
    replace = _call(calls.replace_)
    patch = _call(calls.patch)
    apply = _call(apply.apply)
    delete = _call(calls.delete)
    delete_collection = _call(calls.delete_collection)
    bulk_release = _call(calls.bulk_release)
    action = _call(calls.action)
    send_stdin = _call(calls.send_stdin)
    cancel = _call(calls.cancel)
    boost = _call(calls.boost)
    explain = _call(calls.explain)
    simulate = _call(calls.simulate)
    log = _each(log.log)


class AsyncClient(_Driven[Retries], Kinds[AsyncResource]):
    """Speaks to one server. Without arguments: BURSAR_URL and BURSAR_TOKEN, else the context of `bursar login`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        ca_file: str | None = None,
        context: str | None = None,
        timeout_seconds: float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        self.context: Context = resolve(url=url, token=token, ca_file=ca_file, context=context)
        self._subject = retries or Retries()
        self._http = httpx2.AsyncClient(**http.options(self.context, timeout_seconds))

    def resource(self, plural: str, namespace: str = "", *, namespaced: bool | None = None) -> AsyncResource:
        return AsyncResource(self._http, place_of(plural, namespace, namespaced, self._subject))

    request = _call(calls.request)
    update_tenant = _call(calls.update_tenant)
    tenant_quotas = _call(calls.tenant_quotas)
    tenant_usage = _call(usage.tenant_usage)
    user_usage = _call(usage.user_usage)
    period_usage = _call(usage.period_usage)
    export_usage = _call(usage.export_usage)
    drain = _call(calls.drain)
    drain_status = _call(calls.drain_status)
    fence = _call(calls.fence)
    unfence = _call(calls.unfence)
    claim = _call(calls.claim)
    release_node = _call(calls.release_node)
    wipe = _call(calls.wipe)
    confirm_wiped = _call(calls.confirm_wiped)
    claims = _call(calls.claims)
    certify = _call(calls.certify)
    authority = _call(calls.authority)
    preempt = _call(calls.preempt)
    queue_metrics = _call(calls.queue_metrics)
    cluster_utilization = _call(calls.cluster_utilization)
    whoami = _call(calls.whoami)

    balance = _call(credit.balance)
    forecast = _call(credit.forecast)
    statement = _call(credit.statement)
    statement_csv = _call(credit.statement_csv)
    top_up = _call(credit.top_up)
    refund = _call(credit.refund)
    adjust = _call(credit.adjust)
    open_lease = _call(credit.open_lease)
    extend_lease = _call(credit.extend_lease)
    close_lease = _call(credit.close_lease)
    lease = _call(credit.lease)
    leases = _each(credit.leases)
    report_usage = _call(credit.report_usage)
    accounts = _each(credit.accounts)
    open_account = _call(credit.open_account)
    change_account = _call(credit.change_account)
    limits = _call(credit.limits)
    set_limits = _call(credit.set_limits)
    prices = _call(credit.prices)
    set_price = _call(credit.set_price)
    delete_price = _call(credit.delete_price)
    verify_ledger = _call(credit.verify_ledger)
    ledger = _call(credit.ledger)

    webhooks = _each(webhook.webhooks)
    create_webhook = _call(webhook.create_webhook)
    delete_webhook = _call(webhook.delete_webhook)
    test_webhook = _call(webhook.test_webhook)
    webhook_deliveries = _each(webhook.webhook_deliveries)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncClient({self.context.url!r})"
