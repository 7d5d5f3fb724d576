"""The tree of tenants on a real database: limits hold for subtrees, and every change of the tree recounts."""

from typing import Any

import msgspec

from bursar.commands.command import Reply
from bursar.commands.credit.ledger import Receipt
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.credit.account import Owner
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.quota import Counter
from bursar.core.values.money import nanocredits
from bursar.core.values.quantity import UNLIMITED
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit import credit
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.runtime import Runtime
from bursar.wire.kinds.registry import BY_NAME
from support.runtime.runtime import (
    GPU,
    TEST,
    allocation,
    assert_counters_equal_charges,
    bind,
    change,
    code,
    counters,
    create,
    delete,
    document,
    end,
    get,
    gpus,
    namespace,
    node,
    opened,
    quota,
    refusal,
    tenant,
)


async def family(runtime: Runtime, **limits: int) -> None:
    """top > mid > low, a namespace each; limits on GPUs as given."""
    above = ""
    for name in ("top", "mid", "low"):
        spec: dict[str, Any] = {"limits": {GPU: limits[name]}} if name in limits else {}
        assert code(await tenant(runtime, name, **({"parent": above} if above else {}), **spec)) == "ok"
        assert code(await namespace(runtime, name, name)) == "ok"
        above = name


async def tier(runtime: Runtime, name: str, **limits: int) -> Reply:
    document = {
        "metadata": {"name": name},
        "spec": {"limits": {key.replace("gpu", GPU): v for key, v in limits.items()}},
    }
    return await create(runtime, "Tier", document)


async def set_system(runtime: Runtime, **limits: int) -> Reply:
    wanted = {key.replace("gpu", GPU): value for key, value in limits.items()}
    return await change(runtime, "Settings", "", "system", limits=wanted)


async def move_namespace(runtime: Runtime, name: str, tenant: str) -> Reply:
    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document["metadata"]["labels"] = {"bursar.io/tenant": tenant}
        one = msgspec.convert(document, BY_NAME["Namespace"].type)
        return change_command(BY_NAME["Namespace"], before, one, TEST, spec_changed=False)

    return await object_ops.change(runtime, Key("Namespace", "", name), edit, tenant="test")


# Limits of ancestors.


async def test_the_limit_of_an_ancestor_holds_for_everything_below_it(runtime: Runtime) -> None:
    await family(runtime, top=4)
    assert code(await allocation(runtime, "low", "a", gpu=2)) == "ok"
    assert code(await allocation(runtime, "mid", "b", gpu=1)) == "ok"
    refused = refusal(await allocation(runtime, "top", "c", gpu=2))
    assert refused.message == (
        'allocation rejected: tenant "top" would exceed nvidia.com/gpu quota (current: 3, requested: 2, limit: 4)'
    )
    refused = refusal(await allocation(runtime, "low", "c", gpu=2))
    assert [cause.scope for cause in refused.causes] == ["tenant:top"]
    assert code(await allocation(runtime, "low", "c", gpu=1)) == "ok"
    assert await gpus(runtime, "tenant:top") == (4, 0)
    assert await gpus(runtime, "tenant:mid") == (1, 0)
    await assert_counters_equal_charges(runtime)


async def test_all_limits_are_named_from_the_namespace_to_the_system(runtime: Runtime) -> None:
    await family(runtime, top=3, mid=2, low=1)
    await quota(runtime, "low", "q", hard={GPU: "1"})
    await set_system(runtime, gpu=4)
    refused = refusal(await allocation(runtime, "low", "a", gpu=5))
    assert refused.message == "exceeded quota: nvidia.com/gpu limit 1, requested 5, used 0"
    assert [cause.scope for cause in refused.causes] == [
        "quota:low/q", "tenant:low", "tenant:mid", "tenant:top", "system",
    ]  # fmt: skip
    assert [cause.limit for cause in refused.causes] == ["1", "1", "2", "3", "4"]


