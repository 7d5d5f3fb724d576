"""Short names for requests under approval gates: a gated tenant, claims, and decisions at gates."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.core.objects.approval import Decision, Verdict
from bursar.core.objects.object import Key, Origin
from bursar.ops.approval import decide as ops
from bursar.ops.approval.decide import Judgement
from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import counters, create, get, namespace, tenant

APPROVER = Origin("user:ann", "approve")


async def gated(runtime: Runtime, name: str = "acme", gates: tuple[str, ...] = ("quota",), **spec: Any) -> None:
    """A tenant whose requests pass gates, with a namespace of its name."""
    policy = {"gates": list(gates), **spec.pop("approval", {})}
    await tenant(runtime, name, approval=policy, **spec)
    await namespace(runtime, name, name)


async def claim(runtime: Runtime, namespace: str, name: str, **resources: Any) -> Reply:
    named = {key.replace("_", "-"): value for key, value in resources.items()}
    document = {"metadata": {"name": name, "namespace": namespace}, "spec": {"type": "cluster", "resources": named}}
    return await create(runtime, "ResourceClaim", document)


async def decide(
    runtime: Runtime,
    kind: str,
    namespace: str,
    name: str,
    verdict: str = "approve",
    *,
    gate: str = "quota",
    reason: str = "",
    until: str = "",
    by: str = "ann",
    tenants: tuple[str, ...] = (),
) -> Reply:
    found = await get(runtime, kind, namespace, name)
    decision = Decision(gate, Verdict(verdict), by, reason, until)
    return await ops.decide(runtime, Judgement(found, decision, Origin(f"user:{by}", verdict), tenants))


async def status(runtime: Runtime, kind: str, namespace: str, name: str) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode((await get(runtime, kind, namespace, name)).status)
    return decoded


async def approval(runtime: Runtime, kind: str, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await status(runtime, kind, namespace, name))["approval"]
    return found


async def used(runtime: Runtime, tenant: str, dimension: str) -> float:
    """The accepted amount of a tenant, in units."""
    counter = (await counters(runtime)).get((f"tenant:{tenant}", dimension))
    return counter.accepted / 1000 if counter else 0


def key(kind: str, namespace: str, name: str) -> Key:
    return Key(kind, namespace, name)
