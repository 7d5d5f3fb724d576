"""The events of placements that the executor reports to the state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from bursar.agent.machine.state import Instruction, Machine
from bursar.agent.machine.types import Place, Usage


@dataclass(frozen=True, slots=True)
class PlacementStarted:
    place: Place
    at: float


@dataclass(frozen=True, slots=True)
class PlacementEnded:
    place: Place
    at: float
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    stopped: bool = False
    usage: Usage | None = None


Event: TypeAlias = PlacementStarted | PlacementEnded


def hear(machine: Machine, event: Event) -> list[Instruction]:
    """Pass an event to the machine; returns its instructions."""
    if isinstance(event, PlacementStarted):
        return machine.started(event.place, event.at)
    if event.usage is not None:
        machine.measured({event.place: event.usage})
    return machine.ended(
        event.place,
        event.at,
        exit_code=event.exit_code,
        reason=event.reason,
        message=event.message,
        stopped=event.stopped,
    )
