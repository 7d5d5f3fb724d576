"""The limits of tenants over the API: set, read and removed by dimension, with usage beside them."""

import asyncio

import pytest

from support.api.site import Site, allocation, nothing_stored

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
GPU_PATH = "nvidia.com%2Fgpu"


async def test_a_service_provider_creates_changes_and_deletes_limits(site: Site) -> None:
    team = await site.namespace()
    made = await site.put(f"tenants/{team}/limits/{GPU_PATH}", {"limit": "8"})
    assert (made.status, made.body) == (
        200,
        {"tenant": team, "dimension": GPU, "limit": "8", "source": "override", "accepted": "0", "bound": "0",
         "utilization": 0.0},
    )  # fmt: skip
    assert (await site.get(f"tenants/{team}")).body["spec"]["limits"] == {GPU: "8"}, "there is no second store"
    changed = await site.put(f"tenants/{team}/limits/{GPU_PATH}", {"limit": 4})
    assert changed.body["limit"] == "4"
    refused = await site.post(f"namespaces/{team}/allocations", allocation("a", gpu=5))
    assert (refused.status, refused.body["details"]["code"]) == (403, "quota_exceeded")
    gone = await site.delete(f"tenants/{team}/limits/{GPU_PATH}")
    assert (gone.status, gone.body["limit"], gone.body["source"]) == (200, None, "unlimited")
    assert (await site.post(f"namespaces/{team}/allocations", allocation("a", gpu=5))).status == 201
    again = await site.delete(f"tenants/{team}/limits/{GPU_PATH}")
    assert (again.status, again.body["accepted"]) == (200, "5"), "a limit that is gone already is no fault"


async def test_a_deleted_limit_falls_back_to_the_tiers(site: Site) -> None:
    tier, team = site.name("tier"), site.name()
    await site.post("tiers", {"metadata": {"name": tier}, "spec": {"limits": {"cpu": "10", "nodes": 2}}})
    await site.post("tenants", {"metadata": {"name": team}, "spec": {"tier": tier, "limits": {"cpu": "20"}}})
    one = await site.get(f"tenants/{team}/limits/cpu")
    assert (one.body["limit"], one.body["source"]) == ("20", "override")
    gone = await site.delete(f"tenants/{team}/limits/cpu")
    assert (gone.body["limit"], gone.body["source"]) == ("10", f"tier:{tier}")
    listed = (await site.get(f"tenants/{team}/limits")).body
    assert listed["tenant"] == team
    assert {name: (one["limit"], one["source"]) for name, one in listed["limits"].items()} == {
        "cpu": ("10", f"tier:{tier}"), "nodes": ("2", f"tier:{tier}"),
    }  # fmt: skip


async def test_all_limits_at_once_and_usage_beside_them(site: Site) -> None:
    team = await site.namespace()
    await site.post(f"namespaces/{team}/allocations", allocation("a", gpu=3))
    put = await site.put(f"tenants/{team}/limits", {"limits": {GPU: 6, "requests.memory": "8192Mi", "widgets": "2"}})
    assert put.status == 200, put
    assert put.body["limits"][GPU] == {
        "limit": "6", "source": "override", "accepted": "3", "bound": "0", "utilization": 0.5,
    }  # fmt: skip
    assert put.body["limits"]["memory"]["limit"] == "8Gi"
    assert put.body["limits"]["allocations"] == {
        "limit": None, "source": "unlimited", "accepted": "1", "bound": "0",
    }  # fmt: skip
    one = await site.put(f"tenants/{team}/limits/memory", {"limit": "1Gi"})
    assert one.status == 200, "an alias of the same dimension is replaced, not doubled"
    assert (await site.get(f"tenants/{team}")).body["spec"]["limits"] == {GPU: 6, "widgets": "2", "memory": "1Gi"}
    none = await site.delete(f"tenants/{team}/limits")
    assert none.body["limits"][GPU]["source"] == "unlimited"
    assert "limits" not in (await site.get(f"tenants/{team}")).body.get("spec", {})


async def test_an_unused_dimension_has_an_answer_and_the_default_is_named(site: Site) -> None:
    team = await site.namespace()
    one = (await site.get(f"tenants/{team}/limits/anything")).body
    assert one == {
        "tenant": team, "dimension": "anything", "limit": None, "source": "unlimited", "accepted": "0", "bound": "0",
        "utilization": None,
    }  # fmt: skip
    pending = (await site.get(f"tenants/{team}/limits/pending_requests")).body
    assert (pending["limit"], pending["source"]) == ("1000", "default")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("limits/cpu", {"limit": -1}),
        ("limits/cpu", {"limit": "-1"}),
        ("limits/cpu", {"limit": "1 GiB"}),
        ("limits/cpu", {"limit": None}),
        ("limits/cpu", {}),
        ("limits/cpu", {"limit": "1", "hard": "2"}),
        ("limits/cpu", []),
        ("limits/sp%20ace", {"limit": "1"}),
        ("limits", {}),
        ("limits", {"limits": {"cpu": "x"}}),
        ("limits", {"limits": {"cpu": "1", "requests.cpu": "2"}}),
        ("limits", {"limits": {f"d{number}": 1 for number in range(65)}}),
    ],
)
async def test_bad_limits_are_refused_with_their_field(site: Site, path: str, body: object) -> None:
    async with nothing_stored(site) as team:
        reply = await site.put(f"tenants/{team}/{path}", body)
        assert reply.status == 400, reply
        assert reply.body["details"]["causes"]


