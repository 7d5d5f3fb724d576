"""Short words for tests of claimed nodes that are paid for beforehand, and what must hold after each step."""

from bursar.core.values.money import MICROS, nanocredits
from bursar.ops.credit.ledger_verify import verify
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.node import TRACELESS
from support.credit.ledgers import assert_books_balance, pass_time, priced, stop_clock
from support.credit.paying import machine, prepaid, submitted_by
from support.nodes.claims import allow, claim, joins
from support.runtime.runtime import bind, code
from support.scheduling.evictions import assert_books_balance as assert_rooms_balance

ANN, BOB = "default/ann", "default/bob"
NODES = ("n1", "n2", "n3")
RATE = 8 * nanocredits("0.01")  # of a node, a second
WINDOW = 600
HELD = RATE * WINDOW


async def clinic(runtime: Runtime, pool: int = 3) -> None:
    """A prepaid tenant without an account, nodes of eight H100s at 0.01 credits a second, and a clock that stands."""
    await stop_clock(runtime)
    await prepaid(runtime)
    await priced(runtime)
    for name in NODES:
        await machine(runtime, name)
        await joins(runtime, name, TRACELESS)
    await allow(runtime, pool)


async def claimed(runtime: Runtime, node: str = "n1", who: str = ANN) -> None:
    assert code(await claim(runtime, node, who)) == "ok"


async def placed(runtime: Runtime, name: str, *nodes: str, who: str = ANN, gpus: int = 1) -> None:
    assert code(await submitted_by(runtime, who, name, gpus)) == "ok"
    assert code(await bind(runtime, "default", name, *nodes)) == "ok"


async def passed(runtime: Runtime, seconds: float) -> None:
    await pass_time(runtime, round(seconds * MICROS))


async def assert_paid_once(runtime: Runtime) -> None:
    """Each open lease is of one placement, or of one claim; what is placed on a node whose claim is paid for has that
    one. The ledger balances, and is proven."""
    async with runtime.database.reader() as db, db.transaction(isolation="repeatable_read"):
        claims = await db.fetch(
            "SELECT name AS node, claim ->> 'id' AS uid, (claim ->> 'lease')::bigint AS lease FROM node"
            " WHERE (claim ->> 'lease') IS NOT NULL AND claim ->> 'lease' <> '0'"
        )
        placements = await db.fetch("SELECT node, uid, lease FROM placement WHERE lease IS NOT NULL")
        open_ = {tuple(row) for row in await db.fetch("SELECT node, uid, id FROM lease WHERE uid <> ''")}
    of_claims = {row["node"]: row["lease"] for row in claims}
    own = {tuple(row) for row in placements if row["node"] not in of_claims}
    assert {tuple(row) for row in claims} | own == open_
    assert all(of_claims[row["node"]] == row["lease"] for row in placements if row["node"] in of_claims)
    await assert_books_balance(runtime)
    await assert_rooms_balance(runtime)
    assert (await verify(runtime)).findings == ()
