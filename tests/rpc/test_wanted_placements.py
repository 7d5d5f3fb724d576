"""What a node is told: everything when it comes, and then what changes, at once."""

import asyncio

import msgspec
import pytest

from bursar.core.objects.object import Key
from bursar.loops.housekeeping import finish_namespaces
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc import hub as hub_module
from bursar.rpc.codec import order_of_place, run_directive
from bursar.store.nodes.heartbeat import WantedPlace
from bursar.store.objects.change import load_position
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from support.api.site import eventually
from support.nodes.agent_streams import (
    RUN,
    STOP,
    Served,
    acknowledged,
    ended,
    evict,
    opened_app,
    orders,
    placed,
    running,
    stopped,
)
from support.runtime.runtime import (
    allocation,
    bind,
    change,
    code,
    delete,
    document,
    end,
    namespace,
    node,
    opened,
    tenant,
)

LEASED = {"onNodeLost": "requeue"}


async def has_read_all(app: Served) -> bool:
    """Whether the feed has told of everything that was committed."""
    async with app.runtime.database.reader() as db:
        return app.feed.revision >= (await load_position(db)).revision


async def test_work_is_told_with_the_uid_of_its_tenant_and_not_of_a_namesake(app: Served, database_url: str) -> None:
    """Another process deletes the tenant and makes it anew: this one knows of that by the feed alone."""
    await node(app.runtime, "n1", cpu=8)
    agent, told, uids = app.agent("n1"), [], []
    await agent.heartbeat(inventory=True)
    async with opened(database_url) as elsewhere:
        for name in ("a", "b"):
            uids.append(document(await tenant(elsewhere, "acme"))["metadata"]["uid"])
            await namespace(elsewhere, "lab", "acme")
            await allocation(elsewhere, "lab", name, cpu=1)
            await bind(elsewhere, "lab", name, "n1")
            told.append((await agent.directive()).tenant_uid)
            whole = await app.agent("n1").heartbeat(inventory=True)
            told.append(whole.directives[0].tenant_uid)
            agent = app.agent("n1")
            await agent.heartbeat(inventory=True)
            await end(elsewhere, "lab", name)
            await agent.directive()
            await delete(elsewhere, "Allocation", "lab", name)
            await delete(elsewhere, "Namespace", "", "lab")
            await finish_namespaces(elsewhere)
            assert code(await delete(elsewhere, "Tenant", "", "acme")) == "ok"
    assert told == [uids[0], uids[0], uids[1], uids[1]]
    assert uids[0] != uids[1]


async def test_who_comes_is_told_all_that_is_wanted_of_it(app: Served) -> None:
    await node(app.runtime, "n1", cpu=64, gpu=4, memory="64Gi")
    spec = {
        "command": ["train", "--fast"],
        "env": [{"name": "A", "value": "1"}, {"name": "B"}],
        "workingDir": "/work",
        "ttl": "1h",
        **LEASED,
    }
    uid = await placed(app.runtime, "a", "n1", spec=spec, cpu=4, gpu=2)
    gone = await placed(app.runtime, "b", "n1")
    await evict(app.runtime, "b", grace_seconds=20)
    agent = app.agent("n1")
    answer = await agent.heartbeat(inventory=True, address="10.0.0.1:7000", agent_version="1.2.3")
    assert (answer.seq, answer.complete) == (1, True)
    assert (answer.lease_duration_seconds, answer.beat_seconds) == (120, 5)
    assert orders(answer.directives) == sorted([(RUN, uid, 1), (STOP, gone, 1)])
    run = next(one for one in answer.directives if one.type == RUN)
    assert (run.namespace, run.name, run.tenant) == ("default", "a", "default")
    assert list(run.command) == ["train", "--fast"]
    assert dict(run.env) == {"A": "1", "B": ""}
    assert (run.working_dir, run.ttl_seconds, run.leased, run.grace_seconds) == ("/work", 3600, True, 30)
    assert dict(run.resources.requests) == {"cpu": "4", "nvidia.com/gpu": "2"}
    assert list(run.devices["nvidia.com/gpu"].indices) == [0, 1]
    assert list(run.nodes) == ["n1"]
    stop = next(one for one in answer.directives if one.type == STOP)
    assert (stop.reason, stop.message, stop.grace_seconds) == ("Preempted", "make room", 20)


