"""Races between processes: each has a runtime of its own, and only the database knows of them all."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.nodes.node import EXCLUSIVE, WHOLE
from bursar.core.objects.allocation import ENDED, Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Connection, connect
from bursar.store.nodes import node as node_store
from bursar.store.objects import object as object_store
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    counters,
    create,
    delete,
    end,
    namespace,
    node,
    opened,
    quota,
    tenant,
)

GPU = "nvidia.com/gpu"
PROCESSES = 3
SOAK = 20 if os.environ.get("BURSAR_SOAK") else 1


# Other processes.


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as one:
        yield one


Work = Callable[..., Awaitable[Any]]


async def in_processes(pool: ProcessPoolExecutor, url: str, work: Work, *arguments: Any) -> list[Any]:
    """Run `work(runtime, which, ...)` in every process at once; what each returned."""
    loop = asyncio.get_running_loop()
    db = await connect(url)
    await db.execute("CREATE TABLE IF NOT EXISTS starting (which integer)")
    await db.execute("TRUNCATE starting")
    await db.close()
    jobs = [loop.run_in_executor(pool, _run, work, url, which, arguments) for which in range(PROCESSES)]
    return await asyncio.wait_for(asyncio.gather(*jobs), 60 + 60 * SOAK)


def _run(work: Work, url: str, which: int, arguments: tuple[Any, ...]) -> Any:
    async def main() -> Any:
        async with opened(url) as runtime:
            await _start_together(runtime, which)
            return await work(runtime, which, *arguments)

    return asyncio.run(main())


async def _start_together(runtime: Runtime, which: int) -> None:
    async with runtime.database.reader() as db, asyncio.timeout(30):
        await db.execute("INSERT INTO starting VALUES ($1)", which)
        while await db.fetchval("SELECT count(*) FROM starting") < PROCESSES:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


# A witness inside the database: every commit that raises a counter above its limit is written down.

WITNESS = """
CREATE TABLE overrun (scope text, dimension text, hard bigint, accepted bigint, bound bigint);
CREATE FUNCTION note_overrun() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.accepted > OLD.accepted AND NEW.accepted > NEW.hard)
       OR (NEW.bound > OLD.bound AND NEW.bound > NEW.hard) THEN
        INSERT INTO overrun VALUES (NEW.scope, NEW.dimension, NEW.hard, NEW.accepted, NEW.bound);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER witness AFTER UPDATE ON quota FOR EACH ROW EXECUTE FUNCTION note_overrun();
