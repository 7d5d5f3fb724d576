"""The agent's state machine: events in, instructions out. It is pure; `now` is an argument.

A placement is one epoch of one allocation on this node. It starts at most once, however often it is directed: epochs
that have ended stay known, and a newer epoch of an allocation supersedes all older ones. The end of a placement is
reported until the control plane acknowledges it.

A placement may need leases: the run-lease of its node, and paid time of its own. When one of them ends, the machine
stops the placement, or freezes it for a while if its account only exceeds its spend rate limit.

The executor carries out the instructions. It answers each `Start` with `started` or `ended`, and each `SignalStop`
eventually with `ended`. For a placement without a command it reports `started` at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from bursar.agent.machine.types import (
    ENDED,
    Directive,
    LeaseGrant,
    Place,
    PlacementState,
    PlacementStatus,
    Run,
    Stop,
    Usage,
)
from bursar.core.values.wording import counted

GRACE_SECONDS = 30  # grace period of a stop that names none
RETRY_SECONDS = 10.0  # between two requests to kill a placement that should be dead
REMEMBERED_MAX = 20_000  # allocations whose newest epoch stays known

EXPIRED = "Expired"  # its ttl is over
LEASE_EXPIRED = "LeaseExpired"
CREDIT_EXHAUSTED = "CreditExhausted"  # its paid time is over, and no more was granted
FROZEN = "SpendRateExceeded"  # the reason of a running placement while it is frozen
FENCED = "fenced"  # `final` of a grant whose lease is closed
INSUFFICIENT_CREDIT = "insufficient_credit"  # `final` of a grant whose account has no credit left
NOT_WANTED = "NotWanted"
SUPERSEDED = "Superseded"  # a newer epoch of the same allocation is placed here
OF_THE_PAST = "OfThePast"  # its end was acknowledged before
NO_HOOK = "NoWipeHook"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a placement, once. At the deadline it is stopped, and after the grace killed, unless the deadline moves."""

    run: Run
    deadline: float | None = None
    grace_seconds: float | None = None  # None: that of the run
    freeze_until: float = 0.0  # freeze it from the deadline until then, before it is stopped; 0: do not freeze
    reason: str = LEASE_EXPIRED

    @property
    def place(self) -> Place:
        return self.run.place


@dataclass(frozen=True, slots=True)
class SignalStop:
    """Stop a placement, and kill it after the grace. A repeated request can only shorten the grace."""

    place: Place
    grace_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MoveDeadline:
    """Move the deadline of a placement. A deadline never moves backwards."""

    place: Place
    at: float
    grace_seconds: float | None = None
    freeze_until: float = 0.0
    reason: str = LEASE_EXPIRED


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget a placement whose end is acknowledged; only its place stays known."""

    place: Place


Instruction: TypeAlias = Start | SignalStop | MoveDeadline | Forget


class ThrottlePlacement(NamedTuple):
    """When a placement must be stopped or frozen, and the reason of its end."""

    at: float
    freeze_until: float = 0.0
    reason: str = LEASE_EXPIRED

    @property
    def end_at(self) -> float:
        return max(self.at, self.freeze_until)


NO_LIMIT = ThrottlePlacement(math.inf)


@dataclass(slots=True)
class _Held:
    """One placement, from its directive until its end is acknowledged."""

    run: Run
    state: PlacementState = PlacementState.STARTING
    wanted: bool = True  # directed since this agent process started
    handed: bool = False  # to the executor: from then on only the executor can report its end
    leased_until: float = -math.inf
    paid_until: float = -math.inf
    final: str = ""  # why no more paid time is granted, for now
    freeze_seconds: float = 0.0
    limit: ThrottlePlacement = NO_LIMIT
    frozen: bool = False  # its paid time is over, and the shim has frozen it
    expires_at: float = math.inf
    stop: Stop | None = None
    kill_at: float = math.inf
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    usage: Usage = field(default_factory=Usage)

    @property
    def live(self) -> bool:
        return self.state not in ENDED

    @property
    def due_at(self) -> float:
        if not self.live or not self.handed:
            return math.inf
        if self.state is PlacementState.STOPPING:
            return self.kill_at + RETRY_SECONDS
        return min(self.expires_at, self.limit.end_at if self.frozen else self.limit.at)

    def new_limit(self) -> ThrottlePlacement:
        """The limit that its leases set. A frozen placement still needs the node's run-lease."""
        leased_until = self.leased_until if self.run.leased else math.inf
        if not self.run.paid or leased_until <= self.paid_until:
            return ThrottlePlacement(leased_until)
        if not self.final:
            return ThrottlePlacement(self.paid_until)
        freeze_until = self.paid_until + self.freeze_seconds
        if not self.freeze_seconds or freeze_until < leased_until:
            return ThrottlePlacement(self.paid_until, freeze_until if self.freeze_seconds else 0.0, CREDIT_EXHAUSTED)
        return ThrottlePlacement(self.paid_until, leased_until)