async def test_what_was_granted_is_written_before_it_is_told(app: Served) -> None:
    await node(app.runtime, "n1", cpu=4)
    agent = app.agent("n1")
    answer = await agent.heartbeat(address="10.0.0.1:7000", agent_version="1.2.3")
    async with app.runtime.database.reader() as db:
        row = await db.fetchrow("SELECT *, granted_until > at + interval '1 s' * 119 AS granted FROM node_seen")
        assert (row["node"], row["address"], row["agent"]) == ("n1", "10.0.0.1:7000", "1.2.3")
        assert row["session"]
        assert row["granted"]
        await db.execute("UPDATE node_seen SET granted_until = now() + interval '1 day'")
        await agent.heartbeat()
        later = await db.fetchrow("SELECT at, granted_until > now() + interval '23 hours' AS kept FROM node_seen")
    assert answer.lease_duration_seconds == 120
    assert later["at"] > row["at"]
    assert later["kept"], "an answered beat never takes a lease back"


async def test_a_change_is_pushed_to_the_nodes_that_it_concerns(app: Served) -> None:
    for name in ("n1", "n2", "n3"):
        await node(app.runtime, name, cpu=8)
    one, two, three = (app.agent(name) for name in ("n1", "n2", "n3"))
    for agent in (one, two, three):
        await agent.heartbeat(inventory=True)
    alone = await placed(app.runtime, "alone", "n1")
    assert orders([await one.directive()]) == [(RUN, alone, 1)]
    both = await placed(app.runtime, "both", "n1", "n2", spec={"nodes": 2})
    for agent in (one, two):
        directive = await agent.directive()
        assert orders([directive]) == [(RUN, both, 1)]
        assert list(directive.nodes) == ["n1", "n2"]
    await delete(app.runtime, "Allocation", "default", "both")
    for agent in (one, two):
        directive = await agent.directive()
        assert orders([directive]) == [(STOP, both, 1)]
        assert directive.grace_seconds == 30
    assert not (await three.heartbeat()).directives
    assert not three.pushed


async def test_what_others_take_away_is_stopped_at_once_on_every_node(app: Served) -> None:
    for name in ("n1", "n2"):
        await node(app.runtime, name, cpu=8)
    agents = [app.agent(name) for name in ("n1", "n2")]
    for agent in agents:
        await agent.heartbeat(inventory=True)
    uid = await placed(app.runtime, "both", "n1", "n2", spec={"nodes": 2})
    for agent in agents:
        assert orders([await agent.directive()]) == [(RUN, uid, 1)]
        await agent.heartbeat(running(uid))
    # An administrator says that it is gone; the nodes did not.
    await end(app.runtime, "default", "both")
    for agent in agents:
        directive = await agent.directive()
        assert orders([directive]) == [(STOP, uid, 1)]
        assert directive.grace_seconds == 0