"""


@pytest.fixture
async def witness(runtime: Runtime, database_url: str) -> AsyncIterator[Connection]:
    db = await connect(database_url)
    await db.execute(WITNESS)
    yield db
    assert await db.fetch("SELECT * FROM overrun") == []
    # It would have noticed.
    await db.execute("INSERT INTO quota (scope, dimension, hard) VALUES ('tenant:witness', 'cpu', 5)")
    await db.execute("UPDATE quota SET accepted = 6 WHERE scope = 'tenant:witness'")
    assert await db.fetchval("SELECT count(*) FROM overrun") == 1
    await db.close()


async def accepted(runtime: Runtime, scope: str) -> int:
    return (await counters(runtime))[scope, GPU].accepted // 1000


# Submitting.


async def submit_everywhere(
    runtime: Runtime, which: int, namespaces: list[str], submitters: int, each: int
) -> list[str]:
    async def submitter(index: int) -> list[str]:
        home = namespaces[index % len(namespaces)]
        return [
            code(await allocation(runtime, home, f"p{which}-s{index}-{number}", gpu=1, cpu=1)) for number in range(each)
        ]

    answers = await asyncio.gather(*map(submitter, range(submitters)))
    return [answer for some in answers for answer in some]


async def test_fifty_submitters_in_several_processes_fill_the_limits_of_three_scopes_exactly(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor, witness: Connection
) -> None:
    await tenant(runtime, "org")
    await tenant(runtime, "lab", parent="org", limits={GPU: 26})
    for name, owner in (("n1", "lab"), ("n2", "lab"), ("n3", "org")):
        await namespace(runtime, name, owner)
    for name in ("n1", "n2"):
        await quota(runtime, name, "q", hard={GPU: "15"})
    await change(runtime, "Settings", "", "system", limits={GPU: 36})
    answers = await in_processes(pool, database_url, submit_everywhere, ["n1", "n2", "n3"], 17, 3)
    total = Counter(answer for some in answers for answer in some)
    # They ask for far more than there is in each scope, so what limits in the end is the system, to the last GPU.
    assert total == {"ok": 36, "quota_exceeded": 17 * 3 * PROCESSES - 36}
    assert await accepted(runtime, "system") == 36
    assert await accepted(runtime, "tenant:lab") <= 26
    for name in ("n1", "n2"):
        assert await accepted(runtime, f"quota:{name}/q") <= 15
    await assert_counters_equal_charges(runtime)


async def test_each_scope_is_filled_exactly_where_it_is_the_one_that_limits(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor, witness: Connection
) -> None:
    await tenant(runtime, "lab", limits={GPU: 26})
    for name in ("n1", "n2"):
        await namespace(runtime, name, "lab")
    await quota(runtime, "n1", "q", hard={GPU: "7"})
    await in_processes(pool, database_url, submit_everywhere, ["n1", "n2"], 10, 6)
    assert await accepted(runtime, "quota:n1/q") == 7
    assert await accepted(runtime, "tenant:lab") == 26
    await assert_counters_equal_charges(runtime)


async def submit_and_give_back(runtime: Runtime, which: int) -> list[str]:
    async def worker(index: int) -> list[str]:
        answers = []
        for number in range(6):
            name = f"p{which}-w{index}-{number}"
            answers.append(code(await allocation(runtime, "lab", name, gpu=1)))
            if answers[-1] == "ok":
                answers.append(code(await delete(runtime, "Allocation", "lab", name)))
        return answers

    return [answer for some in await asyncio.gather(*map(worker, range(8))) for answer in some]


async def test_what_comes_and_goes_never_passes_the_limit_and_leaves_nothing(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor, witness: Connection
) -> None:
    await tenant(runtime, "lab", limits={GPU: 3})
    await namespace(runtime, "lab", "lab")
    answers = await in_processes(pool, database_url, submit_and_give_back)
    assert {answer for some in answers for answer in some} == {"ok", "quota_exceeded"}
    assert await accepted(runtime, "tenant:lab") == 0


# Binding.


async def bind_all(runtime: Runtime, which: int, names: list[str], node_name: str) -> list[str]:
    """Each process begins with a tenant of its own, so that nothing but the node brings them into a queue."""
    order = sorted(names, key=lambda name: (int(name[1]) - which) % PROCESSES)
    answers = []
    for start in range(0, len(order), 4):
        some = order[start : start + 4]
        answers += await asyncio.gather(*(bind(runtime, name[:2], name, node_name) for name in some))
    return [code(one) for one in answers]


async def test_binders_racing_for_one_node_never_overfill_it(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor, witness: Connection
) -> None:
    await node(runtime, "n1", cpu=64, gpu=8)
    for number in range(PROCESSES):
        await tenant(runtime, f"t{number}")
        await namespace(runtime, f"t{number}", f"t{number}")
    halves = [f"t{number % PROCESSES}-half-{number}" for number in range(21)]
    wholes = [f"t{number % PROCESSES}-whole-{number}" for number in range(21)]
    for name in (*halves, *wholes):
        await allocation(runtime, name[:2], name, gpu="500m" if name in halves else 1)
    answers = await in_processes(pool, database_url, bind_all, [*halves, *wholes], "n1")
    assert {answer for some in answers for answer in some} == {"ok", "no_capacity", "stale"}
    async with runtime.database.reader() as db:
        capacity = (await node_store.load(db, ["n1"]))["n1"]
        placements = await node_store.load_placements_on(db, ["n1"])
    # The last one found neither a half nor a whole device.
    assert capacity.allocated[GPU] == 8 * WHOLE
    assert capacity.devices == {GPU: (WHOLE,) * 8}
    assert sum(answer == "ok" for some in answers for answer in some) == len(placements)
    await assert_placements_fill_nodes(runtime)
    await assert_counters_equal_charges(runtime)


async def assert_placements_fill_nodes(runtime: Runtime) -> None:
    """Every node's row is the sum of what is placed on it, device by device."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        capacities = await node_store.load_all(db)
        placements = await node_store.load_placements_on(db, capacities)
        everywhere = await db.fetchval("SELECT count(*) FROM placement")
    assert len(placements) == everywhere
    for name, capacity in capacities.items():
        allocated: Counter[str] = Counter()
        devices = {resource: [0] * len(used) for resource, used in capacity.devices.items()}
        for one in (one for one in placements if one.node == name):
            allocated.update(one.resources)
            for resource, indices in one.devices.items():
                shared = one.resources[resource] < WHOLE and EXCLUSIVE not in one.resources
                for index in indices:
                    devices[resource][index] += one.resources[resource] if shared else WHOLE
        assert {resource: amount for resource, amount in allocated.items() if amount} == capacity.allocated
        assert {resource: tuple(used) for resource, used in devices.items()} == capacity.devices
        assert all(max(used, default=0) <= WHOLE for used in capacity.devices.values())


