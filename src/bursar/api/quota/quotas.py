"""Limits and usage of many scopes at once, as a list and as a watch.

A scope has counters of its own: a tenant, a ResourceQuota of a namespace, or the system. Counters are no objects and
have no history, so a watch begins with the present figures and then sends those of each scope that changed. Figures
change only together with an object of their tenant or with the tenant tree, so they are read again after such a change,
at most every 250 ms.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from bursar.api.http import metrics
from bursar.api.http.route import JSON, Answer, Call, Outcome, Stream
from bursar.api.objects.watch import (
    BOOKMARK_SECONDS,
    INITIAL_END,
    SSE,
    OpenWatch,
    WatchEvents,
    WatchOptions,
    WatchOver,
    check_identity,
    error_piece,
    is_watch,
    no_seat,
    watch_options,
    wrapped,
)
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import (
    DEFAULT_LIMITS,
    SYSTEM_SCOPE,
    Limit,
    ResourceQuota,
    Row,
    Tree,
    effective_limits,
    lineage,
    quota_scope,
    tenant_scope,
)
from bursar.core.values.quantity import UNLIMITED, format_amount
from bursar.core.values.refusal import Refusal, invalid
from bursar.ops.runtime.feed import FedChange, FeedLagging, Follower
from bursar.store.db.database import AWAY
from bursar.store.objects.change import load_position
from bursar.store.quota import quota as store
from bursar.wire.kinds.registry import BY_NAME
from bursar.wire.shared.document import encode

LIMIT_DEFAULT = 500
LIMIT_MAX = 5000
EVERY_SECONDS = 0.25  # the shortest time between two readings of the counters by one watch
STATE_PAGE = 200


class DimensionQuota(msgspec.Struct, rename="camel", omit_defaults=True):
    limit: str | None
    source: str
    accepted: str
    bound: str
    utilization: float | None = None


class TenantQuotas(msgspec.Struct, rename="camel"):
    tenant: str
    enforcement: str
    ancestors: list[str]
    quotas: dict[str, DimensionQuota]


class ScopeQuotas(msgspec.Struct, rename="camel", omit_defaults=True):
    """The limits and the usage of one scope."""

    scope: str  # tenant:NAME, quota:NAMESPACE/NAME, or system: as refusals name it
    enforcement: str
    quotas: dict[str, DimensionQuota]
    tenant: str = ""
    ancestors: list[str] = []
    namespace: str = ""  # of a ResourceQuota
    name: str = ""
    selective: bool = False  # whether it counts only objects that match its scopes


class QuotaList(msgspec.Struct, rename="camel"):
    kind: str
    api_version: str
    metadata: dict[str, str]
    items: list[ScopeQuotas]


def tenant_quotas(tree: Tree, name: str, rows: Mapping[Row, Counter]) -> TenantQuotas:
    """Every dimension that a tenant uses or that has a limit: limit, source, accepted, bound."""
    owner = tree.tenants[name]
    figures = _dimensions(tenant_scope(name), effective_limits(tree, owner), rows)
    return TenantQuotas(name, owner.enforcement, list(lineage(tree, name))[1:], figures)


def _dimensions(scope: str, limits: Mapping[str, Limit], rows: Mapping[Row, Counter]) -> dict[str, DimensionQuota]:
    used = {dimension for one, dimension in rows if one == scope}
    return {
        dimension: _dimension(dimension, limits.get(dimension), rows.get((scope, dimension), Counter()))
        for dimension in sorted(used | set(limits))
    }


def _dimension(dimension: str, limit: Limit | None, counter: Counter) -> DimensionQuota:
    if limit is None and dimension in DEFAULT_LIMITS:
        limit = Limit(DEFAULT_LIMITS[dimension], "default")
    return DimensionQuota(
        limit=format_amount(dimension, limit.value) if limit and limit.value != UNLIMITED else None,
        source=limit.source if limit else "unlimited",
        accepted=format_amount(dimension, counter.accepted),
        bound=format_amount(dimension, counter.bound),
        utilization=round(counter.accepted / limit.value, 4) if limit and limit.value else None,
    )


# The scopes of a caller.


@dataclass(frozen=True, slots=True)
class _Visible:
    """The tenants whose scopes a caller asked for and may see, and whether those of the system are among them."""

    tenants: frozenset[str] | None  # None: all
    system: bool

    def has(self, tenant: str) -> bool:
        return self.tenants is None or tenant in self.tenants


async def _visible(call: Call) -> _Visible:
    seen = await call.context.visible_tenants(call.identity)
    if wanted := call.query.get("tenant", ""):
        return _Visible(frozenset({wanted} if seen is None or wanted in seen else ()), system=False)
    return _Visible(None if seen is None else frozenset(seen), system=seen is None)


def _scopes(tree: Tree, visible: _Visible, touched: Collection[str] | None = None) -> list[str]:
    """The visible scopes in order; with `touched`, only those that count work of these tenants."""
    counted = None if touched is None else {above for name in touched for above in lineage(tree, name)}
    scopes = [tenant_scope(name) for name in (tree.tenants if counted is None else counted) if visible.has(name)]
    for namespace, quotas in tree.quotas.items():
        owner = tree.namespaces[namespace].tenant if namespace in tree.namespaces else ""
        if quotas and visible.has(owner) and (touched is None or owner in touched):
            scopes += [quota_scope(namespace, one.name) for one in quotas]
    if visible.system and tree.system and touched != ():
        scopes.append(SYSTEM_SCOPE)
    return sorted(scopes)


def _shown(tree: Tree, scopes: Iterable[str], rows: Mapping[Row, Counter]) -> list[ScopeQuotas]:
    of_scope: dict[str, dict[Row, Counter]] = {}
    for row, counter in rows.items():
        of_scope.setdefault(row[0], {})[row] = counter
    return [_scope_quotas(tree, scope, of_scope.get(scope, {})) for scope in scopes]


def _scope_quotas(tree: Tree, scope: str, rows: Mapping[Row, Counter]) -> ScopeQuotas:
    kind, _, name = scope.partition(":")
    if kind == "tenant":
        one = tenant_quotas(tree, name, rows)
        return ScopeQuotas(scope, one.enforcement, one.quotas, name, one.ancestors)
    if kind == "quota":
        namespace, _, name = name.partition("/")
        quota = next(one for one in tree.quotas[namespace] if one.name == name)
        return _resource_quota(tree, quota, rows)
    limits = {dimension: Limit(value, "system") for dimension, value in tree.system.items()}
    return ScopeQuotas(scope, "Reject", _dimensions(scope, limits, rows))


def _resource_quota(tree: Tree, quota: ResourceQuota, rows: Mapping[Row, Counter]) -> ScopeQuotas:
    owner = tree.namespaces[quota.namespace].tenant
    limits = {dimension: Limit(value, "resourcequota") for dimension, value in quota.hard.items()}
    return ScopeQuotas(
        quota.scope, quota.enforcement, _dimensions(quota.scope, limits, rows), owner, list(lineage(tree, owner))[1:],
        quota.namespace, quota.name, bool(quota.terms),
    )  # fmt: skip


# The list.


async def list_or_watch_quotas(call: Call) -> Outcome:
    return _watch(call, tenant="") if is_watch(call) else await _list(call)


async def _list(call: Call) -> Outcome:
    limit = call.query.get("limit", "") or str(LIMIT_DEFAULT)
    if not (limit.isascii() and limit.isdigit() and 0 < int(limit[:9]) <= LIMIT_MAX):
        return invalid(f"limit must be a number from 1 to {LIMIT_MAX}")
    tree = await call.context.tree(fresh=True)
    after = call.query.get("continue", "")
    scopes = [scope for scope in _scopes(tree, await _visible(call)) if scope > after]
    page = scopes[: int(limit)]
    async with call.context.database.reader() as db:
        revision = (await load_position(db)).revision
        rows = await store.load_scopes(db, page)
    metadata = {"resourceVersion": str(revision), **({"continue": page[-1]} if len(scopes) > len(page) else {})}
    return Answer(200, encode(QuotaList("QuotaList", "v1", metadata, _shown(tree, page, rows))))


# The watch.


class _QuotaMarks(Follower):
    """A follower that keeps no changes, only the tenants whose usage may have changed; so it never lags."""

    def __init__(self, after: int) -> None:
        super().__init__("", "", after)
        self._tenants: set[str] = set()
        self._tree = False

    def offer(self, fed: FedChange) -> None:
        change = fed.change
        if change.revision <= self.after or self.lagging:
            return
        kind = BY_NAME.get(change.key.kind)
        self._tree = self._tree or (kind is not None and kind.in_tree)
        self._tenants.update(name for name in (change.tenant, change.before_tenant) if name)
        if self._tree or self._tenants:
            self._wake.set()

    async def marked(self, seconds: float) -> bool:
        """Whether anything may have changed within `seconds`."""
        if not self._tree and not self._tenants and not self.lagging:
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
        if self.lagging:
            raise FeedLagging
        return self._tree or bool(self._tenants)

    def take(self) -> tuple[set[str], bool]:
        """The tenants marked since the last call, and whether the tree has changed."""
        taken = self._tenants, self._tree
        self._tenants, self._tree = set(), False
        return taken


@dataclass(slots=True, kw_only=True)
class _QuotaWatch(OpenWatch):
    tenant: str  # of the watch of one tenant; empty: a watch of scopes
    options: WatchOptions
    seen: int = 0
    sent: dict[str, int] = field(default_factory=dict)  # hashes of the figures that were sent, by scope

    async def visible(self) -> _Visible:
        return _Visible(frozenset({self.tenant}), system=False) if self.tenant else await _visible(self.call)

    def events(self, tree: Tree, scopes: Sequence[str], rows: Mapping[Row, Counter]) -> bytes:
        """The events of the scopes whose figures are not those that were sent."""
        pieces = []
        for one in _shown(tree, scopes, rows):
            shown = tenant_quotas(tree, self.tenant, rows) if self.tenant else one
            known, now = self.sent.get(one.scope), hash(encode(shown))
            if known != now:
                self.sent[one.scope] = now
                pieces.append(self._event("ADDED" if known is None else "MODIFIED", msgspec.to_builtins(shown)))
        return b"".join(pieces)

    def gone(self, scopes: Collection[str]) -> bytes:
        """The events of scopes that exist no more, or that the caller may not see any more."""
        pieces = []
        for scope in sorted(self.sent.keys() - scopes):
            del self.sent[scope]
            pieces.append(self._event("DELETED", {"tenant": self.tenant} if self.tenant else {"scope": scope}))
        return b"".join(pieces)

    def bookmark(self, annotations: Mapping[str, str]) -> bytes:
        metadata = {"annotations": dict(annotations)} if annotations else {}
        return self._event("BOOKMARK", {}, **metadata)

    def _event(self, type_: str, shown: dict[str, object], **metadata: object) -> bytes:
        body = encode({"kind": "Quota", "metadata": {"resourceVersion": str(self.seen), **metadata}, **shown})
        return wrapped(self.options.shape, type_, body, self.seen)


def watch_tenant(call: Call) -> Outcome:
    """Watch the quotas of the tenant in the path, which the caller may see."""
    return _watch(call, call.parameters["name"])


def _watch(call: Call, tenant: str) -> Outcome:
    if refusal := no_seat(call):
        return refusal
    options = watch_options(call)
    if isinstance(options, Refusal):
        return options
    one = _QuotaWatch(call=call, until=options.until, tenant=tenant, options=options)
    return Stream(WatchEvents(one, _events(one)), SSE if options.shape == "sse" else JSON)


async def _events(one: _QuotaWatch) -> AsyncGenerator[bytes, None]:
    context = one.call.context
    try:
        # Join before reading: a change between the two is read twice, and sent once.
        one.follower = marks = await context.feed.join(_QuotaMarks)
        async for piece in _read(one, None):
            yield piece
        if one.options.initial:
            yield one.bookmark({INITIAL_END: "true"})
        async for piece in _follow(one, marks):
            yield piece
    except WatchOver as over:
        if over.refusal is not None:
            yield error_piece(one.options.shape, over.refusal, one.call.request_id, one.seen)
    except FeedLagging:
        metrics.WATCHERS_LET_GO.inc()
    except AWAY:
        return  # The client reconnects, and begins with the present figures.


async def _follow(one: _QuotaWatch, marks: _QuotaMarks) -> AsyncGenerator[bytes, None]:
    read_at = marked_at = time.monotonic()
    while time.monotonic() < one.until:
        changed = await marks.marked(one.pause_seconds())
        await check_identity(one)
        if changed:
            await asyncio.sleep(max(0.0, read_at + EVERY_SECONDS - time.monotonic()))
            touched, tree_changed = marks.take()
            async for piece in _read(one, None if tree_changed else touched):
                yield piece
            read_at = time.monotonic()
        elif one.options.shape == "sse":
            yield b": still here\n\n"
        elif one.options.bookmarks and time.monotonic() - marked_at > BOOKMARK_SECONDS:
            marked_at = time.monotonic()
            yield one.bookmark({})


async def _read(one: _QuotaWatch, touched: set[str] | None) -> AsyncGenerator[bytes, None]:
    """Read the figures of the scopes of some tenants, or of all if the tree has changed; send what is new."""
    context = one.call.context
    one.seen = max(one.seen, context.feed.revision)
    tree = await context.tree(fresh=touched is None)
    if touched is not None and not touched <= tree.tenants.keys():
        tree, touched = await context.tree(fresh=True), None
    visible = await one.visible()
    scopes = _scopes(tree, visible, touched)
    if one.tenant:
        scopes = [scope for scope in scopes if scope == tenant_scope(one.tenant)]
    if touched is None and (piece := one.gone(set(scopes))):
        yield piece
    for start in range(0, len(scopes), STATE_PAGE):
        page = scopes[start : start + STATE_PAGE]
        async with context.states.taken(one.call.identity), context.database.reader() as db:
            rows = await store.load_scopes(db, page)
        if piece := one.events(tree, page, rows):
            yield piece