class Machine:
    """All placements of one node."""

    def __init__(self) -> None:
        self._held: dict[Place, _Held] = {}
        self._newest: dict[str, int] = {}  # the highest epoch ever held, by uid; in order of arrival
        self._waiting: dict[Place, None] = {}  # not handed to the executor yet
        self._news: dict[Place, None] = {}
        self._granted = -math.inf  # the end of the node's run-lease
        self._grace_seconds: float | None = None  # grace period of placements without a lease
        self._now = -math.inf

    # Events.

    def adopt(
        self,
        run: Run,
        now: float,
        *,
        started: bool,
        started_at: float | None = None,
        limit: ThrottlePlacement | None = None,
    ) -> list[Instruction]:
        """Adopt a placement of the previous agent process. If it had not started, it waits for a new directive: the
        allocation may run elsewhere by now."""
        self._at(now)
        if run.place in self._held or (not started and run.epoch < self._newest.get(run.uid, run.epoch)):
            return []
        held = self._hold(run)
        held.wanted = False
        if started:
            self._hand(held)
            if limit is not None:
                held.leased_until = held.paid_until = limit.at
                held.limit = limit
                if limit.freeze_until or limit.reason != LEASE_EXPIRED:
                    held.final, held.freeze_seconds = limit.reason, max(0.0, limit.freeze_until - limit.at)
            self._run_from(held, now if started_at is None else started_at)
        return []

    def remember(self, places: Iterable[Place]) -> None:
        """Remember places whose end was acknowledged to the previous agent process."""
        for uid, epoch in places:
            self._note(uid, epoch)

    def tell(self, directives: Sequence[Directive], now: float, *, complete: bool = False) -> list[Instruction]:
        """Apply directives. If they are the `complete` wanted set, every other placement is stopped."""
        self._at(now)
        done: list[Instruction] = []
        for directive in directives:
            if isinstance(directive, Run):
                done += self._want(directive)
            else:
                done += self._unwant(directive)
        if complete:
            done += self._stop_all_but({directive.place for directive in directives})
        return done + self._start_ready()

    def started(self, place: Place, now: float) -> list[Instruction]:
        """The placement runs from now on."""
        self._at(now)
        held = self._held.get(place)
        if held is not None and held.state is PlacementState.STARTING and held.handed:
            self._run_from(held, now)
        return []

    def ended(
        self,
        place: Place,
        now: float,
        *,
        exit_code: int | None,
        reason: str = "",
        message: str = "",
        stopped: bool = False,
    ) -> list[Instruction]:
        """The placement has ended or failed to start; no process of it runs. `stopped` says that a stop was requested,
        which may have been by the previous agent process."""
        self._at(now)
        held = self._held.get(place)
        if held is None or not held.live:
            return []
        self._hand(held)
        if held.stop is not None:
            stopped, reason, message = True, held.stop.reason, held.stop.message or message
        self._end(held, _how(exit_code, reason, stopped), reason, message, exit_code)
        return self._start_ready()

    def measured(self, usages: Mapping[Place, Usage]) -> None:
        """Update usage. It is sent with the next report of a placement, and is no news by itself."""
        for place, usage in usages.items():
            if (held := self._held.get(place)) is not None:
                held.usage = usage

    def granted(self, seconds: float, sent_at: float, grace_seconds: float | None = None) -> list[Instruction]:
        """Extend the node's run-lease to `seconds` after the heartbeat was sent."""
        if grace_seconds is not None:
            self._grace_seconds = grace_seconds
        done: list[Instruction] = []
        if seconds > 0:
            self._granted = max(sent_at + seconds, self._granted)
            for held in self._held.values():
                if held.run.leased and held.live:
                    held.leased_until = max(held.leased_until, self._granted)
                    done += self._move(held)
        return done + self._start_ready()

    def paid(self, grants: Mapping[Place, LeaseGrant], sent_at: float) -> list[Instruction]:
        """Apply grants of paid time, counted from when the heartbeat was sent. A later grant replaces a final one."""
        done: list[Instruction] = []
        for place, grant in grants.items():
            held = self._held.get(place)
            if held is None or not held.live or not held.run.paid:
                continue
            if grant.final == FENCED:
                done += self._stop(held, Stop(*place, 0, LEASE_EXPIRED, "the lease that pays for it was closed"))
                continue
            if grant.seconds > 0:
                held.paid_until = max(held.paid_until, sent_at + grant.seconds)
            held.final, held.freeze_seconds = grant.final, grant.freeze_seconds
            done += self._move(held)
        return done + self._start_ready()

    def acknowledged(self, places: Iterable[Place]) -> list[Instruction]:
        """The control plane has recorded these ends. Placements that have not ended are skipped."""
        done: list[Instruction] = []
        for place in places:
            held = self._held.get(place)
            if held is not None and not held.live:
                del self._held[place]
                self._news.pop(place, None)
                done.append(Forget(place))
        return done

    def due(self, now: float) -> list[Instruction]:
        """Apply expired timers: stop or freeze placements whose time is over, and repeat kills."""
        self._at(now)
        done: list[Instruction] = []
        for held in [held for held in self._held.values() if held.due_at <= now]:
            if held.state is PlacementState.STOPPING:
                held.kill_at = now
                done.append(SignalStop(held.run.place, 0, held.stop.reason if held.stop else ""))
            elif held.expires_at <= now:
                message = f"reached its ttl of {counted(held.run.ttl_seconds, 'second')}"
                done += self._stop(held, Stop(*held.run.place, held.run.grace_seconds, EXPIRED, message))
            elif now < held.limit.freeze_until:
                self._set_frozen(held, True)
            else:
                grace = held.run.grace_seconds if self._grace_seconds is None else int(self._grace_seconds)
                done += self._stop(held, Stop(*held.run.place, grace, held.limit.reason, _why_over(held)))
        return done

    # Queries.

    @property
    def next_at(self) -> float:
        """The earliest timer of `due`."""
        return min((held.due_at for held in self._held.values()), default=math.inf)

    def inventory(self) -> list[PlacementStatus]:
        """All placements that run, or whose end is not acknowledged."""
        return [_status(held) for held in self._held.values()]

    @property
    def has_news(self) -> bool:
        """Whether a status changed since the last heartbeat, which then is sent early."""
        return bool(self._news)

    def news(self) -> list[PlacementStatus]:
        """The statuses that changed since the last call, and every unacknowledged end."""
        places, self._news = self._news, {}
        statuses = [_status(held) for place in places if (held := self._held.get(place)) is not None]
        statuses += [_status(held) for place, held in self._held.items() if not held.live and place not in places]
        return statuses

    # The rules.

    def _want(self, run: Run) -> list[Instruction]:
        """Accept a directive to run. A known place or an older epoch is not started again. An older epoch is reported
        with the reason OfThePast, so that the control plane does not wait for it."""
        held = self._held.get(run.place)
        if held is not None:
            held.wanted = True
            if not held.handed and held.live and run.epoch < self._newest[run.uid]:
                self._end(
                    held, PlacementState.STOPPED, SUPERSEDED, f"epoch {self._newest[run.uid]} was placed here", None
                )
            elif run.wipe and not held.handed and held.live:
                held.run = run  # with the current hook, not that of the previous agent process
                self._check_hook(held)
            return []
        if run.epoch <= self._newest.get(run.uid, run.epoch - 1):
            self._end(self._hold(run), PlacementState.FAILED, OF_THE_PAST, "it has ended on this node before", None)
            return []
        done = self._supersede(run.uid, run.epoch)
        self._check_hook(self._hold(run))
        return done

    def _check_hook(self, held: _Held) -> None:
        if held.run.wipe and not held.run.command:
            self._end(held, PlacementState.FAILED, NO_HOOK, "the agent has no --wipe-hook", None)

    def _supersede(self, uid: str, epoch: int) -> list[Instruction]:
        """Stop older epochs of an allocation: a newer one implies that they are over."""
        done: list[Instruction] = []
        for one in [one for one in self._held.values() if one.run.uid == uid and one.live and one.run.epoch < epoch]:
            done += self._stop(one, Stop(*one.run.place, 0, SUPERSEDED, f"epoch {epoch} was placed here"))
        return done

    def _stop_all_but(self, named: set[Place]) -> list[Instruction]:
        done: list[Instruction] = []
        for place in [place for place, held in self._held.items() if held.live and place not in named]:
            stop = Stop(*place, GRACE_SECONDS, NOT_WANTED, "the control plane has not placed it on this node")
            done += self._stop(self._held[place], stop)
        return done

    def _unwant(self, stop: Stop) -> list[Instruction]:
        """Apply a stop directive. An unknown placement is reported as ended, because the control plane waits for that
        report. A placement of an older epoch is not: its end was reported before."""
        held = self._held.get(stop.place)
        if held is None:
            if stop.epoch < self._newest.get(stop.uid, stop.epoch):
                return []
            done = self._supersede(stop.uid, stop.epoch)
            held = self._hold(Run(stop.uid, stop.epoch, "", ""))
            return done + self._stop(held, stop)
        return self._stop(held, stop) if held.live else []

    def _stop(self, held: _Held, stop: Stop) -> list[Instruction]:
        if not held.handed:
            self._end(held, PlacementState.STOPPED, stop.reason, stop.message, None)
            return []
        kill_at = self._now + stop.grace_seconds
        if held.state is PlacementState.STOPPING and kill_at >= held.kill_at:
            return []
        if held.stop is None:
            held.stop = stop
        held.kill_at = kill_at
        self._enter(held, PlacementState.STOPPING)
        return [SignalStop(held.run.place, stop.grace_seconds, held.stop.reason)]

    def _start_ready(self) -> list[Instruction]:
        ready = [held for place in self._waiting if self._ready(held := self._held[place])]
        for held in ready:
            self._hand(held)
        return [self._start(held) for held in ready]

    def _start(self, held: _Held) -> Start:
        at, freeze_until, reason = held.limit = held.new_limit()
        return Start(held.run, None if at == math.inf else at, self._grace_seconds, freeze_until, reason)

    def _hand(self, held: _Held) -> None:
        held.handed = True
        self._waiting.pop(held.run.place, None)

    def _ready(self, held: _Held) -> bool:
        """A placement starts if it is directed, has the leases it needs, and no placement holds its devices."""
        if not held.wanted:
            return False
        if held.new_limit().at <= self._now:
            return False
        return not any(_in_the_way(other, held) for other in self._held.values())

    def _move(self, held: _Held) -> list[Instruction]:
        """Move the deadline if it changed. A stopping placement has a deadline too, because its grace may be long. A
        placement that is stopping for lack of a lease is not revived."""
        over = held.stop is not None and held.stop.reason in (LEASE_EXPIRED, CREDIT_EXHAUSTED)
        if over or not held.handed or (limit := held.new_limit()) == held.limit:
            return []
        held.limit = limit
        self._set_frozen(held, held.frozen and limit.at <= self._now < limit.freeze_until)
        return [MoveDeadline(held.run.place, limit.at, self._grace_seconds, limit.freeze_until, limit.reason)]

    def _hold(self, run: Run) -> _Held:
        held = self._held[run.place] = _Held(run, leased_until=self._granted)
        self._note(run.uid, run.epoch)
        self._waiting[run.place] = None
        self._news[run.place] = None
        return held

    def _note(self, uid: str, epoch: int) -> None:
        """Remember the newest epoch. The oldest entries are forgotten first, but never those of held placements."""
        self._newest[uid] = max(epoch, self._newest.pop(uid, epoch))
        if len(self._newest) > REMEMBERED_MAX + len(self._held):
            held = {uid for uid, _ in self._held}
            del self._newest[next(one for one in self._newest if one not in held)]

    def _run_from(self, held: _Held, since: float) -> None:
        if held.run.ttl_seconds:
            held.expires_at = since + held.run.ttl_seconds
        self._enter(held, PlacementState.RUNNING)

    def _end(self, held: _Held, state: PlacementState, reason: str, message: str, exit_code: int | None) -> None:
        self._waiting.pop(held.run.place, None)
        held.reason, held.message, held.exit_code = reason, message, exit_code
        self._enter(held, state)

    def _enter(self, held: _Held, state: PlacementState) -> None:
        if held.state is not state:
            held.state = state
            self._news[held.run.place] = None

    def _set_frozen(self, held: _Held, frozen: bool) -> None:
        if held.frozen is not frozen:
            held.frozen = frozen
            self._news[held.run.place] = None

    def _at(self, now: float) -> None:
        self._now = max(self._now, now)


