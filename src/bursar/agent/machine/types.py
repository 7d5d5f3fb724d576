"""The agent's values: directives, grants, states and usage. `control/codec.py` converts them to protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Place: TypeAlias = tuple[str, int]  # (uid, epoch): one placement of one allocation


@dataclass(frozen=True, slots=True)
class Run:
    """A directive to run an allocation on this node. Without a command it is a reservation: nothing is started."""

    uid: str
    epoch: int
    namespace: str
    name: str
    tenant: str = ""
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    ttl_seconds: int = 0  # 0 is unlimited
    leased: bool = False  # it needs the node's run-lease
    paid: bool = False  # it needs paid time
    grace_seconds: int = 30  # from SIGTERM to SIGKILL when its ttl or its lease ends
    nodes: tuple[str, ...] = ()
    exclusive: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)  # those under bursar.io/
    job: str = ""
    job_index: int | None = None
    prepare: bool = False  # call PrepareAllocation before it starts
    wipe: bool = False  # a wipe of the node, not an allocation
    tenant_uid: str = ""  # older servers do not send it

    @property
    def place(self) -> Place:
        return self.uid, self.epoch

    @property
    def owner(self) -> str:
        """The tenant's key on this node: its uid distinguishes it from a later tenant of the same name."""
        return f"{self.tenant}@{self.tenant_uid}" if self.tenant_uid else self.tenant


@dataclass(frozen=True, slots=True)
class Stop:
    """A directive to stop an allocation on this node within the grace period."""

    uid: str
    epoch: int
    grace_seconds: int = 30
    reason: str = ""
    message: str = ""

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


Directive: TypeAlias = Run | Stop


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Paid time of a placement, counted from when the heartbeat was sent."""

    seconds: float
    final: str = ""  # why no more is granted, for now
    freeze_seconds: float = 0.0  # how long it may be frozen after its paid time, before it is stopped


class PlacementState(StrEnum):
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"  # by a directive, or without a lease


ENDED = frozenset({PlacementState.SUCCEEDED, PlacementState.FAILED, PlacementState.STOPPED})


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a placement since its start."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_bytes_max: int = 0
    gpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """The status of a placement in a heartbeat."""

    uid: str
    epoch: int
    state: PlacementState
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    usage: Usage = Usage()

    @property
    def place(self) -> Place:
        return self.uid, self.epoch
