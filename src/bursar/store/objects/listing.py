"""Lists: objects of one kind that match selectors, in pages, with the revision of the snapshot.

Selectors become SQL whose values are parameters. Rows and revision come from one statement, so a watch that begins at
that revision misses nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bursar.core.objects.object import Key
from bursar.core.values.selector import EVERYTHING, Op, Selector
from bursar.store.db.database import Connection
from bursar.store.objects.change import SeenChange

# The longest pause between two pages of a complete list, during which the transaction stays open.
PAUSE_SECONDS_MAX = 10
# The intended size of a page; its length is estimated from the previous page.
PAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Query:
    kind: str
    namespace: str = ""  # empty: all
    tenants: tuple[str, ...] | None = None  # None: all
    node: str = ""  # only objects placed on this node
    labels: Selector = EVERYTHING
    fields: Selector = EVERYTHING
    after: tuple[str, str] | None = None  # (namespace, name) of the last object of the previous page
    limit: int = 0  # 0: all


@dataclass(frozen=True, slots=True)
class ListedObject:
    namespace: str
    name: str
    tenant: str
    revision: int
    doc: bytes
    status: bytes


@dataclass(frozen=True, slots=True)
class ListPage:
    revision: int
    items: tuple[ListedObject, ...]
    more: bool


class _Where:
    """A list of conditions and the parameters that they refer to."""

    def __init__(self) -> None:
        self.conditions: list[str] = []
        self.parameters: list[Any] = []

    def parameter(self, value: Any) -> str:
        self.parameters.append(value)
        return f"${len(self.parameters)}"

    def add(self, condition: str) -> None:
        self.conditions.append(condition)

    @property
    def text(self) -> str:
        return " AND ".join(self.conditions)


async def load_page(db: Connection, query: Query) -> ListPage:
    """Load a page of items and the revision of the snapshot that it was read in."""
    where = _where(query)
    limit = f"LIMIT {where.parameter(query.limit + 1)}" if query.limit else ""
    rows = await db.fetch(
        "SELECT revision.value AS at, found.* FROM revision LEFT JOIN LATERAL ("
        "SELECT namespace, name, tenant, revision, doc, status FROM object"
        f" WHERE {where.text} ORDER BY namespace, name {limit}) AS found ON true",
        *where.parameters,
    )
    items = [_item(row) for row in rows if row["name"] is not None]
    more = bool(query.limit) and len(items) > query.limit
    return ListPage(rows[0]["at"], tuple(items[: query.limit] if more else items), more)


async def load_all(db: Connection, query: Query, page: int = 500) -> AsyncGenerator[ListPage, None]:
    """Load all items up to the limit in pages from one snapshot, so that every page has the same revision.

    The length of a page follows from the byte size of the previous ones. If all items fit into the first page, a single
    statement reads them without a transaction.
    """
    found = await load_page(db, replace(query, limit=_first(query.limit, page)))
    if not found.more or len(found.items) == query.limit:
        yield found
        return
    async with db.transaction(isolation="repeatable_read", readonly=True):
        await db.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{PAUSE_SECONDS_MAX}s'")
        following = await _following(db, query, found, page, len(found.items))
        if following.revision != found.revision:
            # A change was committed between the two statements: read both pages again, in this snapshot.
            found = await load_page(db, replace(query, limit=_first(query.limit, page)))
            following = await _following(db, query, found, page, len(found.items))
        seen = len(found.items)
        while found.more and seen != query.limit:
            yield found
            found = following
            seen += len(found.items)
            if found.more and seen != query.limit:
                following = await _following(db, query, found, page, seen)
    yield found


def _first(limit: int, page: int) -> int:
    return min(limit, page) if limit else page


async def _following(db: Connection, query: Query, found: ListPage, page: int, seen: int) -> ListPage:
    """Load the next page, or return `found` if it is the last one."""
    if not found.more or seen == query.limit:
        return found
    last = found.items[-1]
    size = sum(len(item.doc) + len(item.status) for item in found.items)
    step = max(1, min(4 * page, PAGE_BYTES * len(found.items) // max(size, 1)))
    limit = min(step, query.limit - seen) if query.limit else step
    return await load_page(db, replace(query, after=(last.namespace, last.name), limit=limit))


async def load_live(db: Connection, query: Query) -> list[SeenChange]:
    """Load all objects as the scheduler reads them."""
    where = _where(query)
    rows = await db.fetch(
        "SELECT revision, kind, namespace, name, uid, tenant, labels, fields, doc, status FROM object"
        f" WHERE {where.text} ORDER BY namespace, name",
        *where.parameters,
    )
    return [
        SeenChange(
            row[0], Key(row[1], row[2], row[3]), row[4], row[5], "ADDED", row[6], row[7], row[8], row[9] or b"{}"
        )
        for row in rows
    ]


async def count(db: Connection, query: Query) -> int:
    where = _where(query)
    return int(await db.fetchval(f"SELECT count(*) FROM object WHERE {where.text}", *where.parameters))


def _item(row: Any) -> ListedObject:
    return ListedObject(
        row["namespace"], row["name"], row["tenant"], row["revision"], row["doc"], row["status"] or b"{}"
    )


def _where(query: Query) -> _Where:
    where = _Where()
    where.add(f"kind = {where.parameter(query.kind)}")
    if query.namespace:
        where.add(f"namespace = {where.parameter(query.namespace)}")
    if query.tenants is not None:
        where.add(f"tenant = ANY({where.parameter(list(query.tenants))}::text[])")
    if query.node:
        where.add(f"uid IN (SELECT uid FROM placement WHERE node = {where.parameter(query.node)})")
    if query.after is not None:
        where.add(f"(namespace, name) > ({where.parameter(query.after[0])}, {where.parameter(query.after[1])})")
    for term in query.labels.terms:
        _add_label_term(where, term.key, term.op, term.values)
    for term in query.fields.terms:
        _add_field_term(where, term.key, term.op, term.values)
    return where


def _add_label_term(where: _Where, key: str, op: Op, values: Sequence[str]) -> None:
    name = where.parameter(key)
    match op:
        case Op.EXISTS:
            where.add(f"labels ? {name}")
        case Op.ABSENT:
            where.add(f"NOT labels ? {name}")
        case Op.IN:
            where.add(f"labels ->> {name} = ANY({where.parameter(list(values))}::text[])")
        case Op.NOT_IN:
            where.add(f"coalesce(labels ->> {name} <> ALL({where.parameter(list(values))}::text[]), true)")


_COLUMNS = {"metadata.name": "name", "metadata.namespace": "namespace"}


def _add_field_term(where: _Where, key: str, op: Op, values: Sequence[str]) -> None:
    column = _COLUMNS.get(key) or f"coalesce(fields ->> {where.parameter(key)}, '')"
    quantifier = "= ANY" if op is Op.IN else "<> ALL"
    where.add(f"{column} {quantifier} ({where.parameter(list(values))}::text[])")
