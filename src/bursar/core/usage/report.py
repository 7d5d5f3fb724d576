"""Usage reports: hours and cost, bound amounts and quotas of a tenant's subtree, and combined peaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from bursar.core.credit.cost import breakdown, is_gpu, nano_of
from bursar.core.credit.price import GIB
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, ScopeTerm, Tree, children_of, limits_of, subtree, tenant_scope
from bursar.core.usage.usage_levels import HOUR, NODES, Used, hours
from bursar.core.values.quantity import UNLIMITED, is_bytes, is_device

THOUSANDTHS: Final = 1000  # amounts that are not bytes are counted in thousandths

MeteredUse = tuple[str, str]  # (resource, class)
Uses = Mapping[MeteredUse, Used]

MIB: Final = 1 << 20
HOURS_DIGITS: Final = 6  # decimals of hours in reports


class ReportSum(Struct, frozen=True):
    """The totals of a usage report."""

    node_hours: float
    gpu_hours: float
    nano: int  # nanocredits


def add_up(uses: Iterable[tuple[MeteredUse, Used]]) -> ReportSum:
    """Sum node-hours, GPU-hours of all classes, and cost."""
    nodes = gpus = 0
    costs: list[tuple[str, int]] = []
    for (resource, _), used in uses:
        nodes += used.total if resource == NODES else 0
        gpus += used.total if is_gpu(resource) else 0
        costs.append((resource, used.cost))
    cost = nano_of(sum(breakdown(costs).values()))
    return ReportSum(round(hours(nodes), HOURS_DIGITS), round(hours(gpus), HOURS_DIGITS), cost)


def together(several: Iterable[Uses]) -> dict[MeteredUse, Used]:
    """Sum the uses of several, by resource and class. Peaks are left out: they need not coincide."""
    sums: dict[MeteredUse, Used] = defaultdict(Used)
    for uses in several:
        for metered, one in uses.items():
            known = sums[metered]
            sums[metered] = Used(known.total + one.total, known.cost + one.cost, 0, known.current + one.current)
    return dict(sorted(sums.items()))


def unit_hours(resource: str, total: int) -> float:
    """Convert a total to hours of one unit: a GPU, a core, a node or a GiB."""
    return round(total / GIB / HOUR if is_bytes(resource) else hours(total), HOURS_DIGITS)


def plain_units(resource: str, amount: int) -> str:
    """Format an amount as a plain number of its unit, for spreadsheets: `0.5` cores, `128` GiB."""
    units = amount / GIB if is_bytes(resource) else amount / THOUSANDTHS
    return f"{units:.6f}".rstrip("0").rstrip(".")


def unit_of(resource: str) -> str:
    if is_bytes(resource):
        return "GiB"
    if is_device(resource):
        return "device"
    return {"cpu": "core", NODES: "node"}.get(resource, "unit")


def is_metered(dimension: str) -> bool:
    """Whether the dimension is a resource that is used over time, and not a count of objects or a bound on limits."""
    return dimension in ("cpu", "memory", NODES, "ephemeral-storage") or (
        is_device(dimension) and not dimension.startswith(("limits.", "requests."))
    )


def bound_below(tree: Tree, counters: Mapping[Row, Counter], tenant: str, dimensions: Iterable[str]) -> dict[str, int]:
    """The bound amounts of a tenant's subtree. The counter of a limited dimension includes the descendants; other
    counters have the tenant's own amount only."""
    below = children_of(tree)

    def bound(name: str, dimension: str) -> int:
        counter = counters.get((tenant_scope(name), dimension))
        own = counter.bound if counter is not None else 0
        if dimension in limits_of(tree, name):
            return own
        return own + sum(bound(child, dimension) for child in below.get(name, ()))

    return {dimension: bound(tenant, dimension) for dimension in dimensions}


def quotas_below(tree: Tree, tenant: str) -> dict[str, int]:
    """The quotas of a tenant's subtree by dimension: the tenant's own limit, else the sum of the ResourceQuotas of its
    namespaces. Of several quotas in a namespace with the same scopes the lowest counts."""
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
    """The highest sum of peaks in one hour or day, by resource, from (when, resource, peak): an upper bound of the
    combined peak."""
    sums: dict[tuple[str, int], int] = defaultdict(int)
    for at, resource, peak in rows:
        sums[resource, at] += peak
    highest: dict[str, int] = {}
    for (resource, _), peak in sums.items():
        highest[resource] = max(highest.get(resource, 0), peak)
    return highest


def average(resource: str, total: int, seconds: int) -> int:
    """The average amount over a time; large amounts of bytes are rounded to MiB."""
    amount = round(total / seconds)
    return round(amount / MIB) * MIB if is_bytes(resource) and amount >= MIB else amount
