"""Paid work on the whole agent, against a control plane that signs what it grants; or does not, or another does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from joserfc.jwk import OKPKey
from structlog.testing import capture_logs

from bursar.agent.executor.journal import Journal
from bursar.agent.machine.types import PlacementState, Run
from bursar.agent.shim.clock import boot_seconds
from bursar.ops.nodes.signing import Granted, Ring
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.nodes.played_control_plane import NODE, Control, living, serving

pytestmark = pytest.mark.timeout(120)

PLACE = ("a", 1)


def ring(name: str) -> Ring:
    return Ring((OKPKey.generate_key("Ed25519", {"kid": name, "use": "sig", "alg": "Ed25519"}),))


OURS, THEIRS = ring("ours"), ring("ours")


@dataclass
class Paying(Control):
    """Grants paid time with every answer. `seconds` is what it says, and `sign` makes the token."""

    seconds: int = 600
    final: str = ""
    sign: Callable[[Paying, int], str] = lambda its, seq: its.token(seq)
    nonce: str = ""
    last_token: str = ""
    told: Ring = field(default_factory=lambda: OURS)

    def answer(self, heartbeat: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
        answer = Control.answer(self, heartbeat)
        self.nonce = heartbeat.nonce or self.nonce
        answer.leases.append(
            pb.LeaseGrant(
                allocation_id="a", epoch=1, seconds=self.seconds, final=bool(self.final), reason=self.final,
                lease="lease-1",
            )
        )  # fmt: skip
        keys = self.told.public_keys().items()
        answer.signing_keys.extend(pb.SigningKey(id=key_id, public_key=raw) for key_id, raw in keys)
        answer.lease_token = self.last_token = self.sign(self, heartbeat.seq)
        return answer

    def token(self, seq: int, *, by: Ring = OURS, node: str = NODE, nonce: str = "", seconds: int | None = None) -> str:
        lease = Granted("lease-1", "a", 1, self.seconds if seconds is None else seconds, final=bool(self.final))
        return by.sign(node, nonce or self.nonce, seq, [lease])


def wanted(*command: str) -> list[Run]:
    return [Run(*PLACE, "ml", "a", command=command, paid=True)]


def is_said(*states: PlacementState) -> Callable[[Control], object]:
    return lambda control: [one for one in control.statuses("a") if one.state in states]


async def end(control: Paying) -> None:
    """Its lease is closed: that needs no signature."""
    control.seconds, control.final, control.sign = 0, "fenced", lambda *_: ""
    await control.until(is_said(PlacementState.STOPPED))


async def test_paid_work_starts_when_paid_time_was_signed(tmp_path: Path) -> None:
    control = Paying(wanted=wanted("sleep", "600"), beat_seconds=1)  # type: ignore[arg-type]
    async with serving(control), living(tmp_path, control):
        await control.until(is_said(PlacementState.RUNNING))
        before = boot_seconds()
        await control.until(lambda its: its.heartbeats[-1].seq > 3)
        journal = Journal(_copy(tmp_path))
        journal.close()
        paid_window = journal.known.paid_windows[PLACE]
        assert paid_window.paid.lease == "lease-1"
        assert before < paid_window.paid.until <= boot_seconds() + 600
        assert len(paid_window.token.split(".")) == 3
        await end(control)


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(lambda *_: "", id="no token"),
        pytest.param(lambda its, seq: its.token(seq, by=THEIRS), id="another's signature under a known name"),
        pytest.param(lambda its, seq: its.token(seq, node="node-2"), id="another node's"),
        pytest.param(lambda its, seq: its.token(seq, nonce="old"), id="another stream's"),
        pytest.param(lambda its, seq: its.token(seq - 1), id="the beat's before"),
        pytest.param(lambda its, seq: its.token(seq, seconds=599), id="for less than is granted"),
        pytest.param(lambda its, seq: its.token(seq)[:-4], id="cut short"),
    ],
)
async def test_without_a_token_that_is_right_it_waits_and_somebody_is_told(
    tmp_path: Path, sign: Callable[[Paying, int], str]
) -> None:
    control = Paying(wanted=wanted("sleep", "600"), beat_seconds=1, sign=sign)  # type: ignore[arg-type]
    with capture_logs() as logs:
        async with serving(control), living(tmp_path, control):
            await control.until(lambda its: its.heartbeats and its.heartbeats[-1].seq >= 3)
            assert {one.state for one in control.statuses("a")} == {PlacementState.STARTING}
            control.sign = lambda its, seq: its.token(seq)
            await control.until(is_said(PlacementState.RUNNING))
            await end(control)
    told = [one for one in logs if one["event"] == "lease_token_rejected"]
    assert len(told) == 1, "once, and not with every beat"
    assert told[0]["error"]


async def test_what_is_not_signed_prolongs_nothing_that_runs(tmp_path: Path) -> None:
    control = Paying(wanted=wanted("sleep", "600"), beat_seconds=1, seconds=4)  # type: ignore[arg-type]
    async with serving(control), living(tmp_path, control):
        await control.until(is_said(PlacementState.RUNNING))
        control.seconds, control.sign = 600, lambda its, seq: its.token(seq, by=THEIRS)
        (stopped, *_) = await control.until(is_said(PlacementState.STOPPED))
    assert stopped.reason == "LeaseExpired"
    assert stopped.usage.seconds < 60


async def test_a_token_that_is_said_again_prolongs_nothing(tmp_path: Path) -> None:
    control = Paying(wanted=wanted("sleep", "600"), beat_seconds=1, seconds=4)  # type: ignore[arg-type]
    async with serving(control), living(tmp_path, control):
        await control.until(is_said(PlacementState.RUNNING))
        kept = control.last_token
        control.sign = lambda *_: kept
        (stopped, *_) = await control.until(is_said(PlacementState.STOPPED))
    assert stopped.reason == "LeaseExpired"


async def test_a_key_that_was_removed_prolongs_nothing(tmp_path: Path) -> None:
    control = Paying(wanted=wanted("sleep", "600"), beat_seconds=1, seconds=4)  # type: ignore[arg-type]
    async with serving(control), living(tmp_path, control):
        await control.until(is_said(PlacementState.RUNNING))
        control.told = ring("new")
        (stopped, *_) = await control.until(is_said(PlacementState.STOPPED))
    assert stopped.reason == "LeaseExpired"


def _copy(home: Path) -> Path:
    copy = home / "copy"
    copy.write_bytes((home / "work" / "journal").read_bytes())
    return copy
