"""Tenants as resources of an offering: made, limited, restricted and closed over the public API.

A tenant that belongs to Waldur has the label `bursar.io/waldur-resource` with the resource's UUID, and only such
tenants are seen here: whatever Waldur orders, it cannot touch another. Where it is said which resource an order is of,
only the tenant of that one is seen: two resources never share one. While a resource is paused, downscaled or
terminated, some of its limits are held down; what they would be without that is kept in an annotation, and comes back
with it.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bursar.client import Client, Conflict, NotFound
from bursar.core.cost import is_gpu

OWNER: Final = "bursar.io/waldur-resource"
STATE: Final = "bursar.io/waldur-state"
KEPT: Final = "bursar.io/waldur-limits"
TENANT: Final = "bursar.io/tenant"

GPU_HOURS: Final = "gpu_hours"
NODE_HOURS: Final = "node_hours"
BUDGETS: Final = {GPU_HOURS: "gpuHoursBudget", NODE_HOURS: "nodeHoursBudget"}
NODES: Final = "nodes"

LOOK_SECONDS = 0.5

Document = Mapping[str, Any]
Limits = Mapping[str, int]


class State(StrEnum):
    OPEN = ""
    PAUSED = "paused"
    DOWNSCALED = "downscaled"
    TERMINATED = "terminated"


# What is held down meanwhile: nothing new begins. What runs is never stopped for it.
SHUT: Final[Limits] = {"allocations": 0}


class NotYet(Exception):
    """It is under way and takes longer than we wait: ask again later."""


def state_of(document: Document) -> State:
    said = (document["metadata"].get("annotations") or {}).get(STATE, "")
    return State(said) if said in tuple(State) else State.OPEN


def change(document: Document, *, state: State, held: Limits, wanted: Limits | None = None) -> dict[str, Any]:
    """The merge patch that gives a tenant these limits and this state, in which some limits are held down.

    A limit that was held down before comes back as it was, unless it is among the wanted ones or held down again.
    """
    metadata, spec = document["metadata"], document.get("spec") or {}
    kept: dict[str, Any] = json.loads((metadata.get("annotations") or {}).get(KEPT) or "{}")
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


def _quantity(value: Any) -> str | None:
    return None if value is None else str(value)


@dataclass(slots=True)
class Tenants:
    """The tenants of Waldur's on one server. Raises what the client raises."""

    client: Client
    parent: str = ""
    wait_seconds: float = 10.0
    downscaled: Limits = field(default_factory=lambda: {"allocations": 1})

    def find(self, name: str, owner: str = "") -> Document | None:
        """A tenant of Waldur's, or of this one of its resources, that is not terminated."""
        found = self._load(name, owner)
        return found if found is not None and state_of(found) is not State.TERMINATED else None

    def all(self) -> Iterator[Document]:
        for one in self.client.tenants.list(label_selector=OWNER):
            if state_of(one) is not State.TERMINATED:
                yield one

    def put(self, name: str, owner: str, display_name: str, limits: Limits) -> bool:
        """Make a tenant with its namespace, or open it again; False where the name is somebody else's.

        Whatever of this was done before is found done: an order that broke off halfway is just carried out again.
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
        try:
            self.client.tenants.create(document)
        except Conflict:
            found = self._load(name, owner)
            if found is None:
                return False
            self.client.tenants.patch(name, change(found, state=State.OPEN, held={}, wanted=limits))
        self._give_namespace(name)
        return True

    def set_limits(self, name: str, limits: Limits) -> None:
        found = self._wanted(name)
        state = state_of(found)
        self.client.tenants.patch(name, change(found, state=state, held=self._held(state), wanted=limits))

    def set_state(self, name: str, state: State, owner: str = "") -> bool:
        """Whether anything changed."""
        found = self._wanted(name, owner)
        if state_of(found) is state:
            return False
        self.client.tenants.patch(name, change(found, state=state, held=self._held(state)))
        return True

    def delete(self, name: str, owner: str = "") -> None:
        """The tenant, its namespaces, and what runs in them, which is given its grace. Raises NotYet."""
        self.set_state(name, State.TERMINATED, owner)
        for namespace in self._namespaces(name):
            with suppress(NotFound):
                self.client.namespaces.delete(namespace)
        until = time.monotonic() + self.wait_seconds
        while self._namespaces(name):
            if time.monotonic() > until:
                raise NotYet(f"what runs in tenant {name!r} is still ending")
            time.sleep(LOOK_SECONDS)
        self.client.tenants.delete(name)

    def hours(self, name: str, begin: str, end: str) -> dict[str, float]:
        """Hours used from a day to before another one, by resource, and those of all GPUs and of nodes."""
        used: dict[str, float] = {GPU_HOURS: 0.0, NODE_HOURS: 0.0}
        table = csv.DictReader(io.StringIO(self.client.export_usage(name, begin=begin, end=end, by="month")))
        for row in table:
            resource, hours = row["resource"], float(row["hours"])
            used[resource] = used.get(resource, 0.0) + hours
            if is_gpu(resource):
                used[GPU_HOURS] += hours
            elif resource == NODES:
                used[NODE_HOURS] += hours
        return used

    def _held(self, state: State) -> Limits:
        match state:
            case State.OPEN:
                return {}
            case State.DOWNSCALED:
                return self.downscaled
            case State.PAUSED | State.TERMINATED:
                return SHUT

    def _load(self, name: str, owner: str = "") -> Document | None:
        try:
            found = self.client.tenants.get(name)
        except NotFound:
            return None
        label = (found["metadata"].get("labels") or {}).get(OWNER)
        return found if label is not None and owner in ("", label) else None

    def _wanted(self, name: str, owner: str = "") -> Document:
        found = self._load(name, owner)
        if found is None:
            raise NotFound(f'tenants "{name}" of Waldur not found', status=404)
        return found

    def _give_namespace(self, name: str) -> None:
        if self._namespaces(name):
            return
        self.client.namespaces.create({"metadata": {"name": name, "labels": {TENANT: name}}})

    def _namespaces(self, name: str) -> list[str]:
        found = self.client.namespaces.list(label_selector=f"{TENANT}={name}")
        return [one["metadata"]["name"] for one in found]
