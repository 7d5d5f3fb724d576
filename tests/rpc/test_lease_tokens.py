"""Grants to a node are signed: for that node, that stream and that heartbeat, with keys that the stream has
received."""

from __future__ import annotations

from typing import Any

from bursar.agent.control.codec import read_answer
from bursar.agent.machine.lease_token import Believed, Distrusted, Trust
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes.signing import Ring, rotate
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.credit.ledgers import funded, priced
from support.nodes.agent_streams import Agent, Served, opened_app, placed, running
from support.runtime.runtime import change, node


class Node:
    """A node's agent that believes only what is signed."""

    def __init__(self, app: Served, name: str = "n1") -> None:
        self.agent: Agent = app.agent(name)
        self.trust = Trust(name)
        self.answers: list[pb.HeartbeatResponse] = []

    async def heartbeat(self, *statuses: pb.PodStatus) -> Believed:
        first = self.agent.seq == 0
        said: dict[str, Any] = {"inventory": True, "nonce": self.trust.begin()} if first else {}
        self.answers.append(await self.agent.heartbeat(*statuses, **said))
        answer = read_answer(self.answers[-1])
        self.trust.learn(answer.signing_keys)
        return self.trust.believe(answer.leases, answer.lease_token, answer.seq)

    @property
    def keys(self) -> list[str]:
        """Those that the last answer told."""
        return [one.id for one in self.answers[-1].signing_keys]


async def paying(runtime: Runtime, *, seconds: int = 120, credits: str = "1000") -> None:  # noqa: A002
    """Everybody pays beforehand, and can."""
    await priced(runtime, "0.01", "")
    await funded(runtime, credits)
    reply = await change(runtime, "Tenant", "", "default", billing={"mode": "prepaid", "leaseSeconds": seconds})
    assert not isinstance(reply, Refusal), reply


async def test_every_grant_is_in_the_token_and_every_heartbeat_has_its_own(app: Served) -> None:
    await paying(app.runtime)
    await node(app.runtime, "n1", gpu=8)
    uids = {await placed(app.runtime, name, "n1", gpu=2) for name in ("a", "b")}
    one = Node(app)
    seen = []
    for _ in range(3):
        believed = await one.heartbeat(*(running(uid) for uid in uids))
        assert not believed.why
        assert {uid for uid, _ in believed.grants} == uids
        assert {lease.seconds for lease in believed.signed.values()} == {120.0}
        assert all(lease.id.startswith("lease-") for lease in believed.signed.values())
        seen.append(one.answers[-1].lease_token)
    assert len({*seen}) == 3


async def test_who_pays_for_nothing_is_told_neither_tokens_nor_keys(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    uid = await placed(app.runtime, "a", "n1")
    one = Node(app)
    await one.heartbeat(running(uid))
    assert (one.answers[-1].lease_token, one.keys) == ("", [])


async def test_keys_are_told_with_the_first_token_of_a_stream_and_when_they_change(app: Served) -> None:
    runtime = app.runtime
    await paying(runtime)
    await node(runtime, "n1", gpu=8)
    uid = await placed(runtime, "a", "n1", gpu=2)
    one = Node(app)
    assert not (await one.heartbeat(running(uid))).why
    (old,) = one.keys
    assert not (await one.heartbeat(running(uid))).why
    assert one.keys == []
    ring = await rotate(runtime.database, by="user:test")
    assert isinstance(ring, Ring)
    runtime.signing.forget()
    assert not (await one.heartbeat(running(uid))).why, "what the new key signs is believed at once"
    assert one.keys == [old, ring.ids[-1]]
    stolen = await rotate(runtime.database, by="user:test", overlap_seconds=0)
    assert isinstance(stolen, Ring)
    runtime.signing.forget()
    assert not (await one.heartbeat(running(uid))).why
    assert one.keys == [stolen.ids[-1]]
    outcome = one.trust.verify(ring.sign("n1", "word", one.agent.seq + 1, []), one.agent.seq + 1)
    assert isinstance(outcome, Distrusted)
    assert outcome.why.startswith("the token is signed with a key that is not trusted")


async def test_a_stream_that_moves_to_another_process_is_told_the_keys_of_that_one(database_url: str) -> None:
    async with opened_app(database_url) as first, opened_app(database_url) as second:
        await paying(first.runtime)
        await node(first.runtime, "n1", gpu=8)
        uid = await placed(first.runtime, "a", "n1", gpu=2)
        assert not (await Node(first).heartbeat(running(uid))).why
        ring = await rotate(first.runtime.database, by="user:test")
        assert isinstance(ring, Ring)
        moved = Node(second)
        assert not (await moved.heartbeat(running(uid))).why
        assert moved.keys[-1] == ring.ids[-1]


async def test_a_token_that_was_heard_on_another_stream_or_by_another_node_is_worth_nothing(app: Served) -> None:
    runtime = app.runtime
    await paying(runtime)
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=8)
    first, second = [await placed(runtime, name, where, gpu=2) for name, where in (("a", "n1"), ("b", "n2"))]
    one, other = Node(app, "n1"), Node(app, "n2")
    await one.heartbeat(running(first))
    await other.heartbeat(running(second))
    kept = one.answers[-1].lease_token
    assert isinstance(other.trust.verify(kept, 1), Distrusted)
    again = Node(app, "n1")
    await again.heartbeat(running(first))
    assert isinstance(again.trust.verify(kept, 2), Distrusted)
    assert not (await again.heartbeat(running(first))).why


async def test_the_last_of_paid_time_is_signed_to_be_that(app: Served) -> None:
    runtime = app.runtime
    await paying(runtime, seconds=60, credits="1.2")  # for one minute of two GPUs, and no more
    await node(runtime, "n1", gpu=8)
    uid = await placed(runtime, "a", "n1", gpu=2)
    one = Node(app)
    await one.heartbeat(running(uid))
    believed = await one.heartbeat(running(uid))
    assert not believed.why
    (lease,) = believed.signed.values()
    (grant,) = believed.grants.values()
    assert lease.final
    assert grant.final == "insufficient_credit"
    assert lease.seconds <= 60


async def test_an_agent_that_names_no_word_for_its_stream_is_answered_all_the_same(app: Served) -> None:
    """One of the version before."""
    await paying(app.runtime)
    await node(app.runtime, "n1", gpu=8)
    uid = await placed(app.runtime, "a", "n1", gpu=2)
    answer = await app.agent("n1").heartbeat(running(uid), inventory=True)
    assert answer.lease_token
    assert [one.allocation_id for one in answer.leases] == [uid]


async def test_a_word_that_is_too_long_is_refused(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    _, why = await app.agent("n1").refusal_of(nonce="x" * 65)
    assert "nonce" in why
