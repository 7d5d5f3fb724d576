"""Figures of reports: hours, what is bound below a tenant, and the highest of what several used together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from bursar.core.credit.cost import breakdown, is_gpu, nano_of
from bursar.core.credit.price import GIB, is_device
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, ScopeTerm, Tree, limits_of, subtree, tenant_scope
from bursar.core.usage.usage_levels import HOUR, NODES, Used, hours
from bursar.core.values.quantity import UNLIMITED, is_bytes

THOUSANDTHS: Final = 1000  # amounts that are not bytes are counted in thousandths

MeteredUse = tuple[str, str]  # (resource, class)
Uses = Mapping[MeteredUse, Used]

MIB: Final = 1 << 20
HOURS_DIGITS: Final = 6  # after the point, when hours are told


class ReportSum(Struct, frozen=True):
    """What uses come to."""

    node_hours: float
    gpu_hours: float
    nano: int  # nanocredits


def add_up(uses: Iterable[tuple[MeteredUse, Used]]) -> ReportSum:
    """Hours of nodes and of GPUs of all classes, and what everything costs."""
    nodes = gpus = 0
    costs: list[tuple[str, int]] = []
    for (resource, _), used in uses:
        nodes += used.total if resource == NODES else 0
        gpus += used.total if is_gpu(resource) else 0
        costs.append((resource, used.cost))
    cost = nano_of(sum(breakdown(costs).values()))
    return ReportSum(round(hours(nodes), HOURS_DIGITS), round(hours(gpus), HOURS_DIGITS), cost)


def together(several: Iterable[Uses]) -> dict[MeteredUse, Used]:
    """The uses of several, by resource and class. Their peaks need not have come at one time: there are none."""
    sums: dict[MeteredUse, Used] = defaultdict(Used)
    for uses in several:
        for metered, one in uses.items():
            known = sums[metered]
            sums[metered] = Used(known.total + one.total, known.cost + one.cost, 0, known.current + one.current)
    return dict(sorted(sums.items()))


def unit_hours(resource: str, total: int) -> float:
    """Hours of one unit: a GPU, a core, a node, a GiB."""
    return round(total / GIB / HOUR if is_bytes(resource) else hours(total), HOURS_DIGITS)


def plain_units(resource: str, amount: int) -> str:
    """An amount as a plain number of its unit, for spreadsheets: `0.5` cores, `128` GiB."""
    units = amount / GIB if is_bytes(resource) else amount / THOUSANDTHS
    return f"{units:.6f}".rstrip("0").rstrip(".")


def unit_of(resource: str) -> str:
    if is_bytes(resource):
        return "GiB"
    if is_device(resource):
        return "device"
    return {"cpu": "core", NODES: "node"}.get(resource, "unit")


def is_metered(dimension: str) -> bool:
    """Whether it is something that is used for a time, and not a number of things, or a bound on what may be used."""
    return dimension in ("cpu", "memory", NODES, "ephemeral-storage") or (
        is_device(dimension) and not dimension.startswith(("limits.", "requests."))
    )


def bound_below(tree: Tree, counters: Mapping[Row, Counter], tenant: str, dimensions: Iterable[str]) -> dict[str, int]:
    """What is placed of a tenant and of all below it. Where a tenant is limited its counter has all of that; else it
    has only the tenant's own."""
    below: dict[str, list[str]] = defaultdict(list)
    for name, other in tree.tenants.items():
        below[other.parent].append(name)

    def bound(name: str, dimension: str) -> int:
        counter = counters.get((tenant_scope(name), dimension))
        own = counter.bound if counter is not None else 0
        if dimension in limits_of(tree, name):
            return own
        return own + sum(bound(child, dimension) for child in below[name])

    return {dimension: bound(tenant, dimension) for dimension in dimensions}


def quotas_below(tree: Tree, tenant: str) -> dict[str, int]:
    """What a tenant and all below it may use, by dimension: the tenant's own limit, else the sum of the ResourceQuotas
    in their namespaces. Of several in one namespace that count the same work the lowest holds."""
    below = subtree(tree, tenant)
    lowest: dict[str, dict[tuple[str, frozenset[ScopeTerm]], int]] = defaultdict(dict)
    for namespace in tree.namespaces.values():
        if namespace.tenant not in below:
            continue
        for quota in tree.quotas.get(namespace.name, ()):
            same = (namespace.name, frozenset(quota.terms))
            for dimension, hard in quota.hard.items():
                lowest[dimension][same] = min(hard, lowest[dimension].get(same, UNLIMITED))
    sums = {dimension: sum(hards.values()) for dimension, hards in lowest.items()}
    own = limits_of(tree, tenant)
    return {name: limit for name, limit in {**sums, **own}.items() if limit < UNLIMITED}


def peaks_together(rows: Iterable[tuple[int, str, int]]) -> dict[str, int]:
    """The highest sum of any hour or day, by resource, from (when, resource, peak) of several: what they may have used
    at one time, and at least what they have."""
    sums: dict[tuple[str, int], int] = defaultdict(int)
    for at, resource, peak in rows:
        sums[resource, at] += peak
    highest: dict[str, int] = {}
    for (resource, _), peak in sums.items():
        highest[resource] = max(highest.get(resource, 0), peak)
    return highest


def average(resource: str, total: int, seconds: int) -> int:
    """The amount that would have been used all the time; large amounts of bytes are told to the MiB."""
    amount = round(total / seconds)
    return round(amount / MIB) * MIB if is_bytes(resource) and amount >= MIB else amount