async def test_enforcement_queue_of_a_tenant_lets_work_wait_and_checks_when_it_is_placed(runtime: Runtime) -> None:
    await tenant(runtime, "lab", limits={GPU: 2}, enforcement="Queue")
    await namespace(runtime, "lab", "lab")
    await node(runtime, "n1", gpu=8)
    for name in ("a", "b"):
        assert code(await allocation(runtime, "lab", name, gpu=2)) == "ok"
    assert code(await bind(runtime, "lab", "a", "n1")) == "ok"
    assert code(await bind(runtime, "lab", "b", "n1")) == "quota_exceeded"
    await end(runtime, "lab", "a")
    assert code(await bind(runtime, "lab", "b", "n1")) == "ok"
    await assert_counters_equal_charges(runtime)


# Moving tenants.


async def test_moving_a_tenant_moves_what_its_subtree_uses(runtime: Runtime) -> None:
    await family(runtime, top=9, mid=8)
    await tenant(runtime, "other", limits={GPU: 5})
    await node(runtime, "n1", gpu=8)
    await allocation(runtime, "low", "a", gpu=2)
    await allocation(runtime, "mid", "b", gpu=1)
    await bind(runtime, "low", "a", "n1")
    assert code(await change(runtime, "Tenant", "", "low", parent="other")) == "ok"
    assert await gpus(runtime, "tenant:top") == (1, 0)
    assert await gpus(runtime, "tenant:mid") == (1, 0)
    assert await gpus(runtime, "tenant:other") == (2, 2)
    await assert_counters_equal_charges(runtime)
    assert code(await change(runtime, "Tenant", "", "mid", parent="other")) == "ok"
    assert await gpus(runtime, "tenant:top") == (0, 0)
    assert await gpus(runtime, "tenant:other") == (3, 2)
    await assert_counters_equal_charges(runtime)


async def test_a_move_without_capacity_is_refused_and_changes_nothing(runtime: Runtime) -> None:
    await family(runtime)
    await tenant(runtime, "full", limits={GPU: 1})
    await allocation(runtime, "low", "a", gpu=2)
    before = await counters(runtime)
    refused = refusal(await change(runtime, "Tenant", "", "mid", parent="full"))
    assert code(refused) == "in_use"
    assert refused.message == (
        'moving tenant "mid" rejected: tenant "full" would exceed nvidia.com/gpu quota '
        "(current: 0, requested: 2, limit: 1)"
    )
    assert await counters(runtime) == before
    assert document(await change(runtime, "Tenant", "", "mid"))["spec"]["parent"] == "top"
    await end(runtime, "low", "a", Phase.CANCELLED)
    assert code(await change(runtime, "Tenant", "", "mid", parent="full")) == "ok"


async def test_what_was_charged_comes_back_exactly_after_the_tree_was_turned_over(runtime: Runtime) -> None:
    await family(runtime, top=9)
    await node(runtime, "n1", cpu=64, gpu=8)
    await quota(runtime, "low", "q", hard={GPU: "4"})
    for name in ("a", "b", "c"):
        await allocation(runtime, "low", name, cpu=3, gpu=1)
    await bind(runtime, "low", "a", "n1")
    await bind(runtime, "low", "b", "n1")
    await change(runtime, "Tenant", "", "low", parent="", limits={"cpu": 1})
    await set_system(runtime, gpu=1, cpu=1)
    await delete(runtime, "ResourceQuota", "low", "q")
    await quota(runtime, "low", "other", hard={"cpu": "2", "nodes": "1"})
    await change(runtime, "Tenant", "", "top", limits={})
    await assert_counters_equal_charges(runtime)
    await end(runtime, "low", "a")
    await end(runtime, "low", "b", Phase.PENDING)
    await assert_counters_equal_charges(runtime)
    for name in ("b", "c"):
        await delete(runtime, "Allocation", "low", name)
    assert all((one.accepted, one.bound) == (0, 0) for one in (await counters(runtime)).values())


# Limits that appear and disappear.


