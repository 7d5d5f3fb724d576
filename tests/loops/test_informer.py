"""The informer on a real database: after any history, following the feed gives the cluster state of a fresh load."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply
from bursar.commands.scheduling.bind import Bind, BindMember, NotePending
from bursar.commands.scheduling.evict import Preempt
from bursar.commands.workloads.report import Report
from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.scheduling.state.placed_columns import Spot
from bursar.loops import informer as keeper_module
from bursar.loops.informer import FeedLost, Informer
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import bind as bind_units
from bursar.ops.scheduling.placement import evict, note, preempt, report
from bursar.ops.scheduling.plan_commands import SCHEDULER
from bursar.ops.workloads import job as job_ops
from bursar.store.db.database import Connection
from bursar.store.objects.listing import Query, load_page
from bursar.wire.kinds.allocation import CHECKPOINT_INTERVAL, DATA_READY
from support.runtime.runtime import (
    TEST,
    bind,
    bind_unit,
    change,
    code,
    create,
    delete,
    end,
    member,
    namespace,
    node,
    quota,
    tenant,
)
from support.scheduling.evictions import PREEMPTED
from support.scheduling.schedulers import (
    GPU,
    Interrupted,
    annotate,
    assert_as_if_loaded,
    edit,
    gang,
    label,
    loaded,
    portrait,
    submit,
    uid_of,
)

SOAK = bool(os.environ.get("BURSAR_SOAK"))
SEEDS = range(200) if SOAK else range(4)
STEPS = 120 if SOAK else 50
SPACES = {"a": "t1", "b": "t2"}


# Anything in any order.


class Anybody:
    """Users, nodes and administrators do random things; refusals are part of it."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self.runtime = runtime
        self.random = random.Random(seed)
        self.made = 0
        self.done: list[str] = []  # what was done, and whether it was refused

    async def prepare(self) -> None:
        for name in SPACES.values():
            assert code(await tenant(self.runtime, name)) == "ok"
        for space, owner in SPACES.items():
            assert code(await namespace(self.runtime, space, owner)) == "ok"

    async def step(self) -> None:
        acts = sorted(self.acts().items())
        name, (_, act) = self.random.choices(acts, [weight for _, (weight, _) in acts])[0]
        reply = await act()
        self.done.append(f"{name}: {'nothing' if reply is None else code(reply)}")

    def acts(self) -> dict[str, tuple[int, Callable[[], Awaitable[Reply | None]]]]:
        often, now_and_then, seldom = 6, 3, 1
        return {
            "submit": (often, self.submit),
            "submit a gang": (now_and_then, self.submit_gang),
            "bind": (2 * often, self.bind),
            "say running": (now_and_then, lambda: self.report(Phase.RUNNING)),
            "say ended": (now_and_then, lambda: self.report(self.random.choice(sorted(ENDED)))),
            "requeue": (now_and_then, lambda: self.report(Phase.PENDING)),
            "say ended on one node": (now_and_then, self.report_of_one_node),
            "evict": (now_and_then, self.evict),
            "delete": (now_and_then, self.delete),
            "relabel": (now_and_then, self.relabel),
            "annotate": (now_and_then, self.annotate),
            "note": (now_and_then, self.note),
            "nominate": (now_and_then, self.nominate),
            "register a node": (often, self.register),
            "describe a node": (often, self.describe_node),
            "resize a node": (now_and_then, self.resize_node),
            "delete a node": (now_and_then, self.delete_node),
            "limit a tenant": (now_and_then, self.limit_tenant),
            "limit the system": (seldom, self.limit_system),
            "put a quota": (now_and_then, self.put_quota),
            "drop a quota": (seldom, self.drop_quota),
            "submit a job": (now_and_then, self.submit_job),
            "boost a job": (now_and_then, self.boost_job),
            "change a queue": (seldom, self.change_queue),
            "change a priority class": (seldom, self.change_class),
        }

    # What there is.

    async def all(self, kind: str) -> list[Stored]:
        async with self.runtime.database.reader() as db:
            page = await load_page(db, Query(kind))
        found = [await object_ops.get(self.runtime, Key(kind, one.namespace, one.name)) for one in page.items]
        return [one for one in found if isinstance(one, Stored)]

    async def some(self, *phases: str) -> Stored | None:
        found = [one for one in await self.all("Allocation") if not phases or one.fields["status.phase"] in phases]
        return self.random.choice(found) if found else None

    async def nodes(self) -> list[str]:
        return [one.key.name for one in await self.all("Node")]

    def name(self, stem: str) -> str:
        self.made += 1
        return f"{stem}{self.made}"

    def space(self) -> str:
        return self.random.choice(sorted(SPACES))

    # Users.

    def wish(self) -> dict[str, Any]:
        """A spec that shares, is exclusive, wants several nodes, or keeps its distance."""
        any_ = self.random.choice
        spec: dict[str, Any] = {"resources": {"requests": {GPU: any_(["0.25", "0.5", "1", "2"]), "cpu": any_("12")}}}
        spec |= any_([{}, {}, {}, {"exclusive": True}, {"nodes": 2}, {"nodes": 2, "exclusive": True}])
        spec |= any_([{}, {"ttl": "1h"}, {"priority": 7}, {"priorityClass": "high-priority"}, {"queue": "default"}])
        if self.random.random() < 0.2:
            term = {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "zone"}
            spec["scheduling"] = {
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
            }
        return spec

    async def submit(self) -> Reply:
        metadata = {"name": self.name("one"), "namespace": self.space(), "labels": self.labels()}
        return await create(self.runtime, "Allocation", {"metadata": metadata, "spec": self.wish()})

    def labels(self) -> dict[str, str]:
        return {"app": self.random.choice(["web", "db"])}

    async def submit_gang(self) -> Reply | None:
        group, space, wish = self.name("gang"), self.space(), self.wish() | gang("", 2)
        wish["gangScheduling"]["groupId"] = group
        reply = None
        for _ in range(self.random.choice([1, 2, 2, 3])):
            metadata = {"name": self.name("part"), "namespace": space, "labels": self.labels()}
            reply = await create(self.runtime, "Allocation", {"metadata": metadata, "spec": wish})
        return reply

    async def delete(self) -> Reply | None:
        one = await self.some()
        return await delete(self.runtime, *one.key) if one is not None else None

    async def relabel(self) -> Reply | None:
        one = await self.some()
        return await label(self.runtime, *one.key, **self.labels()) if one is not None else None

    async def annotate(self) -> Reply | None:
        one, any_ = await self.some(), self.random.choice
        if one is None:
            return None
        notes = any_([{DATA_READY: any_(["0", "0.5"])}, {CHECKPOINT_INTERVAL: any_(["5m", "1h"])}])
        return await annotate(self.runtime, *one.key, notes)

    async def submit_job(self) -> Reply:
        template = {"spec": {"resources": {"requests": {GPU: "1"}}}}
        metadata = {"name": self.name("job"), "namespace": self.space()}
        return await create(self.runtime, "Job", {"metadata": metadata, "spec": {"template": template}})

    async def boost_job(self) -> Reply | None:
        jobs = await self.all("Job")
        if not jobs:
            return None
        priority, seconds = self.random.choice([1, 50]), self.random.choice([1, 600])
        return await job_ops.boost(
            self.runtime,
            self.random.choice(jobs),
            TEST,
            priority=priority,
            seconds=seconds,
            reason="",
            approved_by="me",
        )

    # The scheduler and the nodes.

    async def bind(self) -> Reply | None:
        one, nodes = await self.some("Pending"), await self.nodes()
        if one is None or not nodes:
            return None
        count = min(len(nodes), msgspec.json.decode(one.doc)["spec"].get("nodes", 1))
        where = tuple(self.random.sample(nodes, count))
        if not one.gang:
            return await bind(self.runtime, one.key.namespace, one.key.name, *where)
        waiting = [each for each in await self.all("Allocation") if each.gang == one.gang]
        unit = {each.key.name: where for each in waiting if each.fields["status.phase"] == "Pending"}
        return await bind_unit(self.runtime, one.key.namespace, unit)

    async def report(self, phase: Phase) -> Reply | None:
        one = await self.some("Scheduled", "Running", "Terminating")
        return await end(self.runtime, one.key.namespace, one.key.name, phase) if one is not None else None

    async def report_of_one_node(self) -> Reply | None:
        one = await self.some("Scheduled", "Running", "Terminating")
        if one is None:
            return None
        where = self.random.choice(msgspec.json.decode(one.status)["nodes"])["name"]
        phase = self.random.choice([Phase.SUCCEEDED, Phase.FAILED])
        return await report(self.runtime, Report(key=one.key, origin=TEST, phase=phase, node=where, gang=one.gang))

    async def evict(self) -> Reply | None:
        one = await self.some("Scheduled", "Running")
        return await evict(self.runtime, one, PREEMPTED, TEST) if one is not None else None

    async def note(self) -> Reply | None:
        one = await self.some("Pending")
        if one is None:
            return None
        reason = self.random.choice(["no_capacity_cpu", "quota_exceeded"])
        (reply,) = await note(
            self.runtime, [NotePending(key=one.key, origin=TEST, uid=one.uid, reason=reason, message="why")]
        )
        return reply

    async def nominate(self) -> Reply | None:
        one, nodes = await self.some("Pending"), await self.nodes()
        if one is None or not nodes:
            return None
        capacity, until = (self.random.choice(nodes),), now() + timedelta(seconds=self.random.choice([-5, 600]))
        command = Preempt(key=one.key, uid=one.uid, nominated=capacity, until=until, victims=(), origin=TEST)
        (reply,) = await preempt(self.runtime, [command])
        return reply

    # Administrators.

    async def register(self) -> Reply:
        capacity: dict[str, Any] = {"gpu": self.random.choice([2, 4, 12]), "cpu": self.random.choice([4, 8])}
        capacity |= self.random.choice([{}, {"pods": 3}, {"memory": "1Gi"}])
        return await node(self.runtime, f"n{self.random.randrange(6)}", **capacity)

    async def describe_node(self) -> Reply | None:
        nodes = await self.nodes()
        if not nodes:
            return None
        name = self.random.choice(nodes)
        match self.random.randrange(4):
            case 0:
                return await label(self.runtime, "Node", "", name, zone=self.random.choice(["east", "west"]))
            case 1:
                return await change(self.runtime, "Node", "", name, unschedulable=self.random.random() < 0.5)
            case 2:
                taints = self.random.choice([[], [{"key": "spot", "value": "yes", "effect": "NoSchedule"}]])
                return await change(self.runtime, "Node", "", name, taints=taints)
            case _:
                phase = self.random.choice(["Ready", "NotReady"])

                def say(document: dict[str, Any]) -> None:
                    document["status"] = {**document.get("status", {}), "phase": phase}

                return await edit(self.runtime, "Node", "", name, say, status=True)

    async def resize_node(self) -> Reply | None:
        """It loses devices that are in use, or gets more than any had; it offers something new, or something less."""
        nodes = await self.nodes()
        if not nodes:
            return None
        capacity: dict[str, str] = {"cpu": self.random.choice(["2", "8"])}
        capacity |= self.random.choice([{}, {GPU: "1"}, {GPU: "4"}, {GPU: "16"}])
        capacity |= self.random.choice([{}, {"pods": "2"}, {"example.com/fpga": "2"}])
        return await change(self.runtime, "Node", "", self.random.choice(nodes), capacity=capacity)

    async def delete_node(self) -> Reply | None:
        nodes = await self.nodes()
        return await delete(self.runtime, "Node", "", self.random.choice(nodes)) if nodes else None

    def limits(self) -> dict[str, int]:
        return self.random.choice([{}, {GPU: 2}, {GPU: 8, "allocations": 3}, {"nodes": 2}, {"cpu": 4}])

    async def limit_tenant(self) -> Reply:
        spec = {"limits": self.limits(), "weight": self.random.choice([1, 2.5])}
        spec |= self.random.choice([{}, {"fairShareTarget": 0.3}, {"burstAllowance": 1.5}, {"gpuHoursBudget": 10}])
        return await change(self.runtime, "Tenant", "", self.random.choice(["t1", "t2"]), enforcement="Queue", **spec)

    async def limit_system(self) -> Reply:
        return await change(self.runtime, "Settings", "", "system", limits=self.limits())

    async def put_quota(self) -> Reply:
        space, hard = self.space(), {name: str(value) for name, value in ({GPU: 6} | self.limits()).items()}
        reply = await quota(self.runtime, space, "q", hard=hard, enforcement="Queue")
        return await change(self.runtime, "ResourceQuota", space, "q", hard=hard) if code(reply) != "ok" else reply

    async def drop_quota(self) -> Reply:
        return await delete(self.runtime, "ResourceQuota", self.space(), "q")

    async def change_queue(self) -> Reply:
        return await change(self.runtime, "Queue", "", "default", profile=self.random.choice(["hpc", "ml"]))

    async def change_class(self) -> Reply:
        value = self.random.choice([100, 2000])
        return await edit(self.runtime, "PriorityClass", "", "high-priority", lambda one: one.update(value=value))


