"""Handlers of tenants beside the common ones: the flat form of PUT, and effective limits with their sources."""

from __future__ import annotations

from collections.abc import Iterator

from bursar.api.http.body import read_document
from bursar.api.http.params import ROOT, WATCHING
from bursar.api.http.route import Answer, Call, Outcome, Param, Route
from bursar.api.objects.edit import edit_object, replace_object
from bursar.api.objects.object import find, key_of
from bursar.api.objects.watch import is_watch
from bursar.api.quota.quotas import QuotaList, TenantQuotas, list_or_watch_quotas, tenant_quotas, watch_tenant
from bursar.commands.objects.object import not_found
from bursar.core.quota.tenant_tree import tenant_scope
from bursar.core.values.patch import merge
from bursar.core.values.refusal import Refusal, invalid
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.tenant import BILLING_MODE, FLAT_FIELDS, SOFT_FIELDS, TENANT, merge_from_flat
from bursar.wire.shared.document import encode
from bursar.wire.shared.reading import CAUSES_IN_MESSAGE_MAX, CAUSES_MAX

_FLAT_HINT = f"max_<dimension> sets a limit; the others are {', '.join((*SOFT_FIELDS, *FLAT_FIELDS, BILLING_MODE))}."


def tenant_routes() -> Iterator[Route]:
    yield Route(
        "GET", f"{ROOT}/tenants/{{name}}/quotas", get_quotas,
        "List or watch effective limits, their sources, and usage.", "get",
        TENANT.plural, "quotas", kind=TENANT, params=WATCHING, answer=TenantQuotas,
    )  # fmt: skip
    yield Route(
        "GET", f"{ROOT}/quotas", list_or_watch_quotas,
        "List or watch limits and usage of all scopes: tenants, ResourceQuotas and the system.", "list", "quotas",
        answer=QuotaList,
        params=(
            Param("tenant", "Only this tenant and the ResourceQuotas of its namespaces."),
            Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
            Param("continue", "The continue token from the metadata of the previous page."), *WATCHING,
        ),
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
    if is_watch(call):
        return watch_tenant(call)
    tree = await call.context.tree(fresh=True)
    name = call.parameters["name"]
    if name not in tree.tenants:
        return not_found(key_of(call))  # It has been deleted since.
    async with call.context.database.reader() as db:
        rows = await quota_store.load_scopes(db, [tenant_scope(name)])
    return Answer(200, encode(tenant_quotas(tree, name, rows)))
