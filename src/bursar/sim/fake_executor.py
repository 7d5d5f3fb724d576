"""What a simulated agent does in place of running processes: it starts at once, and ends when its time has come.

Pure: `now` is monotonic seconds, an argument. What is wanted, said and remembered is the business of the same machine
that real agents have; only the hands are pretended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bursar.agent.control.codec import TRACELESS, WIPES
from bursar.agent.executor.wipe import Wipe
from bursar.agent.machine.state import Forget, Instruction, Machine, MoveDeadline, SignalStop, Start
from bursar.agent.machine.types import Directive, LeaseGrant, Place, PlacementStatus, Run, Usage
from bursar.sim.work import EXIT, SECONDS, read_exit_code, read_seconds

# The same two notes in the environment, for whoever cannot annotate.
ENV_SECONDS = "BURSAR_SIM_SECONDS"
ENV_EXIT = "BURSAR_SIM_EXIT"
WIPE = Wipe("true")  # what is pretended leaves nothing behind
FEATURES = (TRACELESS, WIPES)
TERMINATED = 128 + 15  # how a shell tells that something was ended by SIGTERM


@dataclass(frozen=True, slots=True)
class FakeBehaviour:
    """How long things take that do not say it; None is for ever. Stopping never takes longer than its grace."""

    default_seconds: float | None = None
    stop_seconds: float = 0.0


@dataclass(slots=True)
class RunTally:
    """What runs on all nodes that share it, by allocation, and how many have left the last of them."""

    places: dict[str, int] = field(default_factory=dict)
    ended: int = 0

    @property
    def running(self) -> int:
        return len(self.places)

    def begin(self, uid: str) -> None:
        self.places[uid] = self.places.get(uid, 0) + 1

    def end(self, uid: str) -> None:
        left = self.places[uid] - 1
        if left:
            self.places[uid] = left
        else:
            del self.places[uid]
            self.ended += 1


def run_seconds(run: Run, manner: FakeBehaviour) -> float:
    """How long it runs: as it is annotated, or as its environment says, or for as long as it sleeps, or as all do."""
    if run.wipe:
        return 0.0
    for told in (run.annotations.get(SECONDS), run.env.get(ENV_SECONDS), _slept(run.command)):
        if (seconds := read_seconds(told)) is not None:
            return seconds
    return math.inf if manner.default_seconds is None else manner.default_seconds


def _slept(command: Sequence[str]) -> str | None:
    return command[1] if len(command) == 2 and command[0].rpartition("/")[2] == "sleep" else None


def exit_code_of(run: Run) -> int:
    return read_exit_code(run.annotations.get(EXIT) or run.env.get(ENV_EXIT))


@dataclass(slots=True)
class _Act:
    """One pretended process, and how it will end if nothing happens before."""

    ends_at: float
    exit_code: int
    started_at: float
    paid: bool = False
    freezes_at: float = math.inf  # when paid time is over, where it may be frozen
    frozen_at: float | None = None
    frozen_seconds: float = 0.0

    @property
    def due_at(self) -> float:
        return math.inf if self.frozen_at is not None else min(self.ends_at, self.freezes_at)

    def freeze(self, now: float) -> None:
        self.frozen_at, self.freezes_at = now, math.inf

    def thaw(self, now: float) -> None:
        """It has still to do what was left to do."""
        if self.frozen_at is not None:
            self.frozen_seconds += now - self.frozen_at
            self.ends_at += now - self.frozen_at
            self.frozen_at = None

    def used(self, now: float) -> Usage:
        return Usage(seconds=max(0.0, now - self.started_at - self.frozen_seconds))


class FakeExecutor:
    """The machine of one simulated agent, with hands that pretend."""

    __slots__ = ("_acts", "_machine", "_manner", "_topology_count")

    def __init__(self, manner: FakeBehaviour, topology_count: RunTally) -> None:
        self._machine = Machine()
        self._manner = manner
        self._topology_count = topology_count
        self._acts: dict[Place, _Act] = {}

    # Events.

    def tell(self, directives: Sequence[Directive], now: float, *, complete: bool = False) -> None:
        wanted = [WIPE.of(one) if isinstance(one, Run) and one.wipe else one for one in directives]
        self._do(self._machine.tell(wanted, now, complete=complete), now)

    def granted(self, seconds: float, sent_at: float, now: float, grace_seconds: float | None = None) -> None:
        self._do(self._machine.granted(seconds, sent_at, grace_seconds), now)

    def paid(self, grants: Mapping[Place, LeaseGrant], sent_at: float, now: float) -> None:
        self._do(self._machine.paid(grants, sent_at), now)

    def acknowledged(self, places: Iterable[Place], now: float) -> None:
        self._do(self._machine.acknowledged(places), now)

    def due(self, now: float) -> None:
        """What has become time: first what ends by itself, then what may not go on."""
        self._end_due(now)
        if self._machine.next_at <= now:
            self._do(self._machine.due(now), now)
            self._end_due(now)

    # What there is.

    @property
    def next_at(self) -> float:
        """When `due` has something to do, at the earliest."""
        return min([self._machine.next_at, *(act.due_at for act in self._acts.values())])

    @property
    def has_news(self) -> bool:
        return self._machine.has_news

    def inventory(self) -> list[PlacementStatus]:
        self._machine.news()  # All of it is told now.
        return self._machine.inventory()

    def news(self) -> list[PlacementStatus]:
        return self._machine.news()

    # The hands.

    def _do(self, instructions: Sequence[Instruction], now: float) -> None:
        """Nothing here outlives the machine, which keeps deadlines itself; only freezing is left to the hands."""
        for one in instructions:
            if isinstance(one, Start):
                self._start(one.run, now)
            elif isinstance(one, MoveDeadline):
                self._move(one, now)
            elif isinstance(one, SignalStop):
                self._stop(one.place, one.grace_seconds, now)
            elif isinstance(one, Forget):
                assert one.place not in self._acts, "only what has ended is forgotten"

    def _start(self, run: Run, now: float) -> None:
        self._acts[run.place] = _Act(now + run_seconds(run, self._manner), exit_code_of(run), now, run.paid)
        self._topology_count.begin(run.uid)
        self._do(self._machine.started(run.place, now), now)

    def _move(self, one: MoveDeadline, now: float) -> None:
        act = self._acts.get(one.place)
        if act is None:
            return
        act.freezes_at = one.at if one.freeze_until and act.frozen_at is None else math.inf
        if one.at > now:
            act.thaw(now)

    def _stop(self, place: Place, grace_seconds: float, now: float) -> None:
        """Asked again, it takes no longer than it would have."""
        act = self._acts.get(place)
        stops_at = now + min(grace_seconds, self._manner.stop_seconds)
        if act is not None:
            act.thaw(now)
            act.freezes_at = math.inf
        if act is not None and stops_at < act.ends_at:
            act.ends_at, act.exit_code = stops_at, TERMINATED

    def _end_due(self, now: float) -> None:
        due = [(place, act) for place, act in self._acts.items() if act.due_at <= now]
        for place, act in due:
            if act.freezes_at < act.ends_at:
                act.freeze(act.freezes_at)
                continue
            del self._acts[place]
            self._topology_count.end(place[0])
            if act.paid:
                self._machine.measured({place: act.used(act.ends_at)})
            self._do(self._machine.ended(place, now, exit_code=act.exit_code), now)
