"""Default limits, units, required quotas and counted hosts on a real database: refusals, charges, and what stays when a
setting changes."""

from typing import Any

import msgspec
import pytest

from bursar.commands.command import Reply
from bursar.ops.runtime.runtime import Runtime
from support.approval.requests import claim, decide, gated, status, used
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    create,
    delete,
    document,
    end,
    get,
    namespace,
    node,
    quota,
    refusal,
    tenant,
)

SU = {"service-unit": {"cpu": 1, "memory": "4Gi"}}
GI = 2**30


async def setting(runtime: Runtime, **quotas: Any) -> Reply:
    return await change(runtime, "Settings", "", "system", quotas=quotas)


async def team(runtime: Runtime, name: str = "acme", **spec: Any) -> None:
    await tenant(runtime, name, **spec)
    await namespace(runtime, name, name)


async def charge(runtime: Runtime, kind: str, name: str, namespace: str = "acme") -> dict[str, int]:
    return dict((await get(runtime, kind, namespace, name)).charge.accepted)


# Default limits.


async def test_without_a_limit_everything_is_allowed_or_nothing_by_a_setting(runtime: Runtime) -> None:
    await create(runtime, "Tier", {"metadata": {"name": "std"}, "spec": {"limits": {"clusters": 2}}})
    await team(runtime)
    await team(runtime, "tiered", tier="std")
    assert code(await claim(runtime, "acme", "before", clusters=5)) == "ok"
    assert code(await setting(runtime, defaultLimit="zero", dimensions=["clusters"])) == "ok"
    denied = refusal(await claim(runtime, "acme", "a", clusters=1))
    assert (denied.causes[0].limit, denied.causes[0].current_usage) == ("0", "5")
    assert code(await claim(runtime, "acme", "other", hosts=9)) == "ok", "dimensions that it does not list"
    assert code(await claim(runtime, "tiered", "a", clusters=2)) == "ok"
    assert code(await claim(runtime, "tiered", "b", clusters=1)) == "quota_exceeded"
    await change(runtime, "Tenant", "", "acme", limits={"clusters": 6})
    assert code(await claim(runtime, "acme", "a", clusters=1)) == "ok"
    assert code(await setting(runtime, defaultLimit="unlimited")) == "ok"
    await change(runtime, "Tenant", "", "acme", limits={})
    assert code(await claim(runtime, "acme", "b", clusters=50)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_the_default_counts_the_tenants_below_from_then_on(runtime: Runtime) -> None:
    await tenant(runtime, "top")
    await team(runtime, parent="top", limits={"clusters": 9})
    await claim(runtime, "acme", "a", clusters=1)
    await setting(runtime, defaultLimit="zero", dimensions=["clusters"])
    assert code(await claim(runtime, "acme", "b", clusters=1)) == "quota_exceeded", "a limit holds for the subtree"
    await change(runtime, "Tenant", "", "top", limits={"clusters": 2})
    assert code(await claim(runtime, "acme", "b", clusters=1)) == "ok"
    assert code(await claim(runtime, "acme", "c", clusters=1)) == "quota_exceeded"
    assert await used(runtime, "top", "clusters") == 2
    await assert_counters_equal_charges(runtime)


# Required quotas.


async def test_what_no_quota_covers_is_refused_where_one_is_required(runtime: Runtime) -> None:
    await team(runtime)
    await node(runtime, "n1", cpu=64)
    await change(runtime, "Namespace", "", "acme", quotaRequired=True)
    bare = refusal(await allocation(runtime, "acme", "a", cpu=4))
    assert (bare.code, bare.message) == (
        "quota_exceeded", "allocation rejected: namespace acme requires a quota, and none covers cpu",
    )  # fmt: skip
    assert [(one.dimension, one.scope, one.requested_delta) for one in bare.causes] == [("cpu", "namespace:acme", "4")]
    await quota(runtime, "acme", "q", hard={"cpu": "8", "clusters": "1"})
    assert code(await allocation(runtime, "acme", "a", cpu=4)) == "ok"
    both = refusal(await claim(runtime, "acme", "c", clusters=1, hosts=2))
    assert [one.dimension for one in both.causes] == ["max_hosts"]
    assert code(await claim(runtime, "acme", "c", clusters=1)) == "ok"
    # The hole between deleting a quota and creating its successor.
    await allocation(runtime, "acme", "b", cpu=4)
    assert code(await delete(runtime, "ResourceQuota", "acme", "q")) == "ok"
    assert code(await allocation(runtime, "acme", "hole", cpu=1)) == "quota_exceeded"
    unbound = refusal(await bind(runtime, "acme", "b", "n1"))
    assert "requires a quota, and none covers cpu" in unbound.message
    assert code(await delete(runtime, "ResourceClaim", "acme", "c")) == "ok", "giving back needs no quota"
    await quota(runtime, "acme", "q", hard={"cpu": "8"})
    assert code(await bind(runtime, "acme", "b", "n1")) == "ok"
    assert code(await allocation(runtime, "acme", "more", cpu=1)) == "quota_exceeded", "what was accepted counts"
    assert code(await end(runtime, "acme", "b")) == "ok"
    await change(runtime, "Namespace", "", "acme", quotaRequired=False)
    await delete(runtime, "ResourceQuota", "acme", "q")
    assert code(await allocation(runtime, "acme", "free", cpu=40)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_requests_await_approval_without_a_quota_and_are_approved_with_one(runtime: Runtime) -> None:
    await gated(runtime)
    await change(runtime, "Namespace", "", "acme", quotaRequired=True)
    assert code(await claim(runtime, "acme", "c", clusters=1)) == "ok"
    assert code(await decide(runtime, "ResourceClaim", "acme", "c")) == "quota_exceeded"
    said = (await status(runtime, "ResourceClaim", "acme", "c"))["approval"]["reason"]
    assert said == "no ResourceQuota of namespace acme limits max_clusters"
    await quota(runtime, "acme", "q", hard={"clusters": "1"})
    assert code(await decide(runtime, "ResourceClaim", "acme", "c")) == "ok"


# Units.


async def test_limits_and_claims_in_units_count_as_their_parts(runtime: Runtime) -> None:
    await setting(runtime, units=SU)
    await team(runtime, limits={"service-unit": 10})
    made = document(await claim(runtime, "acme", "c", service_unit=6))
    assert made["spec"]["resources"] == {"service-unit": 6}, "what was written"
    assert made["status"]["granted"]["resources"] == {"cpu": "6", "memory": "24Gi"}
    assert await charge(runtime, "ResourceClaim", "c") == {"cpu": 6000, "memory": 24 * GI}
    denied = refusal(await claim(runtime, "acme", "d", service_unit=5))
    assert {one.dimension for one in denied.causes} == {"cpu", "memory"}, "the refusal names the parts"
    assert code(await allocation(runtime, "acme", "a", cpu=5)) == "quota_exceeded", "one limit for everything"
    assert code(await allocation(runtime, "acme", "a", cpu=4)) == "ok"
    stored: dict[str, Any] = msgspec.json.decode((await get(runtime, "Tenant", "", "acme")).doc)
    assert stored["spec"]["limits"] == {"service-unit": 10}
    await assert_counters_equal_charges(runtime)


async def test_a_changed_unit_changes_limits_and_leaves_charges(runtime: Runtime) -> None:
    await claim(runtime, "default", "early", service_unit=2)
    await setting(runtime, units=SU)
    await tenant(runtime, "top", limits={"service-unit": 100})
    await team(runtime, parent="top", limits={"service-unit": 10})
    await claim(runtime, "acme", "c", service_unit=6)
    assert code(await setting(runtime, units={"service-unit": {"cpu": 2, "hosts": 1}})) == "ok"
    assert await charge(runtime, "ResourceClaim", "c") == {"cpu": 6000, "memory": 24 * GI}
    assert code(await claim(runtime, "acme", "d", service_unit=5)) == "ok"
    assert await charge(runtime, "ResourceClaim", "d") == {"cpu": 10_000, "hosts": 5000}
    assert code(await claim(runtime, "acme", "e", service_unit=3)) == "quota_exceeded"
    relabelled = await get(runtime, "ResourceClaim", "acme", "c")
    assert relabelled.charge.accepted == {"cpu": 6000, "memory": 24 * GI}
    await assert_counters_equal_charges(runtime)
    assert code(await change(runtime, "ResourceClaim", "acme", "c", resources={"service-unit": 1})) == "ok"
    assert await charge(runtime, "ResourceClaim", "c") == {"cpu": 2000, "hosts": 1000}, "a new spec has a new charge"
    assert code(await setting(runtime)) == "ok"
    for name in ("c", "d"):
        assert code(await delete(runtime, "ResourceClaim", "acme", name)) == "ok"
    assert code(await delete(runtime, "ResourceClaim", "default", "early")) == "ok"
    for dimension in ("cpu", "memory", "hosts", "service-unit"):
        assert (await used(runtime, "acme", dimension), await used(runtime, "top", dimension)) == (0, 0)
    await assert_counters_equal_charges(runtime)


async def test_a_pending_claim_keeps_the_amounts_that_it_was_submitted_with(runtime: Runtime) -> None:
    await setting(runtime, units=SU)
    await gated(runtime, limits={"cpu": 4})
    await claim(runtime, "acme", "c", service_unit=4)
    await setting(runtime, units={"service-unit": {"cpu": 9}})
    assert code(await decide(runtime, "ResourceClaim", "acme", "c")) == "ok"
    assert await charge(runtime, "ResourceClaim", "c") == {"cpu": 4000, "memory": 16 * GI}
    grown = await change(runtime, "ResourceClaim", "acme", "c", resources={"service-unit": 5})
    assert code(grown) == "ok"
    assert (await status(runtime, "ResourceClaim", "acme", "c"))["granted"]["resources"] == {"cpu": "4"}
    denied = refusal(await decide(runtime, "ResourceClaim", "acme", "c"))
    assert (denied.causes[0].dimension, denied.causes[0].requested_delta) == ("cpu", "41")
    await assert_counters_equal_charges(runtime)


@pytest.mark.parametrize(
    ("quotas", "field"),
    [
        ({"units": {"service-unit": {}}}, "spec.quotas.units[service-unit]"),
        ({"units": {"su": {"cpu": -1}}}, "spec.quotas.units[su][cpu]"),
        ({"units": {"su": {"cpu": 0}}}, "spec.quotas.units[su][cpu]"),
        ({"units": {"su": {"cpu": 1}, "big": {"su": 2}}}, "spec.quotas.units[big][su]"),
        ({"units": {"memory": {"cpu": 1}}}, "spec.quotas.units[memory]"),
        ({"units": {"s u": {"cpu": 1}}}, "spec.quotas.units[s u]"),
        ({"defaultLimit": "none"}, "spec.quotas.defaultLimit"),
        ({"defaultLimit": "zero"}, "spec.quotas.dimensions"),
        ({"defaultLimit": "zero", "dimensions": ["a b"]}, "spec.quotas.dimensions[a b]"),
        ({"warnAt": {"*": [0]}}, "spec.quotas.warnAt[*]"),
        ({"warnAt": {"cpu": [101]}}, "spec.quotas.warnAt[cpu]"),
        ({"warnAt": {"cpu": [80, 80]}}, "spec.quotas.warnAt[cpu]"),
        ({"warnAt": {"c pu": [80]}}, "spec.quotas.warnAt[c pu]"),
    ],
)
def test_bad_settings_are_refused_with_their_field(quotas: dict[str, Any], field: str) -> None:
    from bursar.wire.kinds.settings import SETTINGS, Settings

    body = {"metadata": {"name": "system"}, "spec": {"quotas": quotas}}
    faults = SETTINGS.check(msgspec.convert(body, Settings))
    assert [one.field for one in faults] == [field]


async def test_units_are_not_for_quotas_of_namespaces_nor_for_the_system(runtime: Runtime) -> None:
    await setting(runtime, units=SU)
    await team(runtime)
    named = refusal(await quota(runtime, "acme", "q", hard={"service-unit": "4"}))
    assert (named.code, named.hint) == ("invalid", "Limit its parts: cpu, memory.")
    system = await change(runtime, "Settings", "", "system", quotas={"units": SU}, limits={"service-unit": 9})
    assert code(system) == "invalid"
    await quota(runtime, "acme", "q", hard={"widgets": "4"})
    assert "acme/q" in refusal(await setting(runtime, units={"widgets": {"cpu": 1}})).message


# Hosts.


async def test_hosts_are_one_dimension_across_claims_and_exclusive_work_by_a_setting(runtime: Runtime) -> None:
    await team(runtime, limits={"baremetal-hosts": 4})
    for name in ("n1", "n2"):
        await node(runtime, name, cpu=8)
    await claim(runtime, "acme", "c", baremetal_hosts=2)
    await allocation(runtime, "acme", "before", spec={"exclusive": True})
    assert await used(runtime, "acme", "baremetal-hosts") == 2
    await setting(runtime, baremetalHosts=True)
    assert code(await allocation(runtime, "acme", "a", spec={"exclusive": True, "nodes": 2})) == "ok"
    assert await used(runtime, "acme", "baremetal-hosts") == 4
    full = refusal(await allocation(runtime, "acme", "b", spec={"exclusive": True}))
    assert full.causes[0].dimension == "baremetal-hosts"
    assert code(await allocation(runtime, "acme", "shared", cpu=1)) == "ok"
    assert code(await bind(runtime, "acme", "a", "n1", "n2")) == "ok"
    await setting(runtime, baremetalHosts=False)
    await end(runtime, "acme", "a")
    assert await used(runtime, "acme", "baremetal-hosts") == 2
    await assert_counters_equal_charges(runtime)


async def test_a_jobs_allocations_charge_hosts_too(runtime: Runtime) -> None:
    await setting(runtime, baremetalHosts=True)
    await team(runtime, limits={"baremetal-hosts": 4})
    template = {"spec": {"exclusive": True, "resources": {"requests": {"cpu": "1"}}}}
    for name, width, said in (("wide", 5, "quota_exceeded"), ("fits", 4, "ok")):
        body = {"metadata": {"name": name, "namespace": "acme"}, "spec": {"parallelism": width, "template": template}}
        assert code(await create(runtime, "Job", body)) == said
    assert await used(runtime, "acme", "baremetal-hosts") == 4
    await assert_counters_equal_charges(runtime)
