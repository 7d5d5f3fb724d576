"""Wiping a node: the agent runs the wipe hook, with which user, and which results it keeps."""

from pathlib import Path

from bursar.agent.control.codec import read_directive
from bursar.agent.executor.journal import Journal, JournalBegan, began
from bursar.agent.executor.wipe import NO_WIPE, Wipe
from bursar.agent.host.environment import environment, user
from bursar.agent.machine.state import NO_HOOK, NOT_WANTED, Machine, SignalStop, Start
from bursar.agent.machine.types import PlacementState, Run
from bursar.sim.fake_executor import FakeBehaviour, FakeExecutor, RunTally
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.directive_messages import directive_message

WANTED = Run("claim-1", 1, "", "wipe", wipe=True)
HOOK = Wipe("wipe-node --all", 60)


def test_a_directive_to_wipe_is_read_and_written() -> None:
    message = pb.SchedulingDirective(type=pb.DIRECTIVE_TYPE_WIPE, allocation_id="claim-1", epoch=1)
    assert read_directive(message) == WANTED
    assert read_directive(directive_message(WANTED)) == WANTED


def test_the_hook_is_run_by_the_shell_once_for_each_attempt() -> None:
    machine = Machine()
    wanted = HOOK.of(WANTED)
    assert wanted.command == ("/bin/sh", "-c", "wipe-node --all")
    assert wanted.ttl_seconds == 60
    assert machine.tell([wanted], 0, complete=True) == [Start(wanted, None)]
    assert machine.tell([wanted], 1, complete=True) == []
    machine.started(wanted.place, 1)
    machine.ended(wanted.place, 2, exit_code=0)
    assert [(one.place, one.state) for one in machine.news()] == [(("claim-1", 1), PlacementState.SUCCEEDED)]
    machine.acknowledged([wanted.place])
    assert [type(one) for one in machine.tell([HOOK.of(WANTED)], 3)] == [], "an attempt is never made twice"


def test_without_a_hook_it_has_failed_and_is_said_so() -> None:
    machine = Machine()
    assert machine.tell([NO_WIPE.of(WANTED)], 0, complete=True) == []
    (told,) = machine.news()
    assert (told.state, told.reason, "--wipe-hook" in told.message) == (PlacementState.FAILED, NO_HOOK, True)


def test_a_hook_that_is_not_wanted_any_more_is_stopped() -> None:
    machine = Machine()
    wanted = HOOK.of(WANTED)
    machine.tell([wanted], 0)
    machine.started(wanted.place, 0)
    (stop,) = machine.tell([], 1, complete=True)
    assert isinstance(stop, SignalStop)
    assert stop.reason == NOT_WANTED


def test_a_node_is_wiped_when_nothing_runs_on_it_any_more() -> None:
    """What was given up while the node was silent may still write."""
    machine = Machine()
    left = Run("alloc-1", 1, "lab", "study", command=("study",))
    machine.adopt(left, 0, started=True)
    wanted = HOOK.of(WANTED)
    assert [type(one) for one in machine.tell([wanted], 1, complete=True)] == [SignalStop]
    assert machine.due(2) == []
    assert machine.ended(left.place, 3, exit_code=None, stopped=True) == [Start(wanted, None)]


def test_nothing_starts_on_a_node_that_is_being_wiped_or_still_to_be() -> None:
    """An administrator may have said that it is wiped, and others have been placed there since."""
    machine = Machine()
    left = Run("alloc-1", 1, "lab", "study", command=("study",))
    wanted, later = HOOK.of(WANTED), Run("alloc-2", 1, "lab", "train", command=("train",))
    machine.tell([left], 0)
    machine.started(left.place, 0)
    assert machine.tell([wanted], 1) == []
    assert machine.tell([later], 2) == []
    assert machine.ended(left.place, 3, exit_code=0) == [Start(wanted, None)]
    machine.started(wanted.place, 4)
    assert machine.tell([later], 5) == []
    assert machine.ended(wanted.place, 6, exit_code=0) == [Start(later, None)]


def test_what_waits_for_a_wipe_that_is_not_wanted_any_more_starts() -> None:
    machine = Machine()
    left = Run("alloc-1", 1, "lab", "study", command=("study",))
    wanted, later = HOOK.of(WANTED), Run("alloc-2", 1, "lab", "train", command=("train",))
    machine.tell([left], 0)
    machine.tell([wanted, later], 1)
    assert Start(later, None) in machine.tell([left, later], 2, complete=True)


def test_a_hook_that_was_begun_is_adopted_and_one_that_was_not_waits_to_be_wanted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append([began(HOOK.of(WANTED))])
    journal.close()
    (line,) = Journal(tmp_path / "journal").known.began.values()
    assert isinstance(line, JournalBegan)
    assert line.run == HOOK.of(WANTED)
    machine = Machine()
    machine.adopt(line.run, 0, started=False)
    assert machine.tell([], 1) == []
    assert machine.tell([HOOK.of(WANTED)], 2) == [Start(HOOK.of(WANTED), None)]


def test_a_hook_that_was_not_begun_is_the_one_that_the_agent_has_now() -> None:
    """An administrator mends it, and starts the agent again."""
    for now in (Wipe("wipe-better", 60), NO_WIPE):
        machine = Machine()
        machine.adopt(HOOK.of(WANTED), 0, started=False)
        wanted = now.of(WANTED)
        assert machine.tell([wanted], 1) == ([Start(wanted, None)] if now.hook else [])
        assert (machine.inventory()[0].reason == NO_HOOK) is not bool(now.hook)


def test_the_hook_knows_its_node_and_its_claim() -> None:
    env = environment(HOOK.of(WANTED), "gpu-7", user(), {"PATH": "/bin"})
    assert (env["BURSAR_NODE"], env["BURSAR_CLAIM"]) == ("gpu-7", "claim-1")
    plain = environment(Run("alloc-1", 1, "lab", "train"), "gpu-7", user(), {})
    assert "BURSAR_CLAIM" not in plain


def test_a_simulated_node_is_wiped_at_once() -> None:
    pretender = FakeExecutor(FakeBehaviour(), RunTally())
    pretender.tell([WANTED], 0, complete=True)
    pretender.due(0)
    assert [(one.uid, one.state) for one in pretender.news()] == [("claim-1", PlacementState.SUCCEEDED)]
