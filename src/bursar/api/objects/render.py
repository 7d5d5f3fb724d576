"""Rendering of objects for a reader: as stored, with joined figures, or without names of tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bursar.api.http.context import ApiContext
from bursar.api.objects.figures import JOINS, TABLE_JOINS
from bursar.commands.command import Written
from bursar.core.quota.tenant_tree import Tree
from bursar.core.quota.visibility import conceal_grant, is_strangers
from bursar.core.values.access import Identity, Reach, reach
from bursar.core.values.redaction import LAST_APPLIED
from bursar.store.db.database import Database
from bursar.store.objects.listing import ListedObject
from bursar.wire.shared.document import encode, render
from bursar.wire.shared.kind import Kind, read


def shown(written: Written) -> bytes:
    return render(written.doc, written.status, max(written.revision, 0))


def conceals(kind: Kind, reader: Identity) -> bool:
    """Whether this reader sees objects of a kind without the names and figures of tenants that they do not see."""
    return kind.names_tenants is not None and not reach(reader).everything


async def show(context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity) -> list[bytes]:
    """Render the items for this reader."""
    if not items or not (kind.name in JOINS or conceals(kind, reader)):
        return [render(item.doc, item.status, item.revision) for item in items]
    return [encode(document) for document in await _conceal_all(context, kind, items, reader)]


async def rows(
    context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity
) -> list[dict[str, Any]]:
    """Render the items as plain documents for a table, with the figures that only its columns show."""
    plain = await _conceal_all(context, kind, items, reader)
    if kind.name in TABLE_JOINS and plain:
        await TABLE_JOINS[kind.name](context, plain)
    return plain


async def _conceal_all(
    context: ApiContext, kind: Kind, items: Sequence[ListedObject], reader: Identity
) -> list[dict[str, Any]]:
    plain = await documents(context.database, kind, items)
    if conceals(kind, reader):
        whose = reach(reader)
        tree = await context.tree_for(whose)
        for one in plain:
            _conceal(tree, whose, kind, one)
    return plain


def _conceal(tree: Tree, whose: Reach, kind: Kind, document: dict[str, Any]) -> None:
    """Remove the names of tenants that the reader does not see, and figures for such tenants only. A node reads its own
    object unfiltered."""
    grant = kind.names_tenants
    assert grant is not None
    if grant.own and whose.node == document["metadata"]["name"]:
        return
    path, _, field = grant.path.rpartition(".")
    where = (read(document, path, {}) or {}) if path else document
    names = where.get(field) or []
    if (concealed := conceal_grant(tree, whose, names)) == names:
        return
    where[field] = concealed
    # kubectl's last-applied annotation contains the names as well.
    (document["metadata"].get("annotations") or {}).pop(LAST_APPLIED, None)
    if is_strangers(tree, whose, names):
        for figures in grant.figures:
            document["status"].pop(figures, None)


async def documents(database: Database, kind: Kind, items: Sequence[ListedObject]) -> list[dict[str, Any]]:
    """Decode the items to plain documents."""
    plain: list[dict[str, Any]] = [msgspec.json.decode(render(one.doc, one.status, one.revision)) for one in items]
    if kind.name in JOINS and plain:
        async with database.reader() as db:
            await JOINS[kind.name](db, plain)
    return plain


async def show_written(context: ApiContext, kind: Kind, written: Written, reader: Identity) -> bytes:
    key = written.key
    item = ListedObject(key.namespace, key.name, "", max(written.revision, 0), written.doc, written.status)
    (one,) = await show(context, kind, [item], reader)
    return one
