"""The agent's machine: tables of what follows from what, and properties of every history."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bursar.agent.machine.state import (
    EXPIRED,
    FENCED,
    GRACE_SECONDS,
    LEASE_EXPIRED,
    NOT_WANTED,
    OF_THE_PAST,
    RETRY_SECONDS,
    SUPERSEDED,
    Forget,
    Instruction,
    Machine,
    MoveDeadline,
    SignalStop,
    Start,
    ThrottlePlacement,
)
from bursar.agent.machine.types import ENDED, LeaseGrant, Place, PlacementState, Run, Stop, Usage

GPU = "nvidia.com/gpu"


def run(
    uid: str = "a",
    epoch: int = 1,
    *,
    leased: bool = False,
    paid: bool = False,
    ttl: int = 0,
    gpus: tuple[int, ...] = (),
) -> Run:
    return Run(
        uid,
        epoch,
        "lab",
        uid,
        command=("sleep", "9"),
        leased=leased,
        paid=paid,
        ttl_seconds=ttl,
        devices={GPU: gpus} if gpus else {},
    )


def state(machine: Machine, place: Place) -> PlacementState | None:
    return next((one.state for one in machine.inventory() if one.place == place), None)


def running(machine: Machine, one: Run, now: float = 0.0) -> None:
    assert Start(one, None) in machine.tell([one], now) or one.leased
    machine.started(one.place, now)


# What follows from what.


def test_what_is_wanted_is_started_once_and_told() -> None:
    machine = Machine()
    assert machine.tell([run()], 0) == [Start(run(), None)]
    assert [one.state for one in machine.news()] == [PlacementState.STARTING]
    assert machine.tell([run()], 1) == []
    machine.started(("a", 1), 2)
    assert [one.state for one in machine.news()] == [PlacementState.RUNNING]
    assert machine.news() == []
    assert machine.tell([run()], 3, complete=True) == []


def test_an_end_is_told_until_it_is_acknowledged_and_forgotten_then() -> None:
    machine = Machine()
    running(machine, run())
    machine.ended(("a", 1), 5, exit_code=3, reason="", message="")
    for _ in range(3):
        assert [(one.state, one.exit_code) for one in machine.news()] == [(PlacementState.FAILED, 3)]
    assert machine.acknowledged([("a", 1), ("b", 1)]) == [Forget(("a", 1))]
    assert machine.news() == []
    assert machine.inventory() == []


def test_an_acknowledgement_of_what_runs_means_nothing() -> None:
    machine = Machine()
    running(machine, run())
    assert machine.acknowledged([("a", 1)]) == []
    assert state(machine, ("a", 1)) is PlacementState.RUNNING


def test_what_has_ended_and_is_wanted_again_is_said_to_be_of_the_past() -> None:
    machine = Machine()
    running(machine, run())
    machine.ended(("a", 1), 1, exit_code=0)
    machine.acknowledged([("a", 1)])
    assert machine.tell([run()], 2) == []
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.FAILED, OF_THE_PAST)]


def test_a_stop_of_what_was_never_here_is_answered() -> None:
    machine = Machine()
    assert machine.tell([Stop("a", 1, reason="Preempted")], 0) == []
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.STOPPED, "Preempted")]
    assert machine.tell([run()], 1) == []


def test_what_was_asked_to_stop_is_stopped_however_it_exits() -> None:
    machine = Machine()
    running(machine, run())
    assert machine.tell([Stop("a", 1, 20, "Preempted", "for b")], 10) == [SignalStop(("a", 1), 20, "Preempted")]
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.STOPPING, "Preempted")]
    machine.ended(("a", 1), 12, exit_code=0)
    told = machine.news()[0]
    assert (told.state, told.reason, told.message, told.exit_code) == (PlacementState.STOPPED, "Preempted", "for b", 0)


def test_a_stop_said_again_may_only_become_sooner() -> None:
    machine = Machine()
    running(machine, run())
    machine.tell([Stop("a", 1, 20)], 10)
    assert machine.tell([Stop("a", 1, 20)], 11) == []
    assert machine.tell([Stop("a", 1, 2, "Other")], 12) == [SignalStop(("a", 1), 2, "")]


def test_what_should_be_dead_is_killed_again() -> None:
    machine = Machine()
    running(machine, run())
    machine.tell([Stop("a", 1, 20)], 10)
    assert machine.next_at == 30 + RETRY_SECONDS
    assert machine.due(30) == []
    assert machine.due(30 + RETRY_SECONDS) == [SignalStop(("a", 1), 0, "")]
    assert machine.next_at == 30 + 2 * RETRY_SECONDS


def test_a_complete_word_stops_whatever_it_does_not_name() -> None:
    machine = Machine()
    running(machine, run("a"))
    running(machine, run("b"))
    running(machine, run("c"))
    done = machine.tell([run("a"), Stop("b", 1, 5)], 1, complete=True)
    assert done == [SignalStop(("b", 1), 5, ""), SignalStop(("c", 1), GRACE_SECONDS, NOT_WANTED)]


def test_a_newer_epoch_starts_when_the_older_has_ended() -> None:
    machine = Machine()
    running(machine, run(epoch=1))
    assert machine.tell([run(epoch=2)], 1) == [SignalStop(("a", 1), 0, SUPERSEDED)]
    assert machine.ended(("a", 1), 2, exit_code=137) == [Start(run(epoch=2), None)]
    assert state(machine, ("a", 1)) is PlacementState.STOPPED


def test_an_older_epoch_is_of_the_past() -> None:
    machine = Machine()
    running(machine, run(epoch=2))
    assert machine.tell([run(epoch=1)], 1) == []
    assert machine.tell([Stop("a", 1)], 1) == []
    assert state(machine, ("a", 2)) is PlacementState.RUNNING
    assert state(machine, ("a", 1)) is PlacementState.FAILED


def test_a_stop_of_a_newer_epoch_ends_the_older_too() -> None:
    machine = Machine()
    running(machine, run(epoch=1))
    assert machine.tell([Stop("a", 2)], 1) == [SignalStop(("a", 1), 0, SUPERSEDED)]
    assert state(machine, ("a", 2)) is PlacementState.STOPPED


def test_devices_are_left_before_they_are_entered() -> None:
    machine = Machine()
    running(machine, run("a", gpus=(0, 1)))
    machine.tell([Stop("a", 1)], 1)
    assert machine.tell([run("b", gpus=(1, 2)), run("c", gpus=(3,))], 2) == [Start(run("c", gpus=(3,)), None)]
    assert machine.ended(("a", 1), 3, exit_code=143) == [Start(run("b", gpus=(1, 2)), None)]


def test_leased_work_waits_for_a_lease_and_ends_with_it() -> None:
    machine = Machine()
    leased = run(leased=True)
    assert machine.tell([leased, run("b")], 100) == [Start(run("b"), None)]
    assert machine.granted(120, 99) == [Start(leased, 219)]
    machine.started(("a", 1), 101)
    assert machine.granted(120, 104) == [MoveDeadline(("a", 1), 224)]
    assert machine.granted(120, 103) == []
    assert machine.granted(0, 110) == []
    assert machine.next_at == 224
    assert machine.due(223) == []
    assert machine.due(224) == [SignalStop(("a", 1), GRACE_SECONDS, LEASE_EXPIRED)]
    assert machine.granted(120, 225) == []
    machine.ended(("a", 1), 230, exit_code=143)
    assert [(one.state, one.reason) for one in machine.news() if one.uid == "a"] == [
        (PlacementState.STOPPED, LEASE_EXPIRED)
    ]


def test_an_old_lease_starts_nothing() -> None:
    machine = Machine()
    machine.granted(10, 0)
    assert machine.tell([run(leased=True)], 11) == []
    assert machine.granted(10, 11) == [Start(run(leased=True), 21)]


def test_a_ttl_ends_what_has_run_for_so_long() -> None:
    machine = Machine()
    running(machine, run(ttl=60), 10)
    assert machine.next_at == 70
    assert machine.due(70) == [SignalStop(("a", 1), GRACE_SECONDS, EXPIRED)]
    machine.ended(("a", 1), 71, exit_code=143)
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.FAILED, EXPIRED)]


def test_what_an_earlier_life_started_goes_on_and_what_it_did_not_waits_to_be_wanted() -> None:
    machine = Machine()
    machine.adopt(run("a"), 0, started=True)
    machine.adopt(run("b"), 0, started=False)
    machine.adopt(run("c"), 0, started=False)
    assert state(machine, ("a", 1)) is PlacementState.RUNNING
    assert machine.tell([run("a"), run("b")], 1, complete=True) == [Start(run("b"), None)]
    assert state(machine, ("c", 1)) is PlacementState.STOPPED


def test_an_earlier_life_told_to_stop_what_ends_now() -> None:
    machine = Machine()
    machine.adopt(run(), 0, started=True)
    machine.ended(("a", 1), 0, exit_code=143, reason="Preempted", stopped=True)
    assert [(one.state, one.reason) for one in machine.news()] == [(PlacementState.STOPPED, "Preempted")]


def test_use_is_told_with_what_is_said_next() -> None:
    machine = Machine()
    running(machine, run())
    machine.news()
    machine.measured({("a", 1): Usage(seconds=5), ("b", 1): Usage()})
    assert machine.news() == []
    machine.ended(("a", 1), 5, exit_code=0)
    assert machine.news()[0].usage == Usage(seconds=5)


# Every history.

UIDS = st.sampled_from("abc")
EPOCHS = st.integers(1, 4)
GPUS = st.sampled_from([(), (0,), (1,), (0, 1)])
LEASES = st.tuples(st.booleans(), st.booleans())  # of its node, and of its own


class Histories(RuleBasedStateMachine):
    """Directives, answers of the executor, leases and crashes, in any order."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.told: list[Run] = []
        self.machine = Machine()
        self.starts: Counter[Place] = Counter()
        self.alive: dict[Place, Run] = {}  # started, and not ended
        self.stopping: set[Place] = set()
        self.limits: dict[Place, ThrottlePlacement] = {}
        self.paid: dict[Place, float] = {}  # until when, as far as was granted
        self.frozen: dict[Place, float] = {}  # until when it may be, as was said last
        self.unacknowledged: set[Place] = set()
        self.past: set[Place] = set()
        self.journal: dict[Place, Run] = {}
        self.highest: dict[str, int] = {}

    def do(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Start):
                assert one.run.epoch == max(self.highest[one.run.uid], one.run.epoch), "an older epoch was started"
                assert not any(place[0] == one.run.uid for place in self.alive), "two epochs at a time"
                if one.run.leased or one.run.paid:
                    assert one.deadline is not None
                    assert one.deadline > self.now
                    self.limits[one.place] = ThrottlePlacement(one.deadline, one.freeze_until, one.reason)
                self.starts[one.place] += 1
                self.alive[one.place] = self.journal[one.place] = one.run
            elif isinstance(one, SignalStop):
                assert one.place in self.alive
                self.stopping.add(one.place)
            elif isinstance(one, MoveDeadline):
                before, after = self.limits[one.place], ThrottlePlacement(one.at, one.freeze_until, one.reason)
                assert after.at >= before.at, "a deadline went back"
                assert after != before, "nothing new was said"
                self.limits[one.place] = after
            else:
                assert one.place not in self.alive
                self.journal.pop(one.place, None)
                self.past.add(one.place)

    def hear_runs(self, runs: list[Run]) -> None:
        for one in runs:
            self.highest[one.uid] = max(one.epoch, self.highest.get(one.uid, 0))

    @rule(uid=UIDS, epoch=EPOCHS, leases=LEASES, gpus=GPUS, ttl=st.sampled_from([0, 5]), twice=st.booleans())
    def want(
        self, uid: str, epoch: int, leases: tuple[bool, bool], gpus: tuple[int, ...], ttl: int, twice: bool
    ) -> None:
        leased, paid = leases
        one = run(uid, epoch, leased=leased, paid=paid, gpus=gpus, ttl=ttl)
        self.told.append(one)
        self.hear_runs([one])
        self.do(self.machine.tell([one], self.now))
        if twice:
            before = self.machine.inventory()
            assert self.machine.tell([one], self.now) == []
            assert self.machine.inventory() == before

    @rule(data=st.data())
    def want_again(self, data: st.DataObject) -> None:
        """Late, or because somebody restored an old database."""
        if self.told:
            one = data.draw(st.sampled_from(self.told))
            self.hear_runs([one])
            self.do(self.machine.tell([one], self.now))

    @rule(uid=UIDS, epoch=EPOCHS, grace=st.integers(0, 9))
    def unwant(self, uid: str, epoch: int, grace: int) -> None:
        self.hear_runs([run(uid, epoch)] if epoch >= self.highest.get(uid, 0) else [])
        self.do(self.machine.tell([Stop(uid, epoch, grace, "Preempted")], self.now))
        before = self.machine.inventory()
        assert self.machine.tell([Stop(uid, epoch, grace, "Preempted")], self.now) == []
        assert self.machine.inventory() == before

    @rule(data=st.data())
    def say_all(self, data: st.DataObject) -> None:
        named = [one for one in self.alive.values() if data.draw(st.booleans())]
        self.do(self.machine.tell(named, self.now, complete=True))
        assert self.alive.keys() - {one.place for one in named} <= self.stopping

    @rule(seconds=st.integers(0, 20), ago=st.integers(0, 5))
    def grant(self, seconds: int, ago: int) -> None:
        self.do(self.machine.granted(seconds, self.now - ago))

    @rule(data=st.data(), seconds=st.integers(0, 20), ago=st.integers(0, 5), freeze=st.sampled_from([-1, 0, 4]))
    def pay(self, data: st.DataObject, seconds: int, ago: int, freeze: int) -> None:
        """Heartbeats for work that is wanted, no longer wanted, or not known yet."""
        place = data.draw(st.tuples(UIDS, EPOCHS))
        grant = LeaseGrant(seconds, "no credit", freeze) if freeze >= 0 else LeaseGrant(seconds)
        known = {one.place for one in self.machine.inventory() if one.state not in ENDED}
        if place in known:
            until = self.now - ago + seconds if seconds else -math.inf
            self.paid[place] = max(self.paid.get(place, -math.inf), until)
            self.frozen[place] = self.paid[place] + max(0, freeze)
        self.do(self.machine.paid({place: grant}, self.now - ago))

    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        if paid := sorted(place for place, one in self.alive.items() if one.paid):
            place = data.draw(st.sampled_from(paid))
            self.do(self.machine.paid({place: LeaseGrant(0, FENCED)}, self.now))
            assert place in self.stopping

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if self.alive:
            self.do(self.machine.started(data.draw(st.sampled_from(sorted(self.alive))), self.now))

    @rule(data=st.data(), code=st.sampled_from([0, 1, 143, None]), twice=st.booleans())
    def end(self, data: st.DataObject, code: int | None, twice: bool) -> None:
        if self.alive:
            place = data.draw(st.sampled_from(sorted(self.alive)))
            del self.alive[place]
            self.stopping.discard(place)
            self.do(self.machine.ended(place, self.now, exit_code=code))
            if twice:
                assert self.machine.ended(place, self.now, exit_code=9) == []

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        places = [one.place for one in self.machine.inventory() if data.draw(st.booleans())]
        self.do(self.machine.acknowledged(places))
        assert self.machine.acknowledged(places) == []

    @rule(seconds=st.integers(0, 10))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.do(self.machine.due(self.now))
        assert self.machine.next_at > self.now
        for place, one in self.alive.items():
            if (one.leased or one.paid) and self.limits[place].end_at <= self.now:
                assert place in self.stopping, "it ran past its deadline"
            if one.paid and max(self.paid[place], self.frozen[place]) <= self.now:
                assert place in self.stopping, "it ran past what was paid for"

    @rule()
    def crash(self) -> None:
        """A new life, that knows what is in the journal."""
        self.machine = Machine()
        self.machine.remember(self.past)
        for place, one in self.journal.items():
            self.machine.adopt(one, self.now, started=True, limit=self.limits.get(place))
            if place not in self.alive:
                self.machine.ended(place, self.now, exit_code=0)
        self.stopping.clear()  # nobody but the shims knows
        self.do(self.machine.due(self.now))
        for uid in list(self.highest):
            self.highest[uid] = max((epoch for one, epoch in self.journal.keys() | self.past if one == uid), default=0)

    @invariant()
    def nothing_is_started_twice(self) -> None:
        assert all(count == 1 for count in self.starts.values()), self.starts

    @invariant()
    def ends_are_told_until_acknowledged(self) -> None:
        ended = {one.place for one in self.machine.inventory() if one.state in ENDED}
        assert {one.place for one in self.machine.news() if one.state in ENDED} == ended
        assert self.machine.news() == [one for one in self.machine.inventory() if one.state in ENDED]
        assert self.journal.keys() - self.alive.keys() <= ended

    @invariant()
    def what_is_alive_is_known(self) -> None:
        known = {one.place: one.state for one in self.machine.inventory()}
        for place in self.alive:
            assert known[place] not in ENDED
            assert (known[place] is PlacementState.STOPPING) == (place in self.stopping)


TestHistories = Histories.TestCase
