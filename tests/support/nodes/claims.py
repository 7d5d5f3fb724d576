"""Short words for tests of claimed nodes: people of tenants, what they claim, submit and give back."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.nodes.claim import NOBODYS, ReleaseNode
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.objects.object import Origin
from bursar.core.values.access import Reach
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Refusal
from bursar.ops.lifecycle.create import create_command
from bursar.ops.nodes import claim as ops
from bursar.ops.nodes.capacity import report_capacity, report_isolation
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.node import node_key
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import change

EVERYTHING = Reach(everything=True)


def origin(who: str, verb: str) -> Origin:
    return Origin(f"user:{who}", verb)


async def allow(runtime: Runtime, size: int) -> None:
    """How many nodes may be claimed from now on."""
    reply = await change(runtime, "Settings", "", "system", limits={"sensitive_pool_size": str(size)})
    assert not isinstance(reply, Refusal), reply


async def claim(runtime: Runtime, node: str, who: str, **more: Any) -> Reply:
    """Somebody, as `tenant/name`, claims a node for themselves."""
    tenant, _, user = who.partition("/")
    return await ops.claim_node(
        runtime, node, origin(who, "claim"), Reach(tenant=tenant), tenant=tenant, user=user, **more
    )


async def release(runtime: Runtime, node: str, who: str, over: Reach = NOBODYS, **more: Any) -> Reply:
    tenant = who.partition("/")[0]
    command = ReleaseNode(key=node_key(node), origin=origin(who, "release"), user=who, over=over)
    return await ops.release_node(runtime, command, over if over.everything else Reach(tenant=tenant), **more)


async def joins(runtime: Runtime, node: str, *features: str, isolation: str = "bubblewrap") -> None:
    """The agent of a node says how it keeps tenants apart, and what it can do."""
    async with runtime.database.reader() as db:
        amounts = (await node_store.load(db, [node]))[node].allocatable
    capacity = {name: format_amount(name, amount) for name, amount in amounts.items()}
    for reply in (
        await report_capacity(runtime, node, capacity, features),
        await report_isolation(runtime, node, isolation, ""),
    ):
        assert not isinstance(reply, Refusal), reply


async def is_clean(runtime: Runtime, node: str) -> bool:
    async with runtime.database.reader() as db:
        return not (await node_store.load(db, [node]))[node].dirty


async def submit(runtime: Runtime, namespace: str, name: str, who: str, **spec: Any) -> Reply:
    """Somebody submits work on one GPU."""
    body = {"resources": {"requests": {"nvidia.com/gpu": "1"}}, **spec}
    document = {"metadata": {"name": name, "namespace": namespace}, "spec": body}
    one = msgspec.convert(document, BY_NAME["Allocation"].type)
    assert BY_NAME["Allocation"].check(one) == []
    command = create_command(BY_NAME["Allocation"], one, origin(who, "create"), None)
    return await object_ops.submit(runtime, command, tenant=namespace)


async def claim_of(runtime: Runtime, node: str) -> NodeClaim | None:
    async with runtime.database.reader() as db:
        return (await node_store.load(db, [node]))[node].claim


async def holders(runtime: Runtime) -> dict[str, str]:
    """Who holds which node."""
    async with runtime.database.reader() as db:
        capacities = await node_store.load_claimed(db)
    return {name: capacity.claim.holder for name, capacity in capacities.items() if capacity.claim is not None}
