"""Short words for what tests do with work that is paid for beforehand."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.workloads.report import Report
from bursar.core.credit.billing_terms import Billing
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Origin
from bursar.ops.lifecycle.create import create_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import report
from bursar.wire.kinds.registry import BY_NAME
from support.credit.ledgers import priced
from support.runtime.runtime import TEST, change, code, create, get

WINDOW = 15  # seconds


async def prepaid(runtime: Runtime, tenant: str = "default", **billing: Any) -> None:
    """From now on this tenant pays for the next 15 seconds before they begin."""
    terms = {"mode": Billing.PREPAID, "leaseSeconds": WINDOW, **billing}
    assert code(await change(runtime, "Tenant", "", tenant, billing=terms)) == "ok"


async def machine(runtime: Runtime, name: str, klass: str = "h100", gpus: int = 8, **capacity: Any) -> None:
    """A node whose GPUs are of a class."""
    resources = {"nvidia.com/gpu": str(gpus), **{key: str(value) for key, value in capacity.items()}}
    document = {"metadata": {"name": name, "labels": {"gpu-type": klass}}, "spec": {"capacity": resources}}
    assert code(await create(runtime, "Node", document)) == "ok"


async def paid_nodes(runtime: Runtime, *names: str) -> None:
    """The default tenant pays beforehand for work on these nodes, of whose H100s each costs 0.01 credits a second."""
    await prepaid(runtime)
    await priced(runtime)
    for name in names:
        await machine(runtime, name)


async def submitted_by(
    runtime: Runtime, user: str, name: str, gpus: int = 1, namespace: str = "default", **spec: Any
) -> Reply:
    """An allocation of somebody: `default/ann` is ann of the tenant default."""
    body = {"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}, **spec}
    one = msgspec.convert(
        {"metadata": {"name": name, "namespace": namespace}, "spec": body}, BY_NAME["Allocation"].type
    )
    command = create_command(BY_NAME["Allocation"], one, Origin(f"user:{user}", "create"))
    return await object_ops.submit(runtime, command, tenant="test")


async def ends(runtime: Runtime, on: str, name: str, phase: Phase = Phase.SUCCEEDED, **said: Any) -> Reply:
    """A node says that something ended there."""
    key = Key("Allocation", "default", name)
    gang = (await get(runtime, "Allocation", "default", name)).gang
    command = Report(key=key, origin=TEST, phase=phase, node=on, gang=gang, **said)
    return await report(runtime, command)


async def leases(runtime: Runtime, name: str = "") -> list[dict[str, Any]]:
    """Open leases, in the order of their numbers; of one allocation, or all."""
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT * FROM lease ORDER BY id")
    uid = (await get(runtime, "Allocation", "default", name)).uid if name else ""
    return [dict(row) for row in rows if uid in ("", row["uid"])]


async def ended(runtime: Runtime) -> list[dict[str, Any]]:
    async with runtime.database.reader() as db:
        return [dict(row) for row in await db.fetch("SELECT * FROM lease_ended ORDER BY id")]


async def account(runtime: Runtime, tenant: str = "default", user: str = "") -> dict[str, Any]:
    async with runtime.database.reader() as db:
        row = await db.fetchrow("SELECT * FROM account WHERE (tenant, username) = ($1, $2)", tenant, user)
    assert row is not None, f"there is no account {tenant}/{user}"
    return dict(row)


STATE = {
    "account": "account ORDER BY id",
    "lease": "lease ORDER BY id",
    "lease_ended": "lease_ended ORDER BY id",
    "ledger": "ledger",
    "entry": "entry ORDER BY number",
    "notice": "notice ORDER BY id",
    "quota": "quota WHERE (accepted, bound) <> (0, 0) ORDER BY scope, dimension",  # an empty counter is none
    "node": "node ORDER BY name",
    "placement": "placement ORDER BY node, uid",
    "object": "object ORDER BY kind, namespace, name",
    "revision": "revision",
}


async def state(runtime: Runtime) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that what is refused must leave as it was."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        return {table: [tuple(row) for row in await db.fetch(f"SELECT * FROM {rows}")] for table, rows in STATE.items()}


async def assert_all_is_paid(runtime: Runtime) -> None:
    """Each placement of who pays beforehand has its own open lease, and each lease of a placement has its placement."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        placed = await db.fetch("SELECT node, uid, epoch, lease FROM placement WHERE lease IS NOT NULL")
        open_ = await db.fetch("SELECT node, uid, epoch, id AS lease FROM lease WHERE uid <> ''")
    assert sorted(map(tuple, placed)) == sorted(map(tuple, open_))
