"""The whole agent in one process, with real commands, against a peer that speaks the protocol."""

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bursar.agent import daemon as daemons
from bursar.agent.host import logs
from bursar.agent.host.probe import Load, Probe
from bursar.agent.machine.types import PlacementState, Run, Stop
from support.nodes.played_control_plane import Control, living, serving

pytestmark = pytest.mark.timeout(120)


def command(uid: str, script: str, **options: object) -> Run:
    return replace(Run(uid, 1, "ml", uid, command=("sh", "-c", script)), **options)  # type: ignore[arg-type]


def is_said(uid: str, *states: PlacementState) -> object:
    return lambda control: [one for one in control.statuses(uid) if one.state in states]


async def test_what_is_wanted_runs_and_is_told_until_it_is_acknowledged(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "exit 3")], beat_seconds=1, acknowledges=False)
    async with serving(control), living(tmp_path, control) as daemon:
        ends = is_said("a", PlacementState.FAILED)
        (end, *_) = await control.until(ends)
        assert end.exit_code == 3
        said = len(control.heartbeats)
        await control.until(lambda its: any(one.pod_statuses for one in its.heartbeats[said + 1 :]))
        control.acknowledges = True
        await control.until(lambda its: its.heartbeats and not its.heartbeats[-1].pod_statuses)
        assert not daemon.snapshot().statuses
    assert not [one for one in control.statuses("a") if one.state is PlacementState.SUCCEEDED]


async def test_what_is_said_between_heartbeats_is_done_at_once(tmp_path: Path) -> None:
    control = Control(beat_seconds=600)
    async with serving(control), living(tmp_path, control):
        await control.until(lambda its: its.heartbeats)
        await control.say(command("a", "exec sleep 600"))
        await control.until(is_said("a", PlacementState.RUNNING))
        await control.say(Stop("a", 1, 0, "Deleted"))
        (end,) = await control.until(is_said("a", PlacementState.STOPPED))
    assert end.reason == "Deleted"


async def test_what_a_whole_set_does_not_name_is_stopped(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "exec sleep 600"), command("b", "exec sleep 600")], beat_seconds=600)
    async with serving(control), living(tmp_path, control):
        await control.until(is_said("a", PlacementState.RUNNING))
        await control.until(is_said("b", PlacementState.RUNNING))
    control = Control(wanted=[command("b", "exec sleep 600")], beat_seconds=600)
    async with serving(control), living(tmp_path, control):
        await control.until(is_said("a", PlacementState.STOPPED))
        first = {one.uid: one.state for one in control.statuses("b")}
        await control.say(Stop("b", 1, 0))
        await control.until(is_said("b", PlacementState.STOPPED))
    assert first == {"b": PlacementState.RUNNING}


async def test_leased_work_waits_for_its_lease(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "exec sleep 600", leased=True)], beat_seconds=1)
    async with serving(control), living(tmp_path, control):
        await control.until(lambda its: len(its.heartbeats) >= 2)
        assert {one.state for one in control.statuses("a")} == {PlacementState.STARTING}
        control.lease_seconds = 600
        await control.until(is_said("a", PlacementState.RUNNING))
        await control.say(Stop("a", 1, 0))
        await control.until(is_said("a", PlacementState.STOPPED))


async def test_leased_work_ends_when_no_lease_comes_any_more(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "exec sleep 600", leased=True)], beat_seconds=1, lease_seconds=3)
    async with serving(control), living(tmp_path, control):
        await control.until(is_said("a", PlacementState.RUNNING))
        control.lease_seconds = 0
        (end, *_) = await control.until(
            is_said("a", PlacementState.STOPPED, PlacementState.FAILED, PlacementState.SUCCEEDED)
        )
    assert (end.state, end.reason) == (PlacementState.STOPPED, "LeaseExpired")


async def test_what_runs_is_measured_and_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons, "USAGE_SECONDS", 0.0)
    monkeypatch.setattr(daemons, "MEASURE_SECONDS", 0.1)
    control = Control(wanted=[command("a", "exec sleep 600")], beat_seconds=1)
    async with serving(control), living(tmp_path, control):
        await control.until(lambda its: any(one.usage.seconds > 0 for one in its.statuses("a")))
        await control.say(Stop("a", 1, 0))
        await control.until(is_said("a", PlacementState.STOPPED))
    assert all(one.current_usage.memory_bytes for one in control.heartbeats)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_node_that_cannot_be_measured_is_an_agents_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    over = threading.Event()

    def load(_: Probe) -> Load:
        if hangs:
            over.wait(30)
        raise OSError(errno.ESTALE, "the disk is away")

    monkeypatch.setattr(Probe, "load", load)
    monkeypatch.setattr(daemons, "FIRST_LOOK_SECONDS_MAX", 0.1)
    control = Control(wanted=[command("a", "exec sleep 600")], beat_seconds=1)
    try:
        async with serving(control), living(tmp_path, control):
            await control.until(is_said("a", PlacementState.RUNNING))
            await control.say(Stop("a", 1, 0))
            await control.until(is_said("a", PlacementState.STOPPED))
    finally:
        over.set()


async def test_what_a_node_has_is_told_first_and_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(daemons, "MEASURE_SECONDS", 0.1)
    probe, control = Probe(tmp_path, fake_gpus=2), Control(beat_seconds=600)
    async with serving(control), living(tmp_path, control, probe=probe):
        await control.until(lambda its: its.heartbeats)
        probe.fake_gpus = 1
        await control.until(lambda its: len(its.heartbeats) == 2)
    assert [heartbeat.capacity["nvidia.com/gpu"] for heartbeat in control.heartbeats] == ["2", "1"]


async def test_draining_stops_everything_and_waits_until_that_is_known(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "exec sleep 600"), Run("b", 1, "ml", "b")], beat_seconds=600)
    async with serving(control), living(tmp_path, control) as daemon:
        await control.until(is_said("a", PlacementState.RUNNING))
        await control.until(is_said("b", PlacementState.RUNNING))
        async with asyncio.timeout(30):
            await daemon.drain()
        assert not daemon.snapshot().statuses
    for uid in ("a", "b"):
        assert control.statuses(uid)[-1].state is PlacementState.STOPPED
        assert control.statuses(uid)[-1].reason == "NodeStopping"


async def test_output_is_found_and_known_to_be_over(tmp_path: Path) -> None:
    control = Control(wanted=[command("a", "echo hello; exec sleep 600")], beat_seconds=600)
    async with serving(control), living(tmp_path, control) as daemon:
        await control.until(is_said("a", PlacementState.RUNNING))
        newest, found = daemon.log(("a", 0)), daemon.log(("a", 1))
        assert newest is not None
        assert found is not None
        folder, ended = found
        piece = await asyncio.wait_for(anext(aiter(logs.read(folder, follow=True, ended=ended))), 20)
        assert piece.data == b"hello\n"
        assert newest[0] == folder
        assert not ended()
        assert not newest[1]()
        assert daemon.log(("b", 0)) is None
        await control.say(Stop("a", 1, 0))
        await control.until(is_said("a", PlacementState.STOPPED))
        assert ended()
        assert newest[1]()