async def test_a_limit_that_appears_on_a_parent_counts_what_is_below_it(runtime: Runtime) -> None:
    await family(runtime)
    await allocation(runtime, "low", "a", gpu=2)
    await allocation(runtime, "top", "b", gpu=1)
    assert await gpus(runtime, "tenant:top") == (1, 0)  # its own: nothing limits the subtree
    assert code(await change(runtime, "Tenant", "", "top", limits={GPU: 4})) == "ok"
    assert await gpus(runtime, "tenant:top") == (3, 0)
    assert code(await allocation(runtime, "mid", "c", gpu=2)) == "quota_exceeded"
    assert code(await change(runtime, "Tenant", "", "top", limits={})) == "ok"
    assert await gpus(runtime, "tenant:top") == (1, 0)
    assert code(await allocation(runtime, "mid", "c", gpu=2)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_a_limit_over_more_than_can_be_counted_is_refused_and_changes_nothing(runtime: Runtime) -> None:
    await family(runtime)
    for name in ("top", "mid"):
        assert code(await allocation(runtime, name, "huge", gpu=5 * 10**15)) == "ok"
    before = await counters(runtime)
    assert code(await change(runtime, "Tenant", "", "top", limits={GPU: 4})) == "in_use"
    assert await counters(runtime) == before


async def test_a_tier_reaches_all_its_tenants_when_it_is_edited(runtime: Runtime) -> None:
    await tier(runtime, "small", gpu=1)
    await tenant(runtime, "one", tier="small")
    await tenant(runtime, "own", tier="small", limits={GPU: 3})
    await tenant(runtime, "parent", tier="small")
    await tenant(runtime, "child", parent="parent")
    for name in ("one", "own", "child"):
        await namespace(runtime, name, name)
    assert code(await allocation(runtime, "one", "a", gpu=2)) == "quota_exceeded"
    assert code(await allocation(runtime, "child", "a", gpu=2)) == "quota_exceeded"
    assert code(await change(runtime, "Tier", "", "small", limits={GPU: 2})) == "ok"
    assert code(await allocation(runtime, "one", "a", gpu=2)) == "ok"
    assert code(await allocation(runtime, "child", "a", gpu=2)) == "ok"
    assert code(await allocation(runtime, "own", "a", gpu=3)) == "ok"
    rows = await counters(runtime)
    assert {name: rows[f"tenant:{name}", GPU].hard for name in ("one", "own", "parent", "child")} == {
        "one": 2000, "own": 3000, "parent": 2000, "child": UNLIMITED,
    }  # fmt: skip
    assert code(await change(runtime, "Tier", "", "small", limits={"cpu": 1})) == "ok"
    assert (await counters(runtime))["tenant:one", GPU].hard == UNLIMITED
    assert await gpus(runtime, "tenant:parent") == (0, 0)
    await assert_counters_equal_charges(runtime)


async def test_a_limit_of_the_system_holds_for_all(runtime: Runtime) -> None:
    await family(runtime)
    await allocation(runtime, "low", "a", gpu=1)
    await allocation(runtime, "default", "b", gpu=1)
    assert await gpus(runtime, "system") is None  # a row that everybody locks exists only while it limits
    assert code(await set_system(runtime, gpu=3)) == "ok"
    assert await gpus(runtime, "system") == (2, 0)
    refused = refusal(await allocation(runtime, "default", "c", gpu=2))
    assert refused.message == (
        "allocation rejected: the system would exceed nvidia.com/gpu quota (current: 2, requested: 2, limit: 3)"
    )
    assert code(await set_system(runtime, gpu=4)) == "ok"
    assert code(await allocation(runtime, "default", "c", gpu=2)) == "ok"
    assert await gpus(runtime, "system") == (4, 0)
    await assert_counters_equal_charges(runtime)
    assert code(await set_system(runtime)) == "ok"
    assert await gpus(runtime, "system") is None
    await assert_counters_equal_charges(runtime)


async def test_reduction_below_usage_stops_nothing_and_refuses_only_increases(runtime: Runtime) -> None:
    await tenant(runtime, "physics", limits={GPU: 4})
    await namespace(runtime, "physics", "physics")
    await node(runtime, "n1", gpu=8)
    for name in ("a", "b"):
        await allocation(runtime, "physics", name, gpu=2)
    await bind(runtime, "physics", "a", "n1")
    assert code(await change(runtime, "Tenant", "", "physics", limits={GPU: 1})) == "ok"
    assert (await get(runtime, "Allocation", "physics", "a")).fields["status.phase"] == "Scheduled"
    refused = refusal(await allocation(runtime, "physics", "c", gpu=1))
    assert refused.message == (
        'allocation rejected: tenant "physics" exceeds nvidia.com/gpu quota\n'
        "  Current usage: 4 nvidia.com/gpu\n"
        "  New limit: 1 nvidia.com/gpu\n"
        "  Hint: Wait for running allocations to complete, or contact your tenant admin."
    )
    assert code(await bind(runtime, "physics", "b", "n1")) == "quota_exceeded"  # it was let in, and waits
    assert code(await end(runtime, "physics", "a", Phase.RUNNING)) == "ok"
    assert code(await end(runtime, "physics", "a")) == "ok"
    assert code(await delete(runtime, "Allocation", "physics", "b")) == "ok"
    assert code(await allocation(runtime, "physics", "c", gpu=1)) == "ok"
    await assert_counters_equal_charges(runtime)


# Quotas of namespaces.


async def test_a_new_quota_counts_what_is_there(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=8)
    await allocation(runtime, "default", "a", gpu=2)
    await allocation(runtime, "default", "b", gpu=3)
    await bind(runtime, "default", "a", "n1")
    assert code(await quota(runtime, "default", "q", hard={GPU: "5", "pods": "9"}, soft={"cpu": "1"})) == "ok"
    rows = await counters(runtime)
    assert rows["quota:default/q", GPU] == Counter(5000, None, 5000, 2000)
    assert rows["quota:default/q", "pods"] == Counter(9000, None, 2000, 1000)
    assert rows["quota:default/q", "cpu"] == Counter(UNLIMITED, 1000, 0, 0)
    assert code(await allocation(runtime, "default", "c", gpu=1)) == "quota_exceeded"
    await assert_counters_equal_charges(runtime)


async def test_a_new_quota_counts_by_its_scopes(runtime: Runtime) -> None:
    await allocation(runtime, "default", "endless", gpu=1)
    await allocation(runtime, "default", "ending", spec={"ttl": "1h"}, gpu=2)
    await allocation(runtime, "default", "urgent", spec={"priorityClass": "high-priority"}, gpu=4)
    await create(runtime, "Allocation", {"metadata": {"name": "nothing", "namespace": "default"}, "spec": {}})
    hard = {GPU: "9", "pods": "9"}
    await quota(runtime, "default", "ending", hard=hard, scopes=["Terminating"])
    await quota(runtime, "default", "endless", hard=hard, scopes=["NotTerminating"])
    await quota(runtime, "default", "nothing", hard=hard, scopes=["BestEffort"])
    urgent = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority"]}]}
    await quota(runtime, "default", "urgent", hard=hard, scopeSelector=urgent)
    rows = await counters(runtime)
    used = {
        name: (
            rows[f"quota:default/{name}", GPU].accepted // 1000,
            rows[f"quota:default/{name}", "pods"].accepted // 1000,
        )
        for name in ("ending", "endless", "nothing", "urgent")
    }
    assert used == {"ending": (2, 1), "endless": (5, 3), "nothing": (0, 1), "urgent": (4, 1)}
    assert code(await allocation(runtime, "default", "more", spec={"ttl": "1h"}, gpu=8)) == "quota_exceeded"
    assert code(await allocation(runtime, "default", "more", gpu=4)) == "ok"
    await assert_counters_equal_charges(runtime)


async def test_a_quota_whose_scopes_change_counts_anew(runtime: Runtime) -> None:
    await allocation(runtime, "default", "endless", gpu=1)
    await allocation(runtime, "default", "ending", spec={"ttl": "1h"}, gpu=2)
    await quota(runtime, "default", "q", hard={GPU: "9"})
    assert await gpus(runtime, "quota:default/q") == (3, 0)
    await change(runtime, "ResourceQuota", "default", "q", scopes=["Terminating"])
    assert await gpus(runtime, "quota:default/q") == (2, 0)
    await change(runtime, "ResourceQuota", "default", "q", hard={"pods": "9"})
    assert await gpus(runtime, "quota:default/q") is None
    await delete(runtime, "ResourceQuota", "default", "q")
    assert not [scope for scope, _ in await counters(runtime) if scope.startswith("quota:")]
    await assert_counters_equal_charges(runtime)


async def test_a_quota_needs_a_namespace_that_is_there(runtime: Runtime) -> None:
    assert code(await quota(runtime, "nowhere", "q", hard={GPU: "1"})) == "not_found"
    await namespace(runtime, "ending")
    await delete(runtime, "Namespace", "", "ending")
    assert code(await quota(runtime, "ending", "q", hard={GPU: "1"})) == "terminating"
    assert code(await allocation(runtime, "ending", "a")) == "terminating"


# Namespaces and deletions.


async def test_the_tenant_of_a_namespace_stands_while_it_is_in_use(runtime: Runtime) -> None:
    await family(runtime)
    await allocation(runtime, "low", "a", gpu=1)
    refused = refusal(await move_namespace(runtime, "low", "top"))
    assert code(refused) == "in_use"
    assert refused.message == ('namespaces "low" belongs to tenant "low" and is in use: its tenant cannot be changed')
    await delete(runtime, "Allocation", "low", "a")
    assert code(await move_namespace(runtime, "low", "nobody")) == "invalid"
    assert code(await move_namespace(runtime, "low", "top")) == "ok"
    await allocation(runtime, "low", "b", gpu=2)
    assert await gpus(runtime, "tenant:top") == (2, 0)
    assert (await get(runtime, "Allocation", "low", "b")).tenant == "top"
    await assert_counters_equal_charges(runtime)


async def test_a_tenant_with_credit_is_not_deleted(runtime: Runtime) -> None:
    """A later tenant of the same name would have it."""
    await tenant(runtime, "physics")
    owner = Owner("physics")
    topped = await credit.top_up(runtime, owner, nanocredits("50"), actor="test")
    assert isinstance(topped, Receipt)
    refused = refusal(await delete(runtime, "Tenant", "", "physics"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "physics" still has credit: physics (50, 0 held)')
    taken = await credit.adjust(runtime, owner, -nanocredits("50"), actor="test", reason="paid out")
    assert isinstance(taken, Receipt)
    assert code(await delete(runtime, "Tenant", "", "physics")) == "ok"
    late = await credit.top_up(runtime, owner, nanocredits("1"), actor="test")
    assert isinstance(late, Refusal)
    assert late.code is Code.NOT_FOUND, "nothing comes to an account that was left behind"


async def test_what_is_in_use_is_not_deleted(runtime: Runtime) -> None:
    await family(runtime)
    await tier(runtime, "gold", gpu=9)
    await change(runtime, "Tenant", "", "low", tier="gold")
    refused = refusal(await delete(runtime, "Tenant", "", "top"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "top" still has tenants mid')
    refused = refusal(await delete(runtime, "Tenant", "", "low"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "low" still has namespaces low')
    refused = refusal(await delete(runtime, "Tier", "", "gold"))
    assert (code(refused), refused.message) == ("in_use", 'tiers "gold" is used by tenants low')
    await change(runtime, "Tenant", "", "low", tier="")
    assert code(await delete(runtime, "Tier", "", "gold")) == "ok"
    await tenant(runtime, "lone", limits={GPU: 1})
    assert ("tenant:lone", GPU) in await counters(runtime)
    assert code(await delete(runtime, "Tenant", "", "lone")) == "ok"
    assert ("tenant:lone", GPU) not in await counters(runtime)


async def test_another_process_charges_by_the_new_tree_at_once(runtime: Runtime, database_url: str) -> None:
    await family(runtime)
    async with opened(database_url) as other:
        for limit in (1, 3, 2):
            await change(runtime, "Tenant", "", "top", limits={GPU: limit})
            assert code(await allocation(other, "low", "a", gpu=limit + 1)) == "quota_exceeded"
            assert code(await allocation(other, "low", "a", gpu=limit)) == "ok"
            assert code(await delete(other, "Allocation", "low", "a")) == "ok"
