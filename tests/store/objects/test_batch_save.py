"""What is placed is saved with what is written, or nothing is."""

import pytest

from bursar.core.nodes.node import NodeCapacity, Placement
from bursar.core.objects.object import Key, Origin, Stored, Write
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.replace import replace
from bursar.store.db.database import Connection, Stale
from bursar.store.nodes import node as nodes
from bursar.store.objects import batch
from bursar.store.objects.change import ensure_partitions

WORK = Stored(Key("Allocation", "default", "a"), "a-uid", "default", {}, {}, b"{}", b"{}")
BINDING = Origin("system:test", "bind")
ROOM = NodeCapacity("n1", 1, True, {"cpu": 9}, {}, {})
PART = Placement("n1", "a-uid", "default", "a", "default", 1, False, {"cpu": 2}, {})
FULLER = replace(ROOM, allocated={"cpu": 2})


@pytest.fixture
async def context(db: Connection) -> Connection:
    await ensure_partitions(db)
    await nodes.put(db, [ROOM], {})
    return db


async def save(db: Connection, writes: list[Write], used: list[NodeCapacity], placed: list[Placement]) -> None:
    changes = Counters(Tree(), {}).changes()
    async with db.transaction():
        await batch.save_placed(db, writes, Tree(), changes, used, placed)


async def revisions(db: Connection) -> dict[str, int]:
    return {row["node"]: row["revision"] for row in await db.fetch("SELECT node, revision FROM placement")}


async def test_a_placement_has_the_number_of_its_works_last_change(context: Connection) -> None:
    other = replace(WORK, key=Key("Allocation", "default", "b"), uid="b-uid")
    writes = [Write(one.key, before, one, BINDING) for one, before in ((WORK, None), (other, None), (WORK, WORK))]
    writes.append(Write(other.key, other, other, BINDING))
    await save(context, writes, [FULLER], [PART])
    assert await revisions(context) == {"n1": writes[2].revision}
    assert [one.revision - writes[0].revision for one in writes] == [0, 1, 2, 3]
    assert await nodes.load(context, ["n1"]) == {"n1": FULLER}
    assert await nodes.load_placements_on(context, ["n1"]) == [PART]


async def test_of_what_is_placed_already_only_that_is_changed_which_may_change(context: Connection) -> None:
    """Without any change of free capacity."""
    first, second = Write(WORK.key, None, WORK, BINDING), Write(Key("Allocation", "default", "b"), None, WORK, BINDING)
    await save(context, [first], [FULLER], [PART])
    await save(context, [second], [], [replace(PART, wanted=False, epoch=2, resources={"cpu": 5})])
    assert await nodes.load_placements_on(context, ["n1"]) == [replace(PART, wanted=False, epoch=2)]
    assert await revisions(context) == {"n1": second.revision}
    assert await nodes.load(context, ["n1"]) == {"n1": FULLER}


async def test_a_node_that_is_gone_undoes_everything(context: Connection) -> None:
    write = Write(WORK.key, None, WORK, BINDING)
    with pytest.raises(Stale, match="2 rows to be used, 1 found"):
        await save(context, [write], [FULLER, replace(FULLER, name="gone")], [PART])
    assert await revisions(context) == {}
    assert await nodes.load(context, ["n1"]) == {"n1": ROOM}
    assert await context.fetchval("SELECT count(*) FROM object") == 0