# One object.


def _count_up(before: Stored, document: dict[str, Any]) -> Any:
    labels = document["metadata"].setdefault("labels", {})
    labels["count"] = str(int(labels.get("count", "0")) + 1)
    one = msgspec.convert(document, BY_NAME["Allocation"].type)
    return change_command(BY_NAME["Allocation"], before, one, TEST, spec_changed=False)


async def patch_often(runtime: Runtime, which: int, times: int, pinned: bool) -> list[str]:
    key = Key("Allocation", "default", "one")
    return [code(await object_ops.change(runtime, key, _count_up, tenant="test", pinned=pinned)) for _ in range(times)]


async def patch_until_done(runtime: Runtime, which: int, times: int) -> None:
    """A client that loses too often in a row gets the conflict, and tries again."""
    done = 0
    while done < times:
        (answer,) = await patch_often(runtime, which, 1, False)
        assert answer in ("ok", "conflict")
        done += answer == "ok"


async def test_patches_of_one_object_from_several_processes_are_all_kept(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor
) -> None:
    await allocation(runtime, "default", "one")
    await in_processes(pool, database_url, patch_until_done, 25)
    stored = await object_ops.get(runtime, Key("Allocation", "default", "one"))
    assert isinstance(stored, Stored)
    assert stored.labels["count"] == str(25 * PROCESSES)


async def test_pinned_patches_either_count_or_are_told_of_the_conflict(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor
) -> None:
    await allocation(runtime, "default", "one")
    answers = await in_processes(pool, database_url, patch_often, 40, True)
    total = Counter(answer for some in answers for answer in some)
    assert set(total) == {"ok", "conflict"}
    stored = await object_ops.get(runtime, Key("Allocation", "default", "one"))
    assert isinstance(stored, Stored)
    assert stored.labels["count"] == str(total["ok"])


# Everything at once.


