"""What an agent is told and what it tells: plain values, of which the wire's messages are only another form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Place: TypeAlias = tuple[str, int]  # (uid, epoch): one placement of one allocation


@dataclass(frozen=True, slots=True)
class Run:
    """That an allocation is wanted here. Without a command it is a reservation: nothing is started."""

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
    ttl_seconds: int = 0  # 0 is for ever
    leased: bool = False  # it may run only for as long as its node's lease is granted
    paid: bool = False  # it may run only for as long as it is paid for
    grace_seconds: int = 30  # between asking and killing, when its ttl or its lease is over
    nodes: tuple[str, ...] = ()
    exclusive: bool = False
    annotations: Mapping[str, str] = field(default_factory=dict)  # those under bursar.io/
    job: str = ""
    job_index: int | None = None
    prepare: bool = False  # the control plane is to be asked what it needs before it is started
    wipe: bool = False  # no allocation: the node is to be wiped, by the agent's own user
    tenant_uid: str = ""  # older servers do not say it

    @property
    def place(self) -> Place:
        return self.uid, self.epoch

    @property
    def owner(self) -> str:
        """The tenant, as the node tells it from a later one of the same name."""
        return f"{self.tenant}@{self.tenant_uid}" if self.tenant_uid else self.tenant


@dataclass(frozen=True, slots=True)
class Stop:
    """That an allocation must end here, and how long it may take."""

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
    """Paid time of a placement, from when the beat was sent on."""

    seconds: float
    final: str = ""  # why there is no more of it, for now
    freeze_seconds: float = 0.0  # for how long it may be frozen when paid time is over, before it is ended


class PlacementState(StrEnum):
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"  # because it was asked to


ENDED = frozenset({PlacementState.SUCCEEDED, PlacementState.FAILED, PlacementState.STOPPED})


@dataclass(frozen=True, slots=True)
class Usage:
    """What a placement has used, from its start on."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    memory_bytes_max: int = 0
    gpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """How a placement stands, as it is told in a beat."""

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
