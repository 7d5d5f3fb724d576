"""Upkeep on a real database: each duty does its work, and again does no harm."""

from datetime import timedelta

import msgspec

from bursar.api.objects.render import documents
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key
from bursar.loops.housekeeping import (
    Retention,
    drop_changes,
    finish_namespaces,
    forget_measures,
    forget_requests,
    forget_samples,
    prune_counters,
    sample_usage,
)
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects import change as change_store
from bursar.store.objects.change import PARTITION_SIZE
from bursar.store.objects.listing import Query, load_page
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    code,
    counters,
    create,
    delete,
    document,
    end,
    namespace,
    node,
    quota,
    tenant,
)


async def test_a_deleted_namespace_is_emptied_and_then_removed(runtime: Runtime) -> None:
    await namespace(runtime, "lab")
    await quota(runtime, "lab", "small", hard={"cpu": "10"})
    await allocation(runtime, "lab", "waiting", cpu=1)
    assert document(await delete(runtime, "Namespace", "", "lab"))["status"]["phase"] == "Terminating"
    assert code(await allocation(runtime, "lab", "late", cpu=1)) == "terminating"
    assert await finish_namespaces(runtime) == 1
    assert code(await object_ops.get(runtime, Key("Namespace", "", "lab"))) == "not_found"
    assert code(await object_ops.get(runtime, Key("Allocation", "lab", "waiting"))) == "not_found"
    await assert_counters_equal_charges(runtime)


async def test_a_namespace_waits_for_what_still_runs_in_it(runtime: Runtime) -> None:
    await namespace(runtime, "lab")
    await node(runtime, "n1", cpu=4)
    await allocation(runtime, "lab", "running", cpu=1)
    await bind(runtime, "lab", "running", "n1")
    await delete(runtime, "Namespace", "", "lab")
    assert await finish_namespaces(runtime) == 0
    assert await finish_namespaces(runtime) == 0
    await end(runtime, "lab", "running", Phase.CANCELLED)
    assert await finish_namespaces(runtime) == 1


async def test_what_was_measured_long_ago_and_who_was_heard_long_ago_is_forgotten(runtime: Runtime) -> None:
    await node(runtime, "here", cpu=4)
    async with runtime.database.reader() as db:
        await db.execute(
            """INSERT INTO allocation_usage (uid, epoch, node, seconds, cpu_seconds, memory_bytes, memory_bytes_max,
                                             gpu_seconds, at)
               SELECT uid, 1, 'n', 1, 1, 1, 1, 0, now() - age
                 FROM (VALUES ('old', interval '401 days'), ('young', interval '399 days')) AS line (uid, age)"""
        )
        await db.execute(
            """INSERT INTO node_seen (node, at) SELECT name, now() - age
                 FROM (VALUES ('here', interval '1 year'), ('gone', interval '2 hours'), ('new', interval '1 minute'))
                      AS line (name, age)"""
        )
        assert await forget_measures(runtime, Retention()) == 2
        assert await forget_measures(runtime, Retention()) == 0
        assert [row["uid"] for row in await db.fetch("SELECT uid FROM allocation_usage")] == ["young"]
        assert [row["node"] for row in await db.fetch("SELECT node FROM node_seen ORDER BY 1")] == ["here", "new"]


async def test_what_is_built_in_cannot_be_deleted(runtime: Runtime) -> None:
    assert code(await delete(runtime, "Namespace", "", "default")) == "forbidden"
    assert code(await delete(runtime, "Tenant", "", "default")) == "forbidden"
    assert code(await delete(runtime, "Settings", "", "system")) == "forbidden"


async def test_counters_of_forgotten_dimensions_are_pruned_and_come_back_when_used(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={"cpu": 4})
    await namespace(runtime, "lab", "lab")
    await create(
        runtime,
        "Allocation",
        {"metadata": {"name": "odd", "namespace": "lab"}, "spec": {"resources": {"requests": {"x.example/odd": "1"}}}},
    )
    await delete(runtime, "Allocation", "lab", "odd")
    assert await prune_counters(runtime) > 0
    rows = await counters(runtime)
    assert ("tenant:lab", "x.example/odd") not in rows
    assert ("tenant:lab", "cpu") in rows
    assert code(await allocation(runtime, "lab", "again", cpu=1)) == "ok"
    assert (await counters(runtime))["tenant:lab", "allocations"].accepted == 1000


