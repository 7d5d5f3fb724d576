"""Tenants as resources of a Waldur offering: created, limited, restricted and closed over the public API.

A tenant of Waldur has the label `bursar.io/waldur-resource` with the resource's UUID. Every change names its resource
and affects only that resource's tenant, so two resources never share one. While a resource is paused, downscaled or
terminated, some of its limits are lowered; the original limits are stored in an annotation and restored afterwards.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bursar.client import Client, Conflict, NotFound
from bursar.core.credit.cost import is_gpu

OWNER: Final = "bursar.io/waldur-resource"
STATE: Final = "bursar.io/waldur-state"
KEPT: Final = "bursar.io/waldur-limits"
TENANT: Final = "bursar.io/tenant"

GPU_HOURS: Final = "gpu_hours"
NODE_HOURS: Final = "node_hours"
BUDGETS: Final = {GPU_HOURS: "gpuHoursBudget", NODE_HOURS: "nodeHoursBudget"}
NODES: Final = "nodes"

LOOK_SECONDS = 0.5
CHANGES_MAX = 10  # attempts under concurrent changes

ALL: Final = ""  # in place of a user: the total, with work that no user submitted

Document = Mapping[str, Any]
TenantLimits = Mapping[str, int]
Hours = dict[str, dict[str, float]]  # by user and resource


class ResourceState(StrEnum):
    OPEN = ""
    PAUSED = "paused"
    DOWNSCALED = "downscaled"
    TERMINATED = "terminated"


# Limits of a paused or terminated resource: no new work begins, running work continues.
SHUT: Final[TenantLimits] = {"allocations": 0}


class NotYet(Exception):
    """The operation takes longer than the wait; the agent retries later."""


class NotTheirs(Exception):
    """The tenant of that name belongs to another owner."""


def whole(value: float, factor: float) -> int:
    """The amount in whole units, without errors of binary fractions: 0.29 x 100 is 29."""
    return int(round(value * factor, 6))


def state_of(document: Document) -> ResourceState:
    said = (document["metadata"].get("annotations") or {}).get(STATE, "")
    return ResourceState(said) if said in tuple(ResourceState) else ResourceState.OPEN


def change(
    document: Document, *, state: ResourceState, held: TenantLimits, wanted: TenantLimits | None = None
) -> dict[str, Any]:
    """The merge patch that gives a tenant a state, its lowered limits (`held`) and the wanted limits.

    A limit that was lowered before is restored, unless it is among the wanted ones or lowered again.
    """
    metadata, spec = document["metadata"], document.get("spec") or {}
    kept = _kept(metadata.get("annotations") or {})
    limits = {name: value for name, value in (wanted or {}).items() if name not in BUDGETS}
    free = {**(spec.get("limits") or {}), **kept, **limits}
    changed = {**kept, **limits, **held}
    keep = {name: free.get(name) for name in held}
    budgets = {BUDGETS[name]: value for name, value in (wanted or {}).items() if name in BUDGETS}
    annotations = {STATE: str(state) or None, KEPT: json.dumps(keep) if keep else None}
    return {
        "metadata": {"resourceVersion": metadata["resourceVersion"], "annotations": annotations},
        "spec": {**budgets, "limits": {name: _quantity(value) for name, value in changed.items()}},
    }


def _kept(annotations: Mapping[str, str]) -> dict[str, Any]:
    """The stored original limits. An unreadable annotation is an error, because guessing would lose limits."""
    try:
        kept = json.loads(annotations.get(KEPT) or "{}")
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"the tenant's annotation {KEPT} cannot be read: remove it, and set its limits anew")
    return kept


def _quantity(value: Any) -> str | None:
    return None if value is None else str(value)


@dataclass(slots=True)
class Tenants:
    """Waldur's tenants on one server. Raises the client's errors."""

    client: Client
    parent: str = ""
    wait_seconds: float = 10.0
    downscaled: TenantLimits = field(default_factory=lambda: {"allocations": 1})

    def find(self, name: str, owner: str = "") -> Document | None:
        """The tenant, unless it is not Waldur's, belongs to another resource, or is terminated."""
        found = self._load(name, owner)
        return found if found is not None and state_of(found) is not ResourceState.TERMINATED else None

    def all(self) -> Iterator[Document]:
        for one in self.client.tenants.list(label_selector=OWNER):
            if state_of(one) is not ResourceState.TERMINATED:
                yield one

    def put(self, name: str, owner: str, display_name: str, limits: TenantLimits) -> bool:
        """Create a tenant with its namespace, or open it again; False if the name belongs to another owner.

        It is idempotent: an order that was interrupted can be repeated.
        """
        document = {
            "metadata": {"name": name, "labels": {OWNER: owner}},
            "spec": {
                "displayName": display_name,
                "limits": {dimension: str(value) for dimension, value in limits.items() if dimension not in BUDGETS},
                **{BUDGETS[budget]: value for budget, value in limits.items() if budget in BUDGETS},
                **({"parent": self.parent} if self.parent else {}),
            },
        }
        if self._load(name, owner) is None and self._is_taken(name):
            return False
        try:
            self.client.tenants.create(document)
        except Conflict:
            if self._load(name, owner) is None:
                return False
            self._change(name, owner, lambda found: change(found, state=ResourceState.OPEN, held={}, wanted=limits))
        self._give_namespace(name)
        return True

    def set_limits(self, name: str, owner: str, limits: TenantLimits) -> None:
        def wanted(found: Document) -> dict[str, Any]:
            state = state_of(found)
            return change(found, state=state, held=self._held(state), wanted=limits)

        self._change(name, owner, wanted)

    def set_state(self, name: str, owner: str, state: ResourceState) -> None:
        def wanted(found: Document) -> dict[str, Any] | None:
            return None if state_of(found) is state else change(found, state=state, held=self._held(state))

        self._change(name, owner, wanted)

    def delete(self, name: str, owner: str) -> None:
        """Delete the tenant, its namespaces and their work, which has its grace period. Raises NotYet."""
        self.set_state(name, owner, ResourceState.TERMINATED)
        for namespace in self._namespaces(name):
            with suppress(NotFound):
                self.client.namespaces.delete(namespace)
        until = time.monotonic() + self.wait_seconds
        while self._namespaces(name):
            if time.monotonic() > until:
                raise NotYet(f"work in tenant {name!r} is still stopping")
            time.sleep(LOOK_SECONDS)
        # The tenant may have another owner by now.
        self._wanted(name, owner)
        self.client.tenants.delete(name)

    def hours(self, name: str, begin: str, end: str) -> Hours:
        """Hours used from `begin` to before `end`, in total and by user and resource, with the sums of all GPUs and of
        nodes. Users of the tenant have plain names, others are `tenant/name`."""
        used: Hours = defaultdict(lambda: defaultdict(float))
        table = csv.DictReader(io.StringIO(self.client.export_usage(name, begin=begin, end=end, by="user")))
        for row in table:
            for user in {ALL, _user(row["user"], name)}:
                _add(used[user], row["resource"], float(row["hours"]))
        return {ALL: {}, **used}

    def _held(self, state: ResourceState) -> TenantLimits:
        match state:
            case ResourceState.OPEN:
                return {}
            case ResourceState.DOWNSCALED:
                return self.downscaled
            case ResourceState.PAUSED | ResourceState.TERMINATED:
                return SHUT

    def _load(self, name: str, owner: str = "") -> Document | None:
        try:
            found = self.client.tenants.get(name)
        except NotFound:
            return None
        label = (found["metadata"].get("labels") or {}).get(OWNER)
        return found if label is not None and owner in ("", label) else None

    def _wanted(self, name: str, owner: str) -> Document:
        """The tenant of a resource; NotFound, or NotTheirs."""
        found = self.client.tenants.get(name)
        label = (found["metadata"].get("labels") or {}).get(OWNER)
        if label != owner:
            fault = "belongs to another resource" if label else f"has no label {OWNER}"
            raise NotTheirs(f"tenant {name!r} is not of Waldur's resource {owner}: it {fault}")
        return found

    def _change(self, name: str, owner: str, wanted: Callable[[Document], dict[str, Any] | None]) -> None:
        """Patch a tenant, with a new attempt after a conflict (optimistic concurrency)."""
        why = ""
        for _ in range(CHANGES_MAX):
            patch = wanted(self._wanted(name, owner))
            if patch is None:
                return
            try:
                self.client.tenants.patch(name, patch)
            except Conflict as error:
                why = error.message
            else:
                return
        raise NotYet(why)

    def _is_taken(self, name: str) -> bool:
        """Whether the namespace of that name belongs to another tenant."""
        try:
            found = self.client.namespaces.get(name)
        except NotFound:
            return False
        return bool((found["metadata"].get("labels") or {}).get(TENANT) != name)

    def _give_namespace(self, name: str) -> None:
        if self._namespaces(name):
            return
        try:
            self.client.namespaces.create({"metadata": {"name": name, "labels": {TENANT: name}}})
        except Conflict:
            # The same order may run twice concurrently.
            if not self._namespaces(name):
                raise

    def _namespaces(self, name: str) -> list[str]:
        found = self.client.namespaces.list(label_selector=f"{TENANT}={name}")
        return [one["metadata"]["name"] for one in found]


def _user(whole: str, tenant: str) -> str:
    """The user's name for Waldur; users without a tenant, such as administrators, count only in the total."""
    owner, slash, name = whole.partition("/")
    if not slash:
        return ALL
    return name if owner == tenant else whole


def _add(used: dict[str, float], resource: str, hours: float) -> None:
    used[resource] += hours
    if is_gpu(resource):
        used[GPU_HOURS] += hours
    elif resource == NODES:
        used[NODE_HOURS] += hours
