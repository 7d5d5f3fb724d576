"""Usage reports through the REST API: hours, budgets, cost, visibility; and the table for chargeback."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bursar.core.usage.external_budget import Remaining
from bursar.ops.usage.usage_rollup import roll
from bursar.store.usage import budget as budget_store
from support.api.site import Reply, Site, allocation
from support.runtime.runtime import bind
from support.usage.spent_usage import GPU, aged, ago, priced, spent

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR = 1 / 3600  # how far a figure may be off: the clock goes on between asking and answering


def near(hours: float, units: float = 1) -> Any:
    return pytest.approx(hours, abs=20 * units * HOUR)


async def team(site: Site, parent: str = "", *, days: float = 400, **spec: Any) -> str:
    """A tenant that has been there for long, with a namespace of its name."""
    name = site.name("lab")
    body = {"metadata": {"name": name}, "spec": {**({"parent": parent} if parent else {}), **spec}}
    assert (await site.post("tenants", body)).status == 201
    await site.namespace(name, name)
    await aged(site.context.database, name, days)
    return name


async def use(site: Site, tenant: str, user: str, gpus: float, **when: Any) -> None:
    amounts = {GPU: int(gpus * 1000), "nodes": int(gpus * 125), "cpu": 8000}
    await spent(site.context.database, tenant, f"{tenant}/{user}", amounts, **when)


async def entered(site: Site) -> None:
    """All that happened is in buckets."""
    while await roll(site.context.database):
        pass


async def report(site: Site, path: str, **options: Any) -> Any:
    reply = await site.get(path, **options)
    assert reply.status == 200, reply
    return reply.body


def refused(reply: Reply, status: int, code: str) -> None:
    assert (reply.status, reply.body["details"]["code"]) == (status, code), reply


# A tenant.


async def test_hours_of_what_ran_and_runs_are_told_against_the_budgets(site: Site) -> None:
    name = await team(site, gpuHoursBudget=100, nodeHoursBudget=1000)
    await use(site, name, "ann", 4, begin=ago(hours=30), hours=10)
    await use(site, name, "bob", 2, begin=ago(hours=5))
    await use(site, name, "old", 8, begin=ago(days=95), hours=96)
    shown = await report(site, f"tenants/{name}/usage", days=90)
    assert (shown["tenant"], shown["days"]) == (name, 90)
    assert shown["gpu_hours_used"] == near(40 + 10, 2)
    assert shown["node_hours_used"] == near(5 + 1.25)
    assert (shown["gpu_hours_budget"], shown["node_hours_budget"]) == (100, 1000)
    assert shown["utilization"] == pytest.approx(0.5, abs=0.001)
    assert shown["source"] == "internal"
    assert [(one["user"], one["gpu_hours_used"]) for one in shown["users"]] == [
        (f"{name}/ann", near(40)), (f"{name}/bob", near(10, 2)),
    ]  # fmt: skip
    assert shown["user_count"] == 2
    assert {one["resource"] for one in shown["resources"]} == {GPU, "nodes", "cpu"}
    assert shown["to"] > shown["from"]


async def test_what_was_entered_in_buckets_counts_as_much_as_what_was_not(site: Site) -> None:
    name = await team(site)
    await use(site, name, "ann", 4, begin=ago(days=3, minutes=7), hours=48 + 4 / 60)
    await use(site, name, "ann", 1, begin=ago(hours=7))
    before = await report(site, f"tenants/{name}/usage", days=2)
    await entered(site)
    after = await report(site, f"tenants/{name}/usage", days=2)
    assert before["gpu_hours_used"] == near(4 * (24 - 3 / 60) + 7, 5)
    assert after["gpu_hours_used"] == pytest.approx(before["gpu_hours_used"], abs=20 * HOUR)


async def test_the_worse_fraction_is_told_and_without_a_budget_none(site: Site) -> None:
    name = await team(site, gpuHoursBudget=1000, nodeHoursBudget=2)
    await use(site, name, "ann", 8, begin=ago(hours=11), hours=1)
    assert (await report(site, f"tenants/{name}/usage"))["utilization"] == 0.5
    bare = await report(site, f"tenants/{await team(site)}/usage")
    assert [bare[one] for one in ("gpu_hours_budget", "node_hours_budget", "utilization")] == [None, None, None]
    assert (bare["gpu_hours_used"], bare["users"], bare["resources"]) == (0.0, [], [])


async def test_the_window_is_that_of_budgets_unless_another_is_asked_for(site: Site) -> None:
    name = await team(site)
    await use(site, name, "ann", 1, begin=ago(days=11), hours=24)
    assert (await report(site, f"tenants/{name}/usage"))["days"] == 90
    assert (await report(site, f"tenants/{name}/usage"))["gpu_hours_used"] == 24
    assert (await report(site, f"tenants/{name}/usage", days=9))["gpu_hours_used"] == 0


async def test_what_is_told_by_whoever_keeps_the_budget_takes_precedence(site: Site) -> None:
    name = await team(site, gpuHoursBudget=100, nodeHoursBudget=100)
    await use(site, name, "ann", 1, begin=ago(hours=30), hours=20)
    async with site.context.database.reader() as db:
        await budget_store.save(db, "waldur", datetime.now(UTC), {name: Remaining(10.0, None)}, 60)
    shown = await report(site, f"tenants/{name}/usage")
    assert (shown["gpu_hours_used"], shown["source"], shown["utilization"]) == (90, "waldur", 0.9)
    assert shown["node_hours_used"] == 2.5
    # It is of the budget's period: other windows are counted here.
    assert (await report(site, f"tenants/{name}/usage", days=7))["gpu_hours_used"] == 20
    async with site.context.database.reader() as db:
        await budget_store.withdraw(db, "waldur", datetime.now(UTC), "away")
    shown = await report(site, f"tenants/{name}/usage")
    assert (shown["gpu_hours_used"], shown["source"], shown["utilization"]) == (20, "internal", 0.2)


async def test_a_parent_counts_those_below_it_and_its_users_see_only_their_own_tenant(site: Site) -> None:
    top = await team(site, gpuHoursBudget=100)
    low = await team(site, top)
    await use(site, top, "ann", 1, begin=ago(hours=12), hours=2)
    await use(site, low, "bob", 4, begin=ago(hours=12), hours=2)
    for role, users, tenants in (
        ("tenant-admin", [f"{low}/bob", f"{top}/ann"], [low, top]),
        ("user", [f"{top}/ann"], [top]),
    ):
        token = await site.token(role, tenant=top, user="eve")
        shown = await report(site, f"tenants/{top}/usage", token=token)
        assert (shown["gpu_hours_used"], shown["utilization"]) == (10, 0.1)
        assert [one["user"] for one in shown["users"]] == users
        assert [one["tenant"] for one in shown["tenants"]] == tenants
    assert (await report(site, f"tenants/{low}/usage"))["gpu_hours_used"] == 8


async def test_days_add_up_to_the_whole(site: Site) -> None:
    name = await team(site)
    await use(site, name, "ann", 2, begin=ago(days=3), hours=66)
    shown = await report(site, f"tenants/{name}/usage", days=30, by="day")
    assert sum(one["gpu_hours_used"] for one in shown["daily"]) == pytest.approx(shown["gpu_hours_used"], abs=0.001)
    assert len(shown["daily"]) in (3, 4)
    assert shown["daily"] == sorted(shown["daily"], key=lambda one: one["day"])
    assert "daily" not in await report(site, f"tenants/{name}/usage")


async def test_only_so_many_users_are_named(site: Site) -> None:
    name = await team(site)
    for number in range(4):
        await use(site, name, f"u{number}", number + 1, begin=ago(hours=4), hours=1)
    shown = await report(site, f"tenants/{name}/usage", users=2)
    assert ([one["user"] for one in shown["users"]], shown["user_count"]) == ([f"{name}/u3", f"{name}/u2"], 4)


async def test_a_successor_of_the_same_name_starts_at_nothing(site: Site) -> None:
    name = await team(site, days=0)
    await use(site, name, "ann", 2, begin=ago(hours=8), hours=1)
    token = await site.token("tenant-admin", tenant=name, user="ann")
    shown = await report(site, f"tenants/{name}/usage", by="day", token=token)
    assert (shown["gpu_hours_used"], shown["daily"]) == (0, [])
    assert len(await table(site, token=token, **since(5))) == 0
    # A caller who charges all tenants sees all tenants.
    assert {one["tenant"] for one in await table(site, **since(5))} >= {name}


@pytest.mark.parametrize(
    "query", [{"days": 0}, {"days": "x"}, {"days": -1}, {"days": 3651}, {"by": "hour"}, {"users": "all"}]
)
async def test_what_cannot_be_asked_is_refused(site: Site, query: dict[str, Any]) -> None:
    (name,) = query
    reply = await site.get("tenants/default/usage", **query)
    refused(reply, 400, "invalid")
    assert [one["field"] for one in reply.body["details"]["causes"]] == [name]


async def test_another_tenants_report_does_not_exist(site: Site) -> None:
    mine, theirs = await team(site), await team(site)
    token = await site.token("tenant-admin", tenant=mine, user="ann")
    for path in (f"tenants/{theirs}/usage", f"metrics/tenants/{theirs}/usage"):
        refused(await site.get(path, token=token), 404, "not_found")
        refused(await site.get(path.replace(theirs, "nobody"), token=token), 404, "not_found")
    refused(await site.get("usage/export", token=token, tenant=theirs), 404, "not_found")
    node = await site.token("node", node="n1")
    for path in ("usage", "usage/export", "tenants/default/usage", "metrics/tenants/default/usage"):
        assert (await site.get(path, token=node)).status == 403


# A user.


async def test_plain_usage_is_the_callers_own(site: Site) -> None:
    name = await team(site)
    await use(site, name, "ann", 4, begin=ago(hours=5), hours=2)
    await use(site, name, "bob", 1, begin=ago(hours=5), hours=2)
    token = await site.token("user", tenant=name, user="ann")
    shown = await report(site, "usage", token=token, by="day")
    assert (shown["user"], shown["gpu_hours_used"], shown["node_hours_used"]) == (f"{name}/ann", 8, 1)
    assert [one["tenant"] for one in shown["tenants"]] == [name]
    assert sum(one["gpu_hours_used"] for one in shown["daily"]) == pytest.approx(8, abs=0.001)
    assert (await report(site, "usage", token=token, user="bob"))["gpu_hours_used"] == 2
    assert (await report(site, "usage", token=token, user=f"{name}/bob", days=1))["gpu_hours_used"] == 2
    assert (await report(site, "usage", token=token, user="nobody"))["gpu_hours_used"] == 0


async def test_another_tenants_user_does_not_exist(site: Site) -> None:
    mine, theirs = await team(site), await team(site)
    await use(site, theirs, "zoe", 1, begin=ago(hours=5), hours=1)
    token = await site.token("tenant-admin", tenant=mine, user="ann")
    refused(await site.get("usage", token=token, user=f"{theirs}/zoe"), 404, "not_found")
    refused(await site.get("usage", token=token, user="nowhere/zoe"), 404, "not_found")
    assert (await report(site, "usage", token=token, user="zoe"))["gpu_hours_used"] == 0


@pytest.mark.parametrize("user", ["/ann", "lab/", "/", "a\tb", "x" * 600])
async def test_what_names_no_user_is_refused(site: Site, user: str) -> None:
    for token in (None, await site.token("user", tenant="default", user="ann")):
        reply = await site.get("usage", user=user, **({"token": token} if token else {}))
        refused(reply, 400, "invalid")
        assert [one["field"] for one in reply.body["details"]["causes"]] == ["user"]


async def test_an_administrator_may_leave_the_tenant_out_where_there_is_but_one_of_the_name(site: Site) -> None:
    one, other = await team(site), await team(site)
    await use(site, one, "kim", 1, begin=ago(hours=5), hours=1)
    await use(site, one, "lee", 1, begin=ago(hours=5), hours=1)
    await use(site, other, "lee", 2, begin=ago(hours=5), hours=1)
    assert (await report(site, "usage", user="kim"))["user"] == f"{one}/kim"
    reply = await site.get("usage", user="lee")
    refused(reply, 400, "invalid")
    assert f"{one}/lee, {other}/lee" in reply.message
    assert (await report(site, "usage", user=f"{other}/lee"))["gpu_hours_used"] == 2
    assert (await report(site, "usage"))["user"] == "admin"


# A period.


async def test_a_period_is_told_against_the_quota_as_it_is_documented(site: Site) -> None:
    name = await team(site, limits={GPU: 100, "cpu": "10000"})
    await priced(site.context.database, {"memory": "0.0001", GPU: "0.001", "cpu": "0.00001"})
    await spent(
        site.context.database, name, f"{name}/ann", {GPU: 72_000, "cpu": 6_500_000, "memory": 64 << 30},
        begin=ago(hours=12), hours=6, klass="a100",
    )  # fmt: skip
    await entered(site)
    await site.post("nodes", {"metadata": {"name": f"{name}-n"}, "spec": {"capacity": {"cpu": "64", GPU: "8"}}})
    assert (await site.post(f"namespaces/{name}/allocations", allocation("work", gpu=4, cpu=8))).status == 201
    await bind(site.context.runtime, name, "work", f"{name}-n")
    shown = await report(site, f"metrics/tenants/{name}/usage", period="24h")
    assert list(shown) == ["tenant", "period", "resources", "cost"]
    assert shown["resources"][GPU] == {
        "quota": "100", "currentUsage": "4", "peakUsage": "72", "avgUsage": "18", "utilizationOfQuota": 0.04,
    }  # fmt: skip
    assert shown["resources"]["cpu"] == {
        "quota": "10000", "currentUsage": "8", "peakUsage": "6500", "avgUsage": "1625", "utilizationOfQuota": 0.0008,
    }  # fmt: skip
    assert shown["resources"]["memory"] == {
        "quota": None, "currentUsage": "0", "peakUsage": "64Gi", "avgUsage": "16Gi", "utilizationOfQuota": None,
    }  # fmt: skip
    assert shown["cost"] == {
        "period": "24h",
        "total": "$3,097.44",
        "breakdown": {"cpu": "$1,404.00", "memory": "$138.24", "gpu": "$1,555.20", "storage": "$0.00"},
    }


async def test_a_quota_that_stands_in_a_namespace_is_told_as_the_tenants(site: Site) -> None:
    name = await team(site)
    priorities = {"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority", "normal"]}
    quota = {
        "metadata": {"name": "ml-team-quota", "namespace": name},
        "spec": {
            "hard": {
                "cpu": "10000", "memory": "40Ti", GPU: "100", "pods": "5000", "persistentvolumeclaims": "200",
                "services": "100",
            },
            "soft": {"cpu": "8000", "memory": "32Ti", GPU: "80"},
            "scopes": ["NotTerminating"],
            "scopeSelector": {"matchExpressions": [priorities]},
        },
    }  # fmt: skip
    made = await site.post(f"namespaces/{name}/resourcequotas", quota)
    assert (made.status, made.body["status"]["hard"]["cpu"]) == (201, "10000")
    shown = (await report(site, f"metrics/tenants/{name}/usage"))["resources"]
    assert {one: shown[one]["quota"] for one in shown} == {"cpu": "10000", "memory": "40Ti", GPU: "100"}
    assert shown[GPU]["utilizationOfQuota"] == 0.0


async def test_the_peak_of_two_tenants_and_two_classes_is_that_of_one_time(site: Site) -> None:
    top = await team(site)
    low = await team(site, top)
    database = site.context.database
    await spent(database, top, f"{top}/ann", {GPU: 4000}, begin=ago(hours=10), hours=2, klass="a100")
    await spent(database, top, f"{top}/ann", {GPU: 2000}, begin=ago(hours=10), hours=2, klass="h100")
    await spent(database, low, f"{low}/bob", {GPU: 5000}, begin=ago(hours=4), hours=2, klass="a100")
    shown = await report(site, f"metrics/tenants/{top}/usage", period="1d")
    assert (shown["resources"][GPU]["peakUsage"], shown["period"]) == ("6", "1d")
    assert shown["resources"][GPU]["avgUsage"] == "917m"
    week = await report(site, f"metrics/tenants/{top}/usage", period="30d")
    assert week["resources"][GPU]["peakUsage"] in ("6", "11")  # Both may be of one day.


async def test_a_credit_is_worth_what_the_settings_say(site: Site) -> None:
    name = await team(site)
    await priced(site.context.database, {"example.com/worth": "0.01"})
    worth = {"example.com/worth": 1000}
    await spent(site.context.database, name, f"{name}/ann", worth, begin=ago(hours=2), hours=1)
    assert (await report(site, f"metrics/tenants/{name}/usage"))["cost"]["breakdown"]["other"] == "$36.00"
    await site.patch("settings/system", {"spec": {"credits": {"creditValue": "0.25"}}})
    try:
        shown = await report(site, f"tenants/{name}/usage")
        assert (shown["cost"]["total"], shown["cost"]["credits"]) == ("$9.00", "36")
    finally:
        await site.patch("settings/system", {"spec": {"credits": None}})


@pytest.mark.parametrize("period", ["59m", "0h", "401d", "-1h", "soon", "1h1h", "24 h", "99999999999h", "9e3h"])
async def test_a_period_that_cannot_be_is_refused(site: Site, period: str) -> None:
    reply = await site.get("metrics/tenants/default/usage", period=period)
    refused(reply, 400, "invalid")
    assert [one["field"] for one in reply.body["details"]["causes"]] == ["period"]


@pytest.mark.parametrize("period", ["1h", "90m", "7d", "400d", "1d12h"])
async def test_periods_are_written_as_durations_are(site: Site, period: str) -> None:
    assert (await report(site, "metrics/tenants/default/usage", period=period))["period"] == period


# A table.


def since(days: int) -> dict[str, str]:
    return {"from": (datetime.now(UTC) - timedelta(days=days)).date().isoformat()}


async def table(site: Site, **options: Any) -> list[dict[str, str]]:
    reply = await site.get("usage/export", **options)
    assert reply.status == 200, reply
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    return list(csv.DictReader(io.StringIO(reply.body)))


async def test_the_table_has_every_day_tenant_and_resource(site: Site) -> None:
    top = await team(site)
    low = await team(site, top)
    await use(site, top, "ann", 2, begin=ago(days=3), hours=48)
    await use(site, low, "bob", 1, begin=ago(days=2), hours=24)
    rows = await table(site, tenant=top, format="csv", **since(10))
    assert {one["tenant"] for one in rows} == {top, low}
    assert sum(float(one["hours"]) for one in rows if (one["tenant"], one["resource"]) == (top, GPU)) == near(96)
    assert {one["unit"] for one in rows if one["resource"] == GPU} == {"device-hours"}
    assert {one["peak"] for one in rows if (one["tenant"], one["resource"]) == (top, GPU)} == {"2"}
    months = await table(site, tenant=top, by="month", **since(10))
    assert len(months) < len(rows)
    for resource in (GPU, "nodes", "cpu"):
        by_day, by_month = (
            sum(float(one["hours"]) for one in some if one["resource"] == resource) for some in (rows, months)
        )
        assert by_day == pytest.approx(by_month, abs=0.001)


async def test_by_user_the_table_has_all_that_the_tenant_used_and_no_more_than_its_time(site: Site) -> None:
    top = await team(site)
    low = await team(site, top)
    begin = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=20)
    for tenant, user, gpus in ((top, "ann", 2), (top, "bob", 1), (low, "ann", 4)):
        await use(site, tenant, user, gpus, begin=begin - timedelta(hours=6), hours=48)
    await spent(site.context.database, top, "-", {GPU: 8000}, begin=begin, hours=3)
    asked = {"from": f"{begin:%Y-%m-%d}", "to": f"{begin + timedelta(days=1):%Y-%m-%d}"}
    rows = await table(site, tenant=top, by="user", **asked)
    hours = {(one["tenant"], one["user"]): float(one["hours"]) for one in rows if one["resource"] == GPU}
    assert hours == {(top, f"{top}/ann"): 48, (top, f"{top}/bob"): 24, (low, f"{low}/ann"): 96, (top, ""): 24}
    whole = await table(site, tenant=top, by="month", **asked)
    for column in ("hours", "credits"):
        assert sum(float(one[column]) for one in rows) == pytest.approx(sum(float(one[column]) for one in whole))
    token = await site.token("user", tenant=low, user="ann")
    assert {one["tenant"] for one in await table(site, token=token, by="user", **since(30))} == {low}


async def test_everybody_is_told_what_they_may_see(site: Site) -> None:
    top, other = await team(site), await team(site)
    low = await team(site, top)
    for name in (top, low, other):
        await use(site, name, "ann", 1, begin=ago(days=2), hours=24)
    seen = {}
    for role in ("tenant-admin", "user"):
        token = await site.token(role, tenant=top, user="ann")
        seen[role] = {one["tenant"] for one in await table(site, token=token, **since(10))}
    assert seen == {"tenant-admin": {top, low}, "user": {top}}
    assert {one["tenant"] for one in await table(site, **since(10))} >= {top, low, other}


async def test_the_use_of_a_tenant_that_is_gone_is_still_charged_for(site: Site) -> None:
    name = site.name("gone")
    await site.post("tenants", {"metadata": {"name": name}, "spec": {}})
    await use(site, name, "ann", 1, begin=ago(days=2), hours=24)
    await entered(site)
    assert (await site.delete(f"tenants/{name}")).status == 200
    assert {one["tenant"] for one in await table(site, **since(10))} >= {name}
    assert {one["tenant"] for one in await table(site, tenant=name, **since(10))} == {name}
    refused(await site.get("usage/export", tenant="nobody"), 404, "not_found")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"by": "week"}, "by"),
        ({"format": "xml"}, "format"),
        ({"from": "yesterday"}, "from"),
        ({"from": "2026-11-01T10:00:00Z"}, "from"),
        ({"from": "2026-11-03", "to": "2026-11-02"}, "from"),
        ({"from": "1990-01-01"}, "from"),
        ({"from": "2999-01-01"}, "from"),
        ({"to": "1970-01-02"}, "from"),
    ],
)
async def test_a_table_that_cannot_be_is_refused(site: Site, query: dict[str, str], field: str) -> None:
    reply = await site.get("usage/export", **query)
    refused(reply, 400, "invalid")
    assert [one["field"] for one in reply.body["details"]["causes"]] == [field]


# From the node's word to the report.


async def test_what_a_node_reports_is_in_the_reports_of_who_submitted_it(site: Site) -> None:
    name = await team(site)
    ann = await site.token("user", tenant=name, user="ann")
    capacity = {"cpu": "64", GPU: "8"}
    labels = {"gpu-type": "a100"}
    registered = await site.post(
        "nodes", {"metadata": {"name": f"{name}-n", "labels": labels}, "spec": {"capacity": capacity}}
    )
    node = registered.body["status"]["token"]
    path = f"namespaces/{name}/allocations"
    await site.post(path, allocation("train", gpu=2), token=ann)
    await bind(site.context.runtime, name, "train", f"{name}-n")
    assert (await report(site, "usage", token=ann))["resources"] == []  # What is placed has not begun.
    assert (await site.patch(f"{path}/train/status", {"status": {"phase": "Running"}}, token=node)).status == 200
    shown = await report(site, "usage", token=ann)
    assert {(one["resource"], one["class"]) for one in shown["resources"]} >= {(GPU, "a100"), ("nodes", "")}
    assert [one["tenant"] for one in shown["tenants"]] == [name]
    async with site.context.database.reader() as db:
        await db.execute("UPDATE usage_open SET started_at = started_at - interval '1 hour' WHERE tenant = $1", name)
        await db.execute("UPDATE usage_step SET at = at - interval '1 hour' WHERE tenant = $1", name)
    for path_of in ("usage", f"tenants/{name}/usage"):
        shown = await report(site, path_of, token=ann)
        assert (shown["gpu_hours_used"], shown["node_hours_used"]) == (near(2, 2), near(0.25))
    assert (await site.patch(f"{path}/train/status", {"status": {"phase": "Succeeded"}}, token=node)).status == 200
    shown = await report(site, f"tenants/{name}/usage", token=ann)
    assert (shown["gpu_hours_used"], [one["user"] for one in shown["users"]]) == (near(2, 2), [f"{name}/ann"])


# How it is kept.


async def test_how_far_entering_is_behind_is_told_with_the_metrics(site: Site) -> None:
    async def behind() -> float:
        text = (await site.get("/metrics")).body
        return float(text.partition("\nbursar_usage_rolled_lag_seconds ")[2].split()[0])

    await entered(site)
    assert await behind() < 1800
    await use(site, await team(site), "ann", 1, begin=ago(hours=2))
    assert await behind() >= 2 * 3600
    await entered(site)
    assert await behind() < 1800