async def test_what_a_node_ended_itself_is_not_told_to_it_again(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    uid = await placed(app.runtime, "a", "n1")
    await agent.directive()
    answer = await agent.heartbeat(ended(uid))
    assert acknowledged(answer) == [(uid, 1)]
    after = await placed(app.runtime, "b", "n1")
    told = [*answer.directives, *agent.pushed]
    while (RUN, after, 1) not in orders(told):
        told.append(await agent.directive())
    assert (RUN, uid, 1) not in orders(told)


async def test_what_is_bound_while_a_node_connects_is_told_to_it_once_at_least(app: Served) -> None:
    await node(app.runtime, "n1", cpu=64)
    for index in range(24):
        await allocation(app.runtime, "default", f"a{index}", cpu=1)

    async def bind_all() -> set[str]:
        replies = [await bind(app.runtime, "default", f"a{index}", "n1") for index in range(24)]
        return {document(one)["metadata"]["uid"] for one in replies}

    binding = asyncio.create_task(bind_all())
    told: set[str] = set()
    while not binding.done():
        agent = app.agent("n1")
        answer = await agent.heartbeat(inventory=True)
        told = {one.allocation_id for one in answer.directives}
    bound = await binding
    while told != bound:
        directive = await agent.directive()
        assert directive.type == RUN
        told.add(directive.allocation_id)


async def test_what_is_stopped_while_a_node_connects_is_stopped_there(app: Served) -> None:
    await node(app.runtime, "n1", cpu=64)
    uids = [await placed(app.runtime, f"a{index}", "n1") for index in range(12)]
    ending = asyncio.gather(*(delete(app.runtime, "Allocation", "default", f"a{index}") for index in range(12)))
    agent = app.agent("n1")
    answer = await agent.heartbeat(inventory=True)
    last = {one.allocation_id: one.type for one in answer.directives}
    assert set(last) == set(uids)
    while STOP not in last.values() or set(last.values()) != {STOP}:
        directive = await agent.directive()
        last[directive.allocation_id] = directive.type
    await ending


async def test_a_stream_that_missed_something_is_told_everything(app: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    monkeypatch.setattr(hub_module, "OUTBOX_MAX", 0)
    uid = await placed(app.runtime, "a", "n1")
    other = await placed(app.runtime, "b", "n1")
    await eventually(lambda: has_read_all(app))
    answer = await agent.heartbeat()
    while not answer.complete:
        answer = await agent.heartbeat()
    assert orders(answer.directives) == sorted([(RUN, uid, 1), (RUN, other, 1)])
    assert not (await agent.heartbeat()).complete


async def test_streams_that_fell_behind_the_feed_are_told_everything(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    for follower in app.feed._followers[""]:
        follower.let_go()
    uid = await placed(app.runtime, "a", "n1")
    answer = await agent.heartbeat()
    while not answer.complete:
        answer = await agent.heartbeat()
    assert orders(answer.directives) == [(RUN, uid, 1)]
    agent.pushed.clear()  # Whether it was pushed as well depends on who was faster.
    other = await placed(app.runtime, "b", "n1")
    assert orders([await agent.directive()]) == [(RUN, other, 1)]


async def make_unreadable(runtime: Runtime, name: str) -> None:
    """As if its status had been written by somebody who means something else by it."""
    async with runtime.database.reader() as db:
        await db.execute(
            "UPDATE object SET status = jsonb_set(status::jsonb, '{message}', '7')::json WHERE name = $1",
            name,
        )


async def test_what_cannot_be_read_keeps_no_node_away_and_stops_nothing(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    broken, other = await placed(app.runtime, "a", "n1"), await placed(app.runtime, "b", "n1")
    await make_unreadable(app.runtime, "a")
    agent = app.agent("n1")
    answer = await agent.heartbeat(running(broken), running(other), inventory=True)
    assert orders(answer.directives) == [(RUN, other, 1)]
    assert not answer.complete, "what is not named would be stopped"
    assert (await agent.heartbeat()).seq == 2, "the stream goes on"
    assert acknowledged(await agent.heartbeat(ended(broken))) == [(broken, 1)]


async def test_a_change_that_cannot_be_told_is_told_with_everything(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    uid, other = await placed(app.runtime, "a", "n1"), await placed(app.runtime, "b", "n1")
    for _ in range(2):
        await agent.directive()
    await make_unreadable(app.runtime, "a")
    await delete(app.runtime, "Allocation", "default", "a")
    # Once this is pushed, what came before has been taken.
    await placed(app.runtime, "c", "n1")
    await agent.directive()
    answer = await agent.heartbeat(running(uid), running(other))
    assert answer.complete
    assert (STOP, uid, 1) in orders(answer.directives)
    assert acknowledged(await agent.heartbeat(stopped(uid))) == [(uid, 1)]


async def test_a_node_whose_phase_is_another_word_is_not_told_everything_with_every_heartbeat(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat(inventory=True)
    for word in ("Tired", "Lost"):
        async with app.runtime.database.reader() as db:
            fields = "fields::jsonb || jsonb_build_object('status.phase', $1::text)"
            await db.execute(f"UPDATE object SET fields = {fields} WHERE kind = 'Node'", word)
        assert not (await agent.heartbeat()).complete
    again = app.agent("n1")
    assert (await again.heartbeat(inventory=True)).complete
    assert not (await again.heartbeat()).complete


async def test_where_work_is_spread_is_forgotten_with_the_work(app: Served) -> None:
    hub = hub_module.Hub(app.runtime, app.feed)
    task = asyncio.current_task()
    assert task is not None
    stream = hub_module.AgentStream("n1", "session", None, task)  # type: ignore[arg-type]
    hub.take_over(stream)
    stream.places["held"] = hub_module.HeldPlacement(Key("Allocation", "default", "held"), 1)
    hub.spread("held", ("n1", "n2"))
    for index in range(5 * hub_module.SPREAD_MAX):
        hub.spread(f"past-{index}", ("n1", "n2"))
    assert len(hub._spread) <= hub_module.SPREAD_MAX
    assert hub._spread["held"] == ("n1", "n2")
    hub.leave(stream)


async def test_a_slow_stream_waits_alone(app: Served) -> None:
    for name in ("slow", "quick"):
        await node(app.runtime, name, cpu=1000)
    slow, quick = app.agent("slow"), app.agent("quick")
    await slow.heartbeat(inventory=True)
    await quick.heartbeat(inventory=True)
    env = {"LARGE": "x" * 90_000, "LARGER": "y" * 90_000}
    count = 40
    for index in range(count):
        await placed(app.runtime, f"s{index}", "slow", spec={"env": env})
        uid = await placed(app.runtime, f"q{index}", "quick")
        assert orders([await quick.directive()]) == [(RUN, uid, 1)]
    told: set[str] = set()
    while len(told) < count:
        told.add((await slow.directive()).name)


async def test_a_write_that_does_not_end_holds_back_a_bounded_number_of_directives() -> None:
    """The stream by itself, on a connection that takes nothing."""
    blocked = asyncio.Event()
    written: list[pb.HeartbeatResponse] = []

    class Context:
        async def write(self, message: pb.HeartbeatResponse) -> None:
            written.append(message)
            await blocked.wait()

    task = asyncio.current_task()
    assert task is not None
    stream = hub_module.AgentStream("n1", "session", Context(), task)  # type: ignore[arg-type]
    stream.whole_due = False
    blocked.set()
    await stream.answer(pb.HeartbeatResponse(seq=1), since=10)
    blocked.clear()
    stream.push(10, pb.SchedulingDirective(type=RUN, allocation_id="known"))
    for index in range(hub_module.OUTBOX_MAX):
        stream.push(11 + index, pb.SchedulingDirective(type=RUN, allocation_id=f"a{index}"))
        await asyncio.sleep(0)
    assert stream.whole_due is False
    for index in range(hub_module.OUTBOX_MAX):
        stream.push(1000 + index, pb.SchedulingDirective(type=STOP, allocation_id=f"b{index}"))
    assert [stream.whole_due] == [True]
    assert len(stream._outbox) <= hub_module.OUTBOX_MAX
    blocked.set()
    await stream.answer(pb.HeartbeatResponse(seq=2, complete=True), since=5000)
    assert written[-1].seq == 2
    assert not written[-1].directives, "a whole answer of a later revision knows better"
    stream.close()


async def test_nodes_speak_to_any_process(app: Served, database_url: str) -> None:
    await node(app.runtime, "n1", cpu=8)
    async with opened_app(database_url) as other:
        agent = other.agent("n1")
        await agent.heartbeat(inventory=True)
        uid = await placed(app.runtime, "a", "n1")
        assert orders([await agent.directive()]) == [(RUN, uid, 1)]


async def test_the_settings_say_how_often_to_send_heartbeats_and_for_how_long_to_run(app: Served) -> None:
    await node(app.runtime, "n1", cpu=8)
    agent = app.agent("n1")
    await agent.heartbeat()
    spec = {"nodes": {"heartbeatSeconds": 2, "runLeaseSeconds": 40}}
    document(await change(app.runtime, "Settings", "", "system", **spec))
    answer = await agent.heartbeat()
    while answer.beat_seconds != 2:
        answer = await agent.heartbeat()
    assert answer.lease_duration_seconds == 40


def test_annotations_under_our_name_are_told() -> None:
    doc = msgspec.json.encode({"metadata": {"annotations": {"bursar.io/sim-seconds": "3", "secret": "x"}}, "spec": {}})
    place = WantedPlace(Key("Allocation", "ns", "a"), "alloc-1", "t", 3, True, "", doc, b'{"phase":"Scheduled"}')
    directive = run_directive(order_of_place(place), "n1")
    assert dict(directive.annotations) == {"bursar.io/sim-seconds": "3"}
    assert directive.epoch == 3
