"""The executor of simulated agents: it pretends to run commands, which start at once and end after their time.

Pure: `now` is monotonic seconds, an argument. The state machine is that of real agents.
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

# The same two settings as environment variables, for work that cannot be annotated.
ENV_SECONDS = "BURSAR_SIM_SECONDS"
ENV_EXIT = "BURSAR_SIM_EXIT"
WIPE = Wipe("true")  # simulated work leaves nothing behind
FEATURES = (TRACELESS, WIPES)
TERMINATED = 128 + 15  # a shell's exit code for SIGTERM


@dataclass(frozen=True, slots=True)
class FakeBehaviour:
    """Default durations; None: for ever. Stopping never takes longer than the grace."""

    default_seconds: float | None = None
    stop_seconds: float = 0.0


@dataclass(slots=True)
class RunTally:
    """Counts running allocations over all nodes, and those that have ended on their last node."""

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
    """The run time: from the annotation, else the environment, else the argument of `sleep`, else the default."""
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
    """One simulated process, and its planned end."""

    ends_at: float
    exit_code: int
    started_at: float
    paid: bool = False
    freezes_at: float = math.inf  # the end of its paid time, if it may be frozen
    frozen_at: float | None = None
    frozen_seconds: float = 0.0

    @property
    def due_at(self) -> float:
        return math.inf if self.frozen_at is not None else min(self.ends_at, self.freezes_at)

    def freeze(self, now: float) -> None:
        self.frozen_at, self.freezes_at = now, math.inf

    def thaw(self, now: float) -> None:
        """Resume; the frozen time is added to the planned end."""
        if self.frozen_at is not None:
            self.frozen_seconds += now - self.frozen_at
            self.ends_at += now - self.frozen_at
            self.frozen_at = None

    def used(self, now: float) -> Usage:
        return Usage(seconds=max(0.0, now - self.started_at - self.frozen_seconds))


class FakeExecutor:
    """The state machine of one simulated agent, and its simulated processes."""

    __slots__ = ("_acts", "_machine", "_manner", "_tally")

    def __init__(self, manner: FakeBehaviour, tally: RunTally) -> None:
        self._machine = Machine()
        self._manner = manner
        self._tally = tally
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
        """Apply timers: first planned ends, then ends that the state machine decides."""
        self._end_due(now)
        if self._machine.next_at <= now:
            self._do(self._machine.due(now), now)
            self._end_due(now)

    # Queries.

    @property
    def next_at(self) -> float:
        """The earliest timer of `due`."""
        return min([self._machine.next_at, *(act.due_at for act in self._acts.values())])

    @property
    def has_news(self) -> bool:
        return self._machine.has_news

    def inventory(self) -> list[PlacementStatus]:
        self._machine.news()  # the inventory contains all of it
        return self._machine.inventory()

    def news(self) -> list[PlacementStatus]:
        return self._machine.news()

    # Instructions.

    def _do(self, instructions: Sequence[Instruction], now: float) -> None:
        """Carry out instructions. The machine enforces deadlines itself; only freezing is simulated here."""
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
        self._tally.begin(run.uid)
        self._do(self._machine.started(run.place, now), now)

    def _move(self, one: MoveDeadline, now: float) -> None:
        act = self._acts.get(one.place)
        if act is None:
            return
        act.freezes_at = one.at if one.freeze_until and act.frozen_at is None else math.inf
        if one.at > now:
            act.thaw(now)

    def _stop(self, place: Place, grace_seconds: float, now: float) -> None:
        """Stop a process; a repeated request never takes longer."""
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
            self._tally.end(place[0])
            if act.paid:
                self._machine.measured({place: act.used(act.ends_at)})
            self._do(self._machine.ended(place, now, exit_code=act.exit_code), now)
