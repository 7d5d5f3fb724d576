"""Handlers of tenants beside the common ones: the flat form of PUT, and effective limits with their sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from bursar.api.http.body import CAUSES_IN_MESSAGE_MAX, CAUSES_MAX, read_document
from bursar.api.http.params import ROOT
from bursar.api.http.route import Answer, Call, Outcome, Route
from bursar.api.objects.edit import edit_object, replace_object
from bursar.api.objects.object import find, key_of
from bursar.commands.objects.object import not_found
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, Tree, effective_limits, limit_on, lineage, tenant_scope
from bursar.core.values.patch import merge
from bursar.core.values.quantity import UNLIMITED, format_amount
from bursar.core.values.refusal import Refusal, invalid
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.tenant import BILLING_MODE, FLAT_FIELDS, SOFT_FIELDS, TENANT, merge_from_flat
from bursar.wire.shared.document import encode

Rows: TypeAlias = Mapping[Row, Counter]

_FLAT_HINT = f"max_<dimension> sets a limit; the others are {', '.join((*SOFT_FIELDS, *FLAT_FIELDS, BILLING_MODE))}."


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


def tenant_routes() -> Iterator[Route]:
    yield Route(
        "GET", f"{ROOT}/tenants/{{name}}/quotas", get_quotas, "List effective limits, their sources, and usage.", "get",
        TENANT.plural, "quotas", kind=TENANT, answer=TenantQuotas,
    )  # fmt: skip


async def put_tenant(call: Call) -> Outcome:
    """PUT: a body with metadata or spec replaces the tenant; the flat form changes only the fields it names."""
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    if not isinstance(document, dict):
        return invalid("the body must be an object")
    if "metadata" in document or "spec" in document:
        return await replace_object(call)
    request_id = document.pop("request_id", "")
    if not document:
        return invalid("nothing to change: name at least one field", hint=_FLAT_HINT)
    patch = merge_from_flat(document)
    if isinstance(patch, list):
        listed = "; ".join(one.message for one in patch[:CAUSES_IN_MESSAGE_MAX])
        return invalid(listed, *patch[:CAUSES_MAX], hint=_FLAT_HINT)

    return await edit_object(call, lambda document: merge(document, patch), request_id=request_id)


async def get_quotas(call: Call) -> Outcome:
    """List every dimension that the tenant uses or that has a limit: limit, source, accepted, bound."""
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    tree = await call.context.tree(fresh=True)
    name = call.parameters["name"]
    if name not in tree.tenants:
        return not_found(key_of(call))  # It has been deleted since.
    quotas = dimension_quotas(tree, name, await load_rows(call, name))
    ancestors = list(lineage(tree, name))[1:]
    return Answer(200, encode(TenantQuotas(name, tree.tenants[name].enforcement, ancestors, quotas)))


async def load_rows(call: Call, tenant: str) -> Rows:
    """The counters of a tenant."""
    async with call.context.database.reader() as db:
        return await quota_store.load_scopes(db, [tenant_scope(tenant)])


def dimension_quotas(tree: Tree, tenant: str, rows: Rows) -> dict[str, DimensionQuota]:
    """Every dimension that the tenant uses or that has a limit."""
    dimensions = {dimension for _, dimension in rows} | set(effective_limits(tree, tree.tenants[tenant]))
    return {dimension: dimension_quota(tree, tenant, dimension, rows) for dimension in sorted(dimensions)}


def dimension_quota(tree: Tree, tenant: str, dimension: str, rows: Rows) -> DimensionQuota:
    limit = limit_on(tree, tree.tenants[tenant], dimension)
    counter = rows.get((tenant_scope(tenant), dimension), Counter())
    return DimensionQuota(
        limit=format_amount(dimension, limit.value) if limit.value != UNLIMITED else None,
        source=limit.source,
        accepted=format_amount(dimension, counter.accepted),
        bound=format_amount(dimension, counter.bound),
        utilization=round(counter.accepted / limit.value, 4) if 0 < limit.value < UNLIMITED else None,
    )