async def test_tenants_read_their_own_limits_and_administrators_all(site: Site) -> None:
    team, other = await site.namespace(), await site.namespace()
    for role in ("tenant-admin", "user", "viewer"):
        token = await site.token(role, tenant=team, user=role)
        assert (await site.get(f"tenants/{team}/limits", token=token)).status == 200
        for path in ("limits", "limits/cpu"):
            assert (await site.get(f"tenants/{other}/{path}", token=token)).status == 404
            assert (await site.put(f"tenants/{team}/limits/cpu", {"limit": 1}, token=token)).status == 403
            assert (await site.delete(f"tenants/{team}/{path}", token=token)).status == 403
    service = await site.token("service", user="coldfront")
    assert (await site.put(f"tenants/{team}/limits/cpu", {"limit": 1}, token=service)).status == 200
    assert (await site.delete(f"tenants/{team}/limits/cpu", token=service)).status == 200
    assert (await site.get(f"tenants/{team}-gone/limits")).status == 404
    assert (await site.put(f"tenants/{team}-gone/limits/cpu", {"limit": 1})).status == 404


async def test_a_dry_run_shows_the_limit_and_stores_nothing(site: Site) -> None:
    async with nothing_stored(site) as team:
        tried = await site.put(f"tenants/{team}/limits/cpu", {"limit": "7"}, dryRun="All")
        assert (tried.status, tried.body["limit"], tried.body["source"]) == (200, "7", "override")
        assert (await site.get(f"tenants/{team}/limits/cpu")).body["source"] == "unlimited"


async def test_a_repeated_request_has_one_effect(site: Site) -> None:
    team = await site.namespace()
    wanted = {"limit": "5", "request_id": f"r-{team}"}
    assert (await site.put(f"tenants/{team}/limits/cpu", wanted)).status == 200
    await site.put(f"tenants/{team}/limits/cpu", {"limit": "9"})
    repeated = await site.put(f"tenants/{team}/limits/cpu", wanted)
    assert (repeated.status, repeated.body["limit"]) == (200, "5"), "its first answer"
    assert (await site.get(f"tenants/{team}/limits/cpu")).body["limit"] == "9", "and no second effect"
    reused = await site.put(f"tenants/{team}/limits/cpu", {"limit": "6", "request_id": f"r-{team}"})
    assert reused.status == 422


async def test_changes_of_several_dimensions_at_once_are_all_kept(site: Site) -> None:
    team = await site.namespace()
    names = [f"d{number}" for number in range(12)]
    replies = await asyncio.gather(*(site.put(f"tenants/{team}/limits/{name}", {"limit": 3}) for name in names))
    assert {one.status for one in replies} == {200}
    assert set((await site.get(f"tenants/{team}")).body["spec"]["limits"]) == set(names)


async def test_limits_in_units_are_shown_in_both(site: Site) -> None:
    team, unit = await site.namespace(), site.name("unit")
    units = {"spec": {"quotas": {"units": {unit: {"cpu": 2, "memory": "4Gi"}}}}}
    assert (await site.patch("settings/system", units)).status == 200
    put = (await site.put(f"tenants/{team}/limits/{unit}", {"limit": 5})).body
    assert (put["limit"], put["source"], put["accepted"]) == ("5", "override", "0")
    claim = {"metadata": {"name": "c"}, "spec": {"resources": {unit: 2, "cpu": 1}}}
    assert (await site.post(f"namespaces/{team}/resourceclaims", claim)).status == 201
    shown = (await site.get(f"tenants/{team}/limits")).body
    assert shown["limits"]["cpu"] == {
        "limit": "10", "source": "override", "accepted": "5", "bound": "5", "utilization": 0.5,
    }  # fmt: skip
    assert unit not in shown["limits"]
    assert shown["units"] == {
        unit: {"limit": "5", "source": "override", "parts": {"cpu": "2", "memory": "4Gi"}, "used": "2500m"},
    }
    one = (await site.get(f"tenants/{team}/limits/{unit}")).body
    assert (one["limit"], one["accepted"], one["bound"]) == ("5", "2500m", "2500m")
    refused = await site.post(f"namespaces/{team}/resourceclaims", {**claim, "metadata": {"name": "d"}, "spec": {
        "resources": {unit: 3}}})  # fmt: skip
    assert (refused.status, refused.body["details"]["dimension"]) == (409, "cpu")
    assert (await site.delete(f"tenants/{team}/limits/{unit}")).body["source"] == "unlimited"
    await site.patch("settings/system", {"spec": {"quotas": None}})