@pytest.mark.parametrize("seed", SEEDS)
async def test_following_ends_where_loading_would_begin(runtime: Runtime, db: Connection, seed: int) -> None:
    anybody = Anybody(runtime, seed)
    await anybody.prepare()
    informer = await loaded(runtime)
    for _ in range(STEPS):
        for _ in range(anybody.random.choice([1, 1, 2, 5])):
            await anybody.step()
        informer = await followed(runtime, informer, db, anybody.done)
        try:
            await assert_as_if_loaded(runtime, informer)
        except AssertionError as error:
            error.add_note("\n".join(anybody.done[-12:]))
            raise
    assert sum(line.endswith(": ok") for line in anybody.done) > STEPS / 2


async def followed(runtime: Runtime, informer: Informer, db: Connection, done: Sequence[str]) -> Informer:
    """The informer after the commits since. Only a change of a priority class makes it load anew."""
    try:
        await informer.catch_up(db)
    except FeedLost:
        assert "change a priority class: ok" in done[-5:]
        return await loaded(runtime)
    return informer


# What is being committed.


@pytest.fixture
async def waiting(runtime: Runtime) -> Runtime:
    """A node, and an allocation that waits."""
    await node(runtime, "n1", gpu=4)
    await submit(runtime, "one", labels={"app": "web"})
    return runtime


