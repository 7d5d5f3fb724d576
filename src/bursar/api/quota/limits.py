"""Handlers of `…/tenants/{name}/limits`: read, set and remove the limits of a tenant, with usage beside them.

The limits are those of `Tenant.spec.limits`: there is no second store. Without one, the tier's default applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from bursar.api.http.action import faulty
from bursar.api.http.body import read_document
from bursar.api.http.params import DRY_RUN, ROOT
from bursar.api.http.route import JSON, Answer, Call, Outcome, Route
from bursar.api.objects.edit import edit_object
from bursar.api.objects.object import find, key_of
from bursar.api.quota.quotas import DimensionQuota, tenant_quotas
from bursar.commands.lifecycle.edit import Document
from bursar.commands.objects.object import not_found
from bursar.core.quota import tenant_tree as rules
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Limit, Row, Tree, limit_on, tenant_scope
from bursar.core.quota.units import units_in
from bursar.core.values.names import qualified_name
from bursar.core.values.quantity import UNLIMITED, format_amount
from bursar.core.values.refusal import Refusal, field_fault
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.tenant import TENANT, Tenant, to_tree
from bursar.wire.shared.document import encode
from bursar.wire.shared.faults import all_faults
from bursar.wire.shared.limits import amounts_faults, dimension_name
from bursar.wire.shared.meta import Quantity

T = TypeVar("T", bound=msgspec.Struct)


class LimitsBody(msgspec.Struct, forbid_unknown_fields=True):
    """All limits of a tenant: others that it has are removed."""

    limits: dict[str, Quantity]


class LimitBody(msgspec.Struct, forbid_unknown_fields=True):
    limit: Quantity


class UnitLimit(msgspec.Struct, rename="camel"):
    """A limit that is written in units: the amounts that one unit stands for, and how many the usage amounts to."""

    limit: str
    source: str
    parts: dict[str, str]
    used: str


class TenantLimits(msgspec.Struct, rename="camel", omit_defaults=True):
    tenant: str
    limits: dict[str, DimensionQuota]
    units: dict[str, UnitLimit] = {}


class TenantLimit(msgspec.Struct, rename="camel"):
    tenant: str
    dimension: str
    limit: str | None
    source: str
    accepted: str
    bound: str
    utilization: float | None = None


def limit_routes() -> Iterator[Route]:
    whole, one = f"{ROOT}/tenants/{{name}}/limits", f"{ROOT}/tenants/{{name}}/limits/{{dimension}}"
    common: dict[str, Any] = {"resource": TENANT.plural, "subresource": "limits", "kind": TENANT}
    yield Route("GET", whole, get_limits, "List a tenant's limits with their sources and usage.", "get",
                answer=TenantLimits, **common)  # fmt: skip
    yield Route("PUT", whole, put_limits, "Set all limits of a tenant; its other limits are removed.", "update",
                params=(DRY_RUN,), body=LimitsBody, answer=TenantLimits, refusals=(409,), **common)  # fmt: skip
    yield Route("DELETE", whole, delete_limits, "Remove all limits of a tenant: those of its tier apply.", "delete",
                params=(DRY_RUN,), answer=TenantLimits, refusals=(409,), **common)  # fmt: skip
    yield Route("GET", one, get_limit, "Read a tenant's limit on a dimension with its source and usage.", "get",
                answer=TenantLimit, **common)  # fmt: skip
    yield Route("PUT", one, put_limit, "Set a tenant's limit on a dimension.", "update",
                params=(DRY_RUN,), body=LimitBody, answer=TenantLimit, refusals=(409,), **common)  # fmt: skip
    yield Route("DELETE", one, delete_limit, "Remove a tenant's limit on a dimension: that of its tier applies.",
                "delete", params=(DRY_RUN,), answer=TenantLimit, refusals=(409,), **common)  # fmt: skip


# Reading.


async def get_limits(call: Call) -> Outcome:
    tree = await _tree(call)
    return tree if isinstance(tree, Refusal) else await _all(call, tree)


async def get_limit(call: Call) -> Outcome:
    if causes := _name_faults(call):
        return faulty("limit", causes)
    tree = await _tree(call)
    return tree if isinstance(tree, Refusal) else await _one(call, tree)


async def _tree(call: Call) -> Tree | Refusal:
    found = await find(call, key_of(call))
    if isinstance(found, Refusal):
        return found
    tree = await call.context.tree(fresh=True)
    return tree if call.parameters["name"] in tree.tenants else not_found(key_of(call))  # deleted since


async def _all(call: Call, tree: Tree) -> Answer:
    name = call.parameters["name"]
    rows = await _load_rows(call, name)
    return Answer(200, encode(TenantLimits(name, tenant_quotas(tree, name, rows).quotas, _units(tree, name, rows))))


def _units(tree: Tree, name: str, rows: Mapping[Row, Counter]) -> dict[str, UnitLimit]:
    """The limits of a tenant that are written in units."""
    tenant, units = tree.tenants[name], tree.quota_policy.units
    tier = tree.tiers.get(tenant.tier)
    used = {dimension: counter.accepted for (_, dimension), counter in rows.items()}
    written = {unit: Limit(value, f"tier:{tenant.tier}") for unit, value in (tier.limits if tier else {}).items()}
    written |= {unit: Limit(value, "override") for unit, value in tenant.limits.items()}
    return {
        unit: UnitLimit(
            format_amount(unit, limit.value), limit.source,
            {part: format_amount(part, each) for part, each in sorted(units[unit].items())},
            format_amount(unit, units_in(units[unit], used)),
        )
        for unit, limit in sorted(written.items())
        if unit in units
    }  # fmt: skip


async def _one(call: Call, tree: Tree) -> Answer:
    name, dimension = call.parameters["name"], _dimension(call)
    rows = await _load_rows(call, name)
    if (unit := _units(tree, name, rows).get(dimension)) is not None:
        bound = units_in(tree.quota_policy.units[dimension], {part: one.bound for (_, part), one in rows.items()})
        shown = TenantLimit(name, dimension, unit.limit, unit.source, unit.used, format_amount(dimension, bound))
        return Answer(200, encode(shown))
    quotas = tenant_quotas(tree, name, rows).quotas
    quota = quotas.get(dimension) or _unused(limit_on(tree, tree.tenants[name], dimension), dimension)
    return Answer(200, encode(TenantLimit(name, dimension, **msgspec.structs.asdict(quota))))


def _unused(limit: Limit, dimension: str) -> DimensionQuota:
    """A dimension of which the tenant uses nothing."""
    shown = format_amount(dimension, limit.value) if limit.value != UNLIMITED else None
    return DimensionQuota(shown, limit.source, "0", "0")


async def _load_rows(call: Call, tenant: str) -> Mapping[Row, Counter]:
    async with call.context.database.reader() as db:
        return await quota_store.load_scopes(db, [tenant_scope(tenant)])


def _dimension(call: Call) -> str:
    return dimension_name(call.parameters["dimension"])


def _name_faults(call: Call) -> list[Any]:
    return [field_fault("dimension", fault) for fault in qualified_name(call.parameters["dimension"])]


# Writing.


async def put_limits(call: Call) -> Outcome:
    body = _read(call, LimitsBody)
    if isinstance(body, Refusal):
        return body
    wanted, request_id = body
    if causes := amounts_faults("limits", wanted.limits):
        return faulty("limits", causes)
    return await _edited(call, lambda _: dict(wanted.limits), request_id, _all)


async def put_limit(call: Call) -> Outcome:
    body = _read(call, LimitBody)
    if isinstance(body, Refusal):
        return body
    wanted, request_id = body
    dimension = _dimension(call)
    if causes := _name_faults(call) or amounts_faults("limit", {dimension: wanted.limit}):
        return faulty("limit", causes)
    own = {dimension: wanted.limit}
    return await _edited(call, lambda limits: {**_without(limits, dimension), **own}, request_id, _one)


async def delete_limits(call: Call) -> Outcome:
    request_id = _request_id(call)
    return request_id if isinstance(request_id, Refusal) else await _edited(call, lambda _: {}, request_id, _all)


async def delete_limit(call: Call) -> Outcome:
    request_id = _request_id(call)
    if isinstance(request_id, Refusal):
        return request_id
    if causes := _name_faults(call):
        return faulty("limit", causes)
    return await _edited(call, lambda limits: _without(limits, _dimension(call)), request_id, _one)


def _without(limits: Document, dimension: str) -> Document:
    """The limits without a dimension, by whichever of its names it is written."""
    return {name: value for name, value in limits.items() if dimension_name(name) != dimension}


async def _edited(call: Call, change: Callable[[Document], Document], request_id: Any, shown: Any) -> Outcome:
    """Change the limits in the tenant's spec; answer with the limits that apply then."""

    def patch(document: Document) -> Document:
        spec = {**(document.get("spec") or {})}
        limits = change(spec.pop("limits", None) or {})
        return {**document, "spec": {**spec, **({"limits": limits} if limits else {})}}

    # The view below is made of the tenant's document, whichever form the caller accepts.
    outcome = await edit_object(replace(call, headers={**call.headers, "accept": JSON}), patch, request_id=request_id)
    if not isinstance(outcome, Answer) or outcome.status >= 300:
        return outcome
    tenant = to_tree(msgspec.json.decode(outcome.body, type=Tenant))
    tree = await call.context.tree(fresh=True)
    # In a dry run, or after a change of somebody else, the tree has other limits than this change gives.
    answer: Answer = await shown(call, rules.with_tenant(tree, tenant))
    return answer


def _read(call: Call, wanted: type[T]) -> tuple[T, Any] | Refusal:
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    request_id = document.pop("request_id", "") if isinstance(document, dict) else ""
    try:
        return msgspec.convert(document, wanted), request_id
    except msgspec.ValidationError as error:
        faults = all_faults(wanted, document) or [("", str(error))]
        return faulty("limits", [field_fault(path, message) for path, message in faults])


def _request_id(call: Call) -> Any:
    """The request id in the body of a DELETE, which may be empty."""
    document = read_document(call) if call.body.strip() else {}
    if isinstance(document, Refusal):
        return document
    return document.get("request_id", "") if isinstance(document, dict) else ""