class Mix:
    """Random operations on few objects, where collisions are the rule. A seed repeats the requests of each process."""

    def __init__(self, runtime: Runtime, which: int, seed: int) -> None:
        self.runtime = runtime
        self.which = which
        self.dice = random.Random(seed * 100 + which)
        self.number = 0

    def name(self) -> str:
        """A new name, or one that somebody may have taken."""
        self.number += 1
        return f"p{self.which}-{self.number}" if self.dice.random() < 0.7 else f"shared-{self.dice.randrange(12)}"

    def some(self, *choices: str) -> str:
        return self.dice.choice(choices)

    def space(self) -> str:
        return self.some("s1", "s2", "s3")

    async def living(self, space: str) -> str:
        """The name of something that is there, or was a moment ago."""
        async with self.runtime.database.reader() as db:
            rows = await db.fetch("SELECT name FROM object WHERE kind = 'Allocation' AND namespace = $1", space)
        return self.dice.choice(rows)["name"] if rows else "nobody"

    # What users and nodes do.

    async def submit(self) -> Reply:
        spec: dict[str, Any] = {"ttl": "1h"} if self.dice.random() < 0.3 else {}
        if self.dice.random() < 0.1:
            spec |= {"exclusive": True, "nodes": self.dice.randint(1, 2)}
        size = self.some("1", "2", "500m", "0")
        return await allocation(self.runtime, self.space(), self.name(), spec=spec, gpu=size, cpu=1)

    async def join(self) -> Reply:
        group = {"groupId": f"g{self.dice.randrange(4)}", "minMembers": 3}
        return await allocation(self.runtime, self.space(), self.name(), spec={"gangScheduling": group}, gpu=1)

    async def place(self) -> Reply:
        space = self.space()
        targets = self.dice.sample(["n1", "n2", "n3"], 1 if self.dice.random() < 0.8 else 2)
        return await bind(self.runtime, space, await self.living(space), *targets)

    async def finish(self) -> Reply:
        space = self.space()
        phase = self.dice.choice([Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, Phase.PENDING, Phase.CANCELLED])
        return await end(self.runtime, space, await self.living(space), phase)

    async def release(self) -> Reply:
        space = self.space()
        return await delete(self.runtime, "Allocation", space, await self.living(space))

    async def label(self) -> Reply:
        space = self.space()
        key = Key("Allocation", space, await self.living(space))
        return await object_ops.change(self.runtime, key, _count_up, tenant="test")

    # What administrators do.

    async def reparent(self) -> Reply:
        child, parent = self.dice.sample(["t1", "t2", "t3"], 2)
        return await change(self.runtime, "Tenant", "", child, parent=self.some(parent, ""))

    async def relimit(self) -> Reply:
        limits = self.dice.choice([{}, {GPU: self.dice.randint(0, 12)}, {"cpu": 20, GPU: 6}, {"nodes": 2}])
        tier = self.some("", "gold")
        return await change(self.runtime, "Tenant", "", self.some("t1", "t2", "t3"), limits=limits, tier=tier)

    async def edit_tier(self) -> Reply:
        return await change(self.runtime, "Tier", "", "gold", limits={self.some(GPU, "cpu"): self.dice.randint(0, 20)})

    async def edit_system(self) -> Reply:
        limits = self.dice.choice([{}, {GPU: self.dice.randint(5, 30)}, {"cpu": 40}])
        return await change(self.runtime, "Settings", "", "system", limits=limits)

    async def add_quota(self) -> Reply:
        scopes = self.dice.choice([{}, {"scopes": ["Terminating"]}])
        return await quota(self.runtime, self.space(), self.some("q1", "q2"), hard={GPU: "8", "pods": "9"}, **scopes)

    async def edit_quota(self) -> Reply:
        hard = {self.some(GPU, "cpu", "nodes"): str(self.dice.randint(0, 9))}
        return await change(self.runtime, "ResourceQuota", self.space(), self.some("q1", "q2"), hard=hard)

    async def drop_quota(self) -> Reply:
        return await delete(self.runtime, "ResourceQuota", self.space(), self.some("q1", "q2"))

    async def move_space(self) -> Reply:
        owner = self.some("t1", "t2", "t3")

        def edit(before: Stored, document: dict[str, Any]) -> Any:
            document["metadata"]["labels"] = {"bursar.io/tenant": owner}
            one = msgspec.convert(document, BY_NAME["Namespace"].type)
            return change_command(BY_NAME["Namespace"], before, one, TEST, spec_changed=False)

        return await object_ops.change(self.runtime, Key("Namespace", "", self.space()), edit, tenant="test")

    async def cordon(self) -> Reply:
        return await change(
            self.runtime, "Node", "", self.some("n1", "n2", "n3"), unschedulable=self.dice.random() < 0.3
        )


