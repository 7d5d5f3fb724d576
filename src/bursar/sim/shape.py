"""The Node objects of simulated nodes: names, labels and capacity, as a real node would register them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.core.nodes.node import SIMULATED  # the label of simulated nodes: others are neither simulated nor removed
from bursar.sim.fake_executor import FEATURES

GPU = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A number of equal nodes, distributed over racks, and the racks over zones."""

    count: int
    gpus: int = 8
    cpu: int = 96
    memory: str = "768Gi"
    prefix: str = "sim"
    zones: int = 2
    racks: int = 8
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names do not depend on the count, so that a second run finds the nodes of the first."""
        return [f"{self.prefix}-{index:04d}" for index in range(1, self.count + 1)]


def documents(shape: NodeShape, *, tainted: bool = True) -> list[dict[str, Any]]:
    """The Node objects. The taint keeps off commands that users expect to really run."""
    taints = {"taints": [{"key": SIMULATED, "effect": "NoSchedule"}]} if tainted else {}
    capacity = {"cpu": str(shape.cpu), "memory": shape.memory, "pods": "110"}
    kind = {"instance-type": f"sim-{shape.cpu}cpu"}
    if shape.gpus:
        capacity[GPU] = str(shape.gpus)
        kind = {"gpu-type": "nvidia-a100", "instance-type": f"sim-{shape.gpus}gpu"}
    return [
        {
            "metadata": {"name": name, "labels": {**_place(shape, index), **kind, SIMULATED: "true", **shape.labels}},
            "spec": {"capacity": dict(capacity), **taints},
            "status": {"features": list(FEATURES)},
        }
        for index, name in enumerate(shape.names)
    ]


def _place(shape: NodeShape, index: int) -> dict[str, str]:
    rack = index % max(1, shape.racks)
    return {"zone": f"zone-{rack % max(1, shape.zones) + 1}", "rack": f"rack-{rack + 1}"}
