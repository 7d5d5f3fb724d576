"""The table of calls of both clients: a name, and the flow behind it.

`Client` and `AsyncClient` inherit this table. A call of the first returns the flow's result, a call of the second a
coroutine with it; a feed becomes a generator or an async generator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from bursar.client import apply, approval, calls, credit, log, usage, watch, webhook
from bursar.client.flow import Feed, Flow

P = ParamSpec("P")
T = TypeVar("T")


class Runner(Protocol):
    """A client that runs flows with blocking calls. `_subject` is the first argument of its flows."""

    _subject: Any

    def _run(self, flow: Flow[T], /) -> T: ...

    def _iterate(self, feed: Feed[T], /) -> Generator[T, None, None]: ...


class AsyncRunner(Protocol):
    """A client that runs flows with asyncio."""

    _subject: Any

    def _run(self, flow: Flow[T], /) -> Coroutine[Any, Any, T]: ...

    def _iterate(self, feed: Feed[T], /) -> AsyncGenerator[T, None]: ...


class _Call(Generic[P, T]):
    """A method that runs a flow, which has one result."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        @wraps(flow)
        def method(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return runner._run(flow(runner._subject, *args, **kwargs))  # noqa: SLF001 - part of the protocol

        self._method: Any = method

    @overload
    def __get__(self, runner: Runner, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, runner: AsyncRunner, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, runner: Any, owner: type) -> Any:
        return self._method.__get__(runner, owner)


class _Each(Generic[P, T]):
    """A method that runs a feed, which gives any number of values."""

    def __init__(self, feed: Callable[Concatenate[Any, P], Feed[T]]) -> None:
        @wraps(feed)
        def method(runner: Any, /, *args: Any, **kwargs: Any) -> Any:
            return runner._iterate(feed(runner._subject, *args, **kwargs))  # noqa: SLF001 - part of the protocol

        self._method: Any = method

    @overload
    def __get__(self, runner: Runner, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, runner: AsyncRunner, owner: type) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, runner: Any, owner: type) -> Any:
        return self._method.__get__(runner, owner)


class ResourceCalls:
    """Calls on the objects of one kind."""

    get = _Call(calls.get)
    page = _Call(calls.page)
    list = _Each(calls.list_)
    table = _Call(calls.table)
    watch = _Each(watch.watch)
    create = _Call(calls.create)
    replace = _Call(calls.replace_)
    patch = _Call(calls.patch)
    apply = _Call(apply.apply)
    delete = _Call(calls.delete)
    delete_collection = _Call(calls.delete_collection)
    bulk_release = _Call(calls.bulk_release)
    action = _Call(calls.action)
    approve = _Call(approval.approve)
    deny = _Call(approval.deny)
    note = _Call(approval.note)
    send_stdin = _Call(calls.send_stdin)
    cancel = _Call(calls.cancel)
    boost = _Call(calls.boost)
    explain = _Call(calls.explain)
    simulate = _Call(calls.simulate)
    log = _Each(log.log)


class ClientCalls:
    """Calls that belong to no kind."""

    request = _Call(calls.request)
    update_tenant = _Call(calls.update_tenant)
    tenant_quotas = _Call(calls.tenant_quotas)
    tenant_limits = _Call(calls.tenant_limits)
    set_limit = _Call(calls.set_limit)
    unset_limit = _Call(calls.unset_limit)
    quotas = _Each(approval.quotas)
    watch_quotas = _Each(approval.watch_quotas)
    watch_tenant_quotas = _Each(approval.watch_tenant_quotas)
    approvals = _Each(approval.approvals)
    watch_approvals = _Each(approval.watch_approvals)
    decide_approvals = _Call(approval.decide_approvals)
    tenant_usage = _Call(usage.tenant_usage)
    user_usage = _Call(usage.user_usage)
    period_usage = _Call(usage.period_usage)
    export_usage = _Call(usage.export_usage)
    drain = _Call(calls.drain)
    drain_status = _Call(calls.drain_status)
    fence = _Call(calls.fence)
    unfence = _Call(calls.unfence)
    claim = _Call(calls.claim)
    release_node = _Call(calls.release_node)
    wipe = _Call(calls.wipe)
    confirm_wiped = _Call(calls.confirm_wiped)
    claims = _Call(calls.claims)
    certify = _Call(calls.certify)
    authority = _Call(calls.authority)
    preempt = _Call(calls.preempt)
    queue_metrics = _Call(calls.queue_metrics)
    cluster_utilization = _Call(calls.cluster_utilization)
    whoami = _Call(calls.whoami)

    balance = _Call(credit.balance)
    forecast = _Call(credit.forecast)
    statement = _Call(credit.statement)
    statement_csv = _Call(credit.statement_csv)
    top_up = _Call(credit.top_up)
    refund = _Call(credit.refund)
    adjust = _Call(credit.adjust)
    open_lease = _Call(credit.open_lease)
    extend_lease = _Call(credit.extend_lease)
    close_lease = _Call(credit.close_lease)
    lease = _Call(credit.lease)
    leases = _Each(credit.leases)
    report_usage = _Call(credit.report_usage)
    accounts = _Each(credit.accounts)
    open_account = _Call(credit.open_account)
    change_account = _Call(credit.change_account)
    limits = _Call(credit.limits)
    set_limits = _Call(credit.set_limits)
    prices = _Call(credit.prices)
    set_price = _Call(credit.set_price)
    delete_price = _Call(credit.delete_price)
    verify_ledger = _Call(credit.verify_ledger)
    ledger = _Call(credit.ledger)

    webhooks = _Each(webhook.webhooks)
    create_webhook = _Call(webhook.create_webhook)
    delete_webhook = _Call(webhook.delete_webhook)
    test_webhook = _Call(webhook.test_webhook)
    webhook_deliveries = _Each(webhook.webhook_deliveries)