def assume(informer: Informer, uid: str, at: float = 1000.0) -> None:
    """As if a plan had placed it on the only node."""
    ask = informer.cluster.waiting[uid].members[uid]
    informer.cluster.assume(ask, (Spot(0, ((0, (0,)),)),), at)
    informer.committing[uid] += 1


async def commit(runtime: Runtime, informer: Informer, uid: str) -> None:
    """The plan is committed, as the scheduler does it."""
    one = await member(runtime, "default", "one", "n1")
    assert isinstance(one, BindMember)
    (bound,) = await bind_units(runtime, [Bind.unit([one], SCHEDULER)])
    assert isinstance(bound, tuple)
    informer.committed(uid, bound[0])
    informer.settle([uid])


async def test_changes_of_what_is_being_committed_wait_until_it_is_known_how_that_ended(
    waiting: Runtime, db: Connection
) -> None:
    informer, uid = await loaded(waiting), await uid_of(waiting, "one")
    assume(informer, uid)
    await delete(waiting, "Allocation", "default", "one")
    await submit(waiting, "two")
    assert await informer.catch_up(db) == 2
    assert uid in informer.cluster.placed, "the plan stands until it is refused"
    assert await uid_of(waiting, "two") in informer.cluster.waiting, "others are told of at once"
    informer.settle(["somebody else's"])
    assert uid in informer.cluster.placed
    informer.settle([uid])
    await assert_as_if_loaded(waiting, informer)


