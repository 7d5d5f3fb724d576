"""A runtime on a database of its own, and short names for the verbs that tests use."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply, Written
from bursar.commands.lifecycle.dispatch import change_command, delete_command
from bursar.commands.objects.object import DeletePreconditions
from bursar.commands.scheduling.bind import Bind, BindMember
from bursar.commands.workloads import allocation as allocation_ops
from bursar.commands.workloads.report import Report
from bursar.core.nodes.bind_check import Target
from bursar.core.objects.allocation import Phase
from bursar.core.objects.charge import Charge
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.quota import Counter, Move, deltas
from bursar.core.quota.tenant_tree import Row
from bursar.core.values.idempotency import IdempotencyKey, RequestKey
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.bootstrap import bootstrap
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.open_runtime import open_runtime
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling import placement as placement_ops
from bursar.store.db.database import Connection, Database
from bursar.store.objects import object as object_store
from bursar.store.quota import quota as quota_store
from bursar.store.quota import tenant_tree as tree_store
from bursar.wire.kinds.registry import BY_NAME

TEST = Origin("user:test", "test")
BINDING = Origin("user:test", "bind")
GPU = "nvidia.com/gpu"


@pytest.fixture
async def runtime(database_url: str) -> AsyncIterator[Runtime]:
    async with opened(database_url) as one:
        yield one


@pytest.fixture
async def rival(runtime: Runtime, database_url: str) -> AsyncIterator[Runtime]:
    """Another process on the same database."""
    async with opened(database_url) as one:
        yield one


class opened:  # noqa: N801
    """A runtime with the default objects, closed at the end."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Runtime:
        self._database = await Database.open(self._url)
        self._runtime = await open_runtime(self._database)
        await bootstrap(self._runtime)
        return self._runtime

    async def __aexit__(self, *_: object) -> None:
        await self._runtime.close()
        await self._database.close()


def claim(request_id: str, fingerprint: str = "") -> IdempotencyKey:
    return IdempotencyKey(RequestKey("test", request_id), fingerprint)


async def create(
    runtime: Runtime, kind: str, document: dict[str, Any], *, claimed: IdempotencyKey | None = None, admin: bool = True
) -> Reply:  # fmt: skip
    one = msgspec.convert(document, BY_NAME[kind].type)
    assert BY_NAME[kind].check(one) == []
    return await object_ops.submit(
        runtime, create_command(BY_NAME[kind], one, TEST, claimed, admin=admin), tenant="test"
    )


async def tenant(runtime: Runtime, name: str, **spec: Any) -> Reply:
    return await create(runtime, "Tenant", {"metadata": {"name": name}, "spec": spec})


async def namespace(runtime: Runtime, name: str, tenant: str = "default") -> Reply:
    return await create(runtime, "Namespace", {"metadata": {"name": name, "labels": {"bursar.io/tenant": tenant}}})