def _in_the_way(other: _Held, held: _Held) -> bool:
    """Whether `other` must end before `held` starts: an older epoch of the same allocation, or a stopping placement
    with its devices. A wipe starts when nothing else runs, and nothing starts before it ends."""
    if other is held or not other.live:
        return False
    if other.run.wipe and not held.run.wipe:
        return True
    if not other.handed:
        return False
    if held.run.wipe or other.run.uid == held.run.uid:
        return True
    return other.state is PlacementState.STOPPING and any(
        set(indices) & set(other.run.devices.get(resource, ())) for resource, indices in held.run.devices.items()
    )


def _why_over(held: _Held) -> str:
    if held.limit.reason == LEASE_EXPIRED:
        return "the node's run-lease was not extended in time"
    if held.limit.freeze_until:
        seconds = round(held.limit.freeze_until - held.limit.at)
        return f"stopped: over the spend rate limit, after {counted(seconds, 'second')} frozen"
    if held.final == INSUFFICIENT_CREDIT:
        return "stopped: its account ran out of credit"
    return f"stopped: no more time was granted ({held.final})"


def _how(exit_code: int | None, reason: str, stopped: bool) -> PlacementState:
    """The final state. A placement that reached its ttl has failed."""
    if reason == EXPIRED:
        return PlacementState.FAILED
    if stopped or reason in (LEASE_EXPIRED, CREDIT_EXHAUSTED):
        return PlacementState.STOPPED
    return PlacementState.SUCCEEDED if exit_code == 0 and not reason else PlacementState.FAILED


def _status(held: _Held) -> PlacementStatus:
    state, stop = held.state, held.stop
    if state is PlacementState.STOPPING and stop is not None:
        return PlacementStatus(*held.run.place, state, stop.reason, stop.message, None, held.usage)
    if state is PlacementState.RUNNING and held.frozen:
        return PlacementStatus(
            *held.run.place, state, FROZEN, "its account is over its spend rate limit", None, held.usage
        )
    return PlacementStatus(*held.run.place, state, held.reason, held.message, held.exit_code, held.usage)