async def test_a_quota_tells_its_trend_once_there_is_history(runtime: Runtime) -> None:
    await quota(runtime, "default", "small", hard={"cpu": "100"})
    await allocation(runtime, "default", "one", cpu=60)
    await sample_usage(runtime)
    async with runtime.database.reader() as db:
        page = await load_page(db, Query("ResourceQuota"))
        (shown,) = await documents(runtime.database, BY_NAME["ResourceQuota"], page.items)
        assert "trend" not in shown["status"]
        await db.execute("UPDATE usage_rollup SET hour = $1, accepted = 48000", now() - timedelta(hours=24, minutes=30))
    (shown,) = await documents(runtime.database, BY_NAME["ResourceQuota"], page.items)
    assert shown["status"]["trend"] == {"cpu": "+12% over 24h"}
    assert shown["status"]["utilization"] == {"cpu": "60%"}


async def test_a_later_sample_of_the_same_hour_replaces_the_earlier(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", cpu=2)
    await sample_usage(runtime)
    await allocation(runtime, "default", "two", cpu=3)
    await sample_usage(runtime)
    async with runtime.database.reader() as db:
        samples = await db.fetch(
            "SELECT accepted FROM usage_rollup WHERE scope = 'tenant:default' AND dimension = 'cpu'"
        )
    assert [row["accepted"] for row in samples] in ([5000], [2000, 5000])  # The hour may turn between the two.


async def test_markers_and_answers_are_forgotten_when_old(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", cpu=1)
    young = Retention()
    assert await forget_requests(runtime, young) == 0
    old = Retention(markers=timedelta(seconds=-5), answers=timedelta(seconds=-5))
    assert await forget_requests(runtime, old) > 0
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM request") == 0


async def test_old_changes_are_dropped_by_the_partition_and_the_floor_rises(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE revision SET value = $1", 3 * PARTITION_SIZE)
        await change_store.ensure_partitions(db)
    await allocation(runtime, "default", "one", cpu=1)
    assert await drop_changes(runtime, Retention(watch=1, audit=4 * PARTITION_SIZE)) == []
    async with runtime.database.reader() as db:
        assert (await change_store.load_position(db)).floor == 3 * PARTITION_SIZE
        await db.execute("UPDATE revision SET floor = 0")
    dropped = await drop_changes(runtime, Retention(watch=2 * PARTITION_SIZE, audit=PARTITION_SIZE))
    assert dropped == ["change_000000000", "change_000000001"]
    async with runtime.database.reader() as db:
        position = await change_store.load_position(db)
        assert position.floor == 2 * PARTITION_SIZE
        assert len(await change_store.load_since(db, position.floor, 10)) == 1
    assert code(await allocation(runtime, "default", "two", cpu=1)) == "ok"


async def test_soft_limits_warn_and_never_refuse(runtime: Runtime) -> None:
    await quota(runtime, "default", "soft", soft={"cpu": "1"})
    assert code(await allocation(runtime, "default", "one", cpu=5)) == "ok"
    async with runtime.database.reader() as db:
        page = await load_page(db, Query("ResourceQuota"))
        rows = await quota_store.load_scopes(db, ["quota:default/soft"])
    (shown,) = await documents(runtime.database, BY_NAME["ResourceQuota"], page.items)
    assert shown["status"]["warnings"] == ["cpu: 5 used, soft limit 1"]
    assert rows["quota:default/soft", "cpu"].soft == 1000
    assert msgspec.json.decode(page.items[0].doc)["spec"]["soft"] == {"cpu": "1"}


async def test_old_samples_of_usage_are_dropped(runtime: Runtime) -> None:
    await allocation(runtime, "default", "one", cpu=1)
    await sample_usage(runtime)
    async with runtime.database.reader() as db:
        fresh = await db.fetchval("SELECT count(*) FROM usage_rollup")
        await db.execute(
            "INSERT INTO usage_rollup SELECT scope, dimension, hour - interval '401 days', hard, accepted, bound"
            " FROM usage_rollup"
        )
    assert await forget_samples(runtime, Retention()) == fresh > 0
    assert await forget_samples(runtime, Retention()) == 0
    async with runtime.database.reader() as db:
        assert await db.fetchval("SELECT count(*) FROM usage_rollup") == fresh