async def test_our_own_commits_are_passed_by_when_they_come_back(waiting: Runtime, db: Connection) -> None:
    informer, uid = await loaded(waiting), await uid_of(waiting, "one")
    assume(informer, uid)
    await commit(waiting, informer, uid)
    assert await informer.catch_up(db) == 1
    assert informer.cluster.placed[uid].since == 1000.0, "it was not entered a second time"
    assert portrait(informer)["nodes"] == portrait(await loaded(waiting))["nodes"]
    await end(waiting, "default", "one", Phase.RUNNING)
    await informer.catch_up(db)
    informer.noted.clear()
    await assert_as_if_loaded(waiting, informer)


@pytest.mark.parametrize("read_before", [True, False])
async def test_what_another_did_just_before_our_own_commit_is_not_lost(
    waiting: Runtime, db: Connection, read_before: bool
) -> None:
    informer, uid = await loaded(waiting), await uid_of(waiting, "one")
    assume(informer, uid)
    await label(waiting, "Allocation", "default", "one", app="db")
    if read_before:
        await informer.catch_up(db)
    await commit(waiting, informer, uid)
    await informer.catch_up(db)
    assert informer.cluster.placed[uid].ask.labels == {"app": "db"}
    await end(waiting, "default", "one", Phase.RUNNING)
    await informer.catch_up(db)
    informer.noted.clear()
    await assert_as_if_loaded(waiting, informer)