USERS = ["submit", "submit", "submit", "join", "place", "place", "place", "finish", "finish", "release", "label"]
ADMINS = [
    "reparent", "relimit", "edit_tier", "edit_system", "add_quota", "edit_quota", "drop_quota", "move_space", "cordon",
]  # fmt: skip
# Whatever else comes back is a bug.
EXPECTED = {
    Code.QUOTA_EXCEEDED, Code.NO_CAPACITY, Code.STALE, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.IN_USE,
    Code.IMMUTABLE, Code.INVALID, Code.CONFLICT,
}  # fmt: skip


async def mix(runtime: Runtime, which: int, seed: int, seconds: float, verbs: list[list[str]]) -> dict[str, int]:
    """Several workers of one process, until the time is up; how often each verb got which answer."""
    told: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def worker(index: int) -> None:
        one = Mix(runtime, which, seed * 10 + index)
        one.which = which * 100 + index
        mine = verbs[which % len(verbs)]
        while time.monotonic() < until:
            verb = one.dice.choice(mine)
            reply = await getattr(one, verb)()
            if isinstance(reply, Refusal):
                assert reply.code in EXPECTED, (verb, reply)
            told[f"{verb}:{code(reply)}"] += 1

    await asyncio.gather(*map(worker, range(6)))
    return dict(told)


async def build_objects(runtime: Runtime) -> None:
    await create(runtime, "Tier", {"metadata": {"name": "gold"}, "spec": {"limits": {GPU: 10}}})
    for number in (1, 2, 3):
        await tenant(runtime, f"t{number}")
        await namespace(runtime, f"s{number}", f"t{number}")
        await node(runtime, f"n{number}", cpu=32, gpu=4, pods=20)


async def assert_counters_are_whole(runtime: Runtime) -> None:
    await assert_counters_equal_charges(runtime)
    await assert_placements_fill_nodes(runtime)
    await assert_gangs_count_their_members(runtime)
    async with runtime.database.reader() as db:  # locks are taken in one order, so nobody was ever in a circle
        assert await db.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0


async def assert_gangs_count_their_members(runtime: Runtime) -> None:
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        gangs = await db.fetch("SELECT namespace, name, members, charged FROM gang")
        rows = await db.fetch("SELECT * FROM object WHERE gang IS NOT NULL")
    members = [one for one in map(object_store.stored, rows) if one.fields["status.phase"] not in ENDED]
    counted = Counter((one.key.namespace, one.gang) for one in members)
    assert {(row["namespace"], row["name"]): row["members"] for row in gangs} == counted
    charged = {(row["namespace"], row["name"]) for row in gangs if row["charged"]}
    for one in members:
        assert bool(one.charge.due) != ((one.key.namespace, one.gang) in charged), one


def done(told: list[dict[str, int]]) -> Counter[str]:
    """How often each verb succeeded."""
    total: Counter[str] = Counter()
    for some in told:
        for answer, count in some.items():
            verb, _, result = answer.partition(":")
            total[verb] += count if result == "ok" else 0
    return total


async def test_the_tree_may_be_turned_over_while_others_submit(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor
) -> None:
    await build_objects(runtime)
    told = await in_processes(pool, database_url, mix, 1, 3.0 * SOAK, [ADMINS, USERS, USERS])
    successes = done(told)
    wanted = {"submit", "place", "finish", "reparent", "relimit", "add_quota", "drop_quota"}
    assert wanted <= {verb for verb, count in successes.items() if count}
    await assert_counters_are_whole(runtime)


async def test_everything_mixed_by_several_processes_at_once_leaves_all_counters_whole(
    runtime: Runtime, database_url: str, pool: ProcessPoolExecutor
) -> None:
    await build_objects(runtime)
    seed = random.randrange(10**6) if SOAK > 1 else 2
    told = await in_processes(pool, database_url, mix, seed, 4.0 * SOAK, [USERS * 3 + ADMINS])
    successes = done(told)
    assert set(USERS) | {"relimit", "add_quota", "cordon"} <= {verb for verb, count in successes.items() if count}
    await assert_counters_are_whole(runtime)