async def quota(runtime: Runtime, namespace: str, name: str, **spec: Any) -> Reply:
    return await create(runtime, "ResourceQuota", {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


async def node(runtime: Runtime, name: str, **capacity: Any) -> Reply:
    resources = {key.replace("gpu", "nvidia.com/gpu"): str(value) for key, value in capacity.items()}
    return await create(runtime, "Node", {"metadata": {"name": name}, "spec": {"capacity": resources}})


async def allocation(
    runtime: Runtime,
    namespace: str,
    name: str,
    *,
    claimed: IdempotencyKey | None = None,
    spec: Mapping[str, Any] | None = None,
    **requests: Any,
) -> Reply:
    resources = {key.replace("gpu", "nvidia.com/gpu"): str(value) for key, value in requests.items()}
    body = {"resources": {"requests": resources}, **(spec or {})}
    document = {"metadata": {"name": name, "namespace": namespace}, "spec": body}
    return await create(runtime, "Allocation", document, claimed=claimed)


async def change(runtime: Runtime, kind: str, namespace: str, name: str, **spec: Any) -> Reply:
    """Set fields of the spec."""

    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document.setdefault("spec", {}).update(spec)
        one = msgspec.convert(document, BY_NAME[kind].type)
        assert BY_NAME[kind].check(one) == []
        return change_command(BY_NAME[kind], before, one, TEST, spec_changed=True)

    return await object_ops.change(runtime, Key(kind, namespace, name), edit, tenant="test")


async def delete(runtime: Runtime, kind: str, namespace: str, name: str) -> Reply:
    key = Key(kind, namespace, name)
    before = await object_ops.get(runtime, key)
    if isinstance(before, Refusal):
        return before
    command = delete_command(BY_NAME[kind], before, TEST, preconditions=DeletePreconditions())
    return await object_ops.submit(runtime, command, tenant="test")


async def bind(runtime: Runtime, namespace: str, name: str, *nodes: str, fence: int | None = None) -> Reply:
    """Place one allocation by itself."""
    placed = await bind_unit(runtime, namespace, {name: nodes}, fence=fence)
    return placed[0] if isinstance(placed, tuple) else placed


async def bind_unit(
    runtime: Runtime, namespace: str, members: Mapping[str, tuple[str, ...]], *, fence: int | None = None
) -> Reply:
    """Place allocations as one unit: by name, on which nodes."""
    unit = [await member(runtime, namespace, name, *nodes) for name, nodes in members.items()]
    for one in unit:
        if isinstance(one, Refusal):
            return one
    command = Bind.unit([one for one in unit if not isinstance(one, Refusal)], BINDING, fence)
    return await runtime.binding.submit(command, namespace)


async def member(runtime: Runtime, namespace: str, name: str, *nodes: str) -> BindMember | Refusal:
    key = Key("Allocation", namespace, name)
    stored = await object_ops.get(runtime, key)
    if isinstance(stored, Refusal):
        return stored
    targets = tuple(Target(one) for one in nodes)
    return BindMember(key, targets, allocation_ops.request_in(stored.doc), stored.gang, stored.uid)


async def get(runtime: Runtime, kind: str, namespace: str, name: str) -> Stored:
    found = await object_ops.get(runtime, Key(kind, namespace, name))
    assert isinstance(found, Stored), found
    return found


async def end(runtime: Runtime, namespace: str, name: str, phase: Phase = Phase.SUCCEEDED) -> Reply:
    key = Key("Allocation", namespace, name)
    stored = await object_ops.get(runtime, key)
    if isinstance(stored, Refusal):
        return stored
    return await placement_ops.report(runtime, Report(key=key, origin=TEST, phase=phase, gang=stored.gang))


def document(reply: Reply) -> dict[str, Any]:
    assert isinstance(reply, Written), reply
    shown: dict[str, Any] = msgspec.json.decode(reply.doc)
    shown["status"] = msgspec.json.decode(reply.status)
    return shown


def refusal(reply: Reply) -> Refusal:
    assert isinstance(reply, Refusal), reply
    return reply


def code(reply: Reply) -> str:
    return str(reply.code) if isinstance(reply, Refusal) else "ok"


async def counters(runtime: Runtime) -> dict[Row, Counter]:
    async with runtime.database.reader() as db:
        return await quota_store.load_all(db)


async def gpus(runtime: Runtime, scope: str) -> tuple[int, int] | None:
    """(accepted, bound) GPUs of a scope; None where there is no counter."""
    counter = (await counters(runtime)).get((scope, GPU))
    return None if counter is None else (counter.accepted // 1000, counter.bound // 1000)


@asynccontextmanager
async def one_moment(runtime: Runtime) -> AsyncIterator[Connection]:
    """A snapshot of the database for as long as a paused test takes: elsewhere an idle transaction is ended soon."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        await db.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        yield db


async def assert_counters_equal_charges(runtime: Runtime) -> None:
    """Every counter is the sum of what objects hold: recomputed from all of them, by the tree as it is."""
    async with one_moment(runtime) as db:
        position = await tree_store.load_position(db)
        tree = await runtime.trees.at(db, position.version)
        stored = await quota_store.load_all(db)
        rows = await db.fetch(object_store.SQL.charges)
    charges: list[tuple[str, Charge]] = [(row["namespace"], object_store.decode_charge(row["charge"])) for row in rows]
    sums = deltas(tree, [Move(namespace, after=charge) for namespace, charge in charges])
    expected = {
        row: (delta.accepted, delta.bound) for row, delta in sums.items() if (delta.accepted, delta.bound) != (0, 0)
    }
    actual = {row: (one.accepted, one.bound) for row, one in stored.items() if (one.accepted, one.bound) != (0, 0)}
    assert actual == expected