# What is not in the feed.


@pytest.mark.parametrize("verb", ["bind", "end"])
async def test_counters_are_read_together_with_their_place_in_the_feed(
    waiting: Runtime, db: Connection, verb: str
) -> None:
    """What is committed after the changes were read, and before the counters are, is counted once."""
    informer = await loaded(waiting)
    if verb == "end":
        await bind(waiting, "default", "one", "n1")
        await informer.catch_up(db)
    await change(waiting, "Tenant", "", "default", limits={GPU: 8}, enforcement="Queue")

    async def act() -> Reply:
        if verb == "end":
            return await end(waiting, "default", "one")
        return await bind(waiting, "default", "one", "n1")

    await informer.catch_up(Interrupted(db, act))
    await informer.catch_up(db)
    await assert_as_if_loaded(waiting, informer)


async def test_counters_are_not_read_while_something_is_being_committed(waiting: Runtime, db: Connection) -> None:
    informer, uid = await loaded(waiting), await uid_of(waiting, "one")
    assume(informer, uid)
    await change(waiting, "Tenant", "", "default", limits={GPU: 8}, enforcement="Queue")
    await informer.catch_up(db)
    stale = [informer.distrusts_limits]
    await commit(waiting, informer, uid)
    await informer.catch_up(db)
    assert [*stale, informer.distrusts_limits] == [True, False]
    assert portrait(informer)["limits"] == {("tenant:default", GPU): (8000, 1000)}


async def test_what_left_one_of_its_nodes_counts_for_all_of_them_until_it_has_left_the_last(
    runtime: Runtime, db: Connection
) -> None:
    await change(runtime, "Tenant", "", "default", limits={"nodes": 4}, enforcement="Queue")
    for name in ("n1", "n2"):
        await node(runtime, name, gpu=4)
    informer = await loaded(runtime)
    await submit(runtime, "wide", gpu=2, spec={"nodes": 2})
    await bind(runtime, "default", "wide", "n1", "n2")
    for where, left in (("n1", 1000), ("n2", 0)):
        one = Report(key=Key("Allocation", "default", "wide"), origin=TEST, phase=Phase.SUCCEEDED, node=where)
        await informer.catch_up(db)
        assert code(await report(runtime, one)) == "ok"
        await informer.catch_up(db)
        assert portrait(informer)["limits"] == {("tenant:default", "nodes"): (4000, left)}


# Losing one's place.


async def test_a_gap_in_the_feed_is_noticed(waiting: Runtime, db: Connection) -> None:
    informer = await loaded(waiting)
    for name in ("two", "three"):
        await submit(waiting, name)
    await db.execute("DELETE FROM change WHERE revision = $1", informer.revision + 1)
    with pytest.raises(FeedLost, match="are gone"):
        await informer.catch_up(db)


async def test_a_change_of_what_is_not_known_is_noticed(waiting: Runtime, db: Connection) -> None:
    informer = await loaded(waiting)
    uid = await uid_of(waiting, "one")
    informer.cluster.forget(uid)
    why = NotePending(
        key=Key("Allocation", "default", "one"), origin=TEST, uid=uid, reason="no_nodes_active", message="why"
    )
    assert code((await note(waiting, [why]))[0]) == "ok"
    with pytest.raises(FeedLost, match="one is not known"):
        await informer.catch_up(db)


async def test_a_class_that_is_worth_something_else_is_worth_it_to_what_waits(waiting: Runtime, db: Connection) -> None:
    await submit(waiting, "urgent", spec={"priorityClass": "high-priority"})
    informer, uid = await loaded(waiting), await uid_of(waiting, "urgent")
    assert informer.cluster.waiting[uid].members[uid].priority == 1000
    await edit(waiting, "PriorityClass", "", "high-priority", lambda one: one.update(value=7))
    with pytest.raises(FeedLost, match="priority class"):
        await informer.catch_up(db)
    again = await loaded(waiting)
    assert again.cluster.waiting[uid].members[uid].priority == 7


async def test_more_is_followed_than_is_read_at_once(
    runtime: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    informer = await loaded(runtime)
    monkeypatch.setattr(keeper_module, "READ_MAX", 7)
    await asyncio.gather(*(submit(runtime, f"job-{number}") for number in range(30)))
    assert await informer.catch_up(db) == 30
    await assert_as_if_loaded(runtime, informer)
