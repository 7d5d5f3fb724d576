"""The tree of tenants on a real database: limits hold for subtrees, and every change of the tree recounts."""

from typing import Any

import msgspec

from bursar.core.credit.account import Owner
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Key, Stored
from bursar.core.quota.quota import Counter
from bursar.core.values.money import nanocredits
from bursar.core.values.quantity import UNLIMITED
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit import credit
from bursar.ops.credit.ledger import Receipt
from bursar.ops.lifecycle.dispatch import change_command
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.command import Reply
from bursar.ops.runtime.runtime import Office
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


async def family(office: Office, **limits: int) -> None:
    """top > mid > low, a namespace each; limits on GPUs as given."""
    above = ""
    for name in ("top", "mid", "low"):
        spec: dict[str, Any] = {"limits": {GPU: limits[name]}} if name in limits else {}
        assert code(await tenant(office, name, **({"parent": above} if above else {}), **spec)) == "ok"
        assert code(await namespace(office, name, name)) == "ok"
        above = name


async def tier(office: Office, name: str, **limits: int) -> Reply:
    document = {
        "metadata": {"name": name},
        "spec": {"limits": {key.replace("gpu", GPU): v for key, v in limits.items()}},
    }
    return await create(office, "Tier", document)


async def set_system(office: Office, **limits: int) -> Reply:
    wanted = {key.replace("gpu", GPU): value for key, value in limits.items()}
    return await change(office, "Settings", "", "system", limits=wanted)


async def move_namespace(office: Office, name: str, tenant: str) -> Reply:
    def edit(before: Stored, document: dict[str, Any]) -> Any:
        document["metadata"]["labels"] = {"bursar.io/tenant": tenant}
        one = msgspec.convert(document, BY_NAME["Namespace"].type)
        return change_command(BY_NAME["Namespace"], before, one, TEST, spec_changed=False)

    return await object_ops.change(office, Key("Namespace", "", name), edit, tenant="test")


# Limits of ancestors.


async def test_the_limit_of_an_ancestor_holds_for_everything_below_it(office: Office) -> None:
    await family(office, top=4)
    assert code(await allocation(office, "low", "a", gpu=2)) == "ok"
    assert code(await allocation(office, "mid", "b", gpu=1)) == "ok"
    refused = refusal(await allocation(office, "top", "c", gpu=2))
    assert refused.message == (
        'allocation rejected: tenant "top" would exceed nvidia.com/gpu quota (current: 3, requested: 2, limit: 4)'
    )
    refused = refusal(await allocation(office, "low", "c", gpu=2))
    assert [cause.scope for cause in refused.causes] == ["tenant:top"]
    assert code(await allocation(office, "low", "c", gpu=1)) == "ok"
    assert await gpus(office, "tenant:top") == (4, 0)
    assert await gpus(office, "tenant:mid") == (1, 0)
    await assert_counters_equal_charges(office)


async def test_all_limits_are_named_from_the_namespace_to_the_system(office: Office) -> None:
    await family(office, top=3, mid=2, low=1)
    await quota(office, "low", "q", hard={GPU: "1"})
    await set_system(office, gpu=4)
    refused = refusal(await allocation(office, "low", "a", gpu=5))
    assert refused.message == "exceeded quota: nvidia.com/gpu limit 1, requested 5, used 0"
    assert [cause.scope for cause in refused.causes] == [
        "quota:low/q", "tenant:low", "tenant:mid", "tenant:top", "system",
    ]  # fmt: skip
    assert [cause.limit for cause in refused.causes] == ["1", "1", "2", "3", "4"]


async def test_enforcement_queue_of_a_tenant_lets_work_wait_and_checks_when_it_is_placed(office: Office) -> None:
    await tenant(office, "lab", limits={GPU: 2}, enforcement="Queue")
    await namespace(office, "lab", "lab")
    await node(office, "n1", gpu=8)
    for name in ("a", "b"):
        assert code(await allocation(office, "lab", name, gpu=2)) == "ok"
    assert code(await bind(office, "lab", "a", "n1")) == "ok"
    assert code(await bind(office, "lab", "b", "n1")) == "quota_exceeded"
    await end(office, "lab", "a")
    assert code(await bind(office, "lab", "b", "n1")) == "ok"
    await assert_counters_equal_charges(office)


# Moving tenants.


async def test_moving_a_tenant_moves_what_its_subtree_uses(office: Office) -> None:
    await family(office, top=9, mid=8)
    await tenant(office, "other", limits={GPU: 5})
    await node(office, "n1", gpu=8)
    await allocation(office, "low", "a", gpu=2)
    await allocation(office, "mid", "b", gpu=1)
    await bind(office, "low", "a", "n1")
    assert code(await change(office, "Tenant", "", "low", parent="other")) == "ok"
    assert await gpus(office, "tenant:top") == (1, 0)
    assert await gpus(office, "tenant:mid") == (1, 0)
    assert await gpus(office, "tenant:other") == (2, 2)
    await assert_counters_equal_charges(office)
    assert code(await change(office, "Tenant", "", "mid", parent="other")) == "ok"
    assert await gpus(office, "tenant:top") == (0, 0)
    assert await gpus(office, "tenant:other") == (3, 2)
    await assert_counters_equal_charges(office)


async def test_a_move_without_room_is_refused_and_changes_nothing(office: Office) -> None:
    await family(office)
    await tenant(office, "full", limits={GPU: 1})
    await allocation(office, "low", "a", gpu=2)
    before = await counters(office)
    refused = refusal(await change(office, "Tenant", "", "mid", parent="full"))
    assert code(refused) == "in_use"
    assert refused.message == (
        'moving tenant "mid" rejected: tenant "full" would exceed nvidia.com/gpu quota '
        "(current: 0, requested: 2, limit: 1)"
    )
    assert await counters(office) == before
    assert document(await change(office, "Tenant", "", "mid"))["spec"]["parent"] == "top"
    await end(office, "low", "a", Phase.CANCELLED)
    assert code(await change(office, "Tenant", "", "mid", parent="full")) == "ok"


async def test_a_tenant_cannot_be_below_itself_or_below_nobody(office: Office) -> None:
    await family(office)
    assert code(await change(office, "Tenant", "", "top", parent="low")) == "invalid"
    assert code(await change(office, "Tenant", "", "low", parent="nobody")) == "invalid"
    assert code(await tenant(office, "new", parent="nobody")) == "invalid"
    assert code(await tenant(office, "new", tier="nothing")) == "invalid"
    await assert_counters_equal_charges(office)


async def test_what_was_charged_comes_back_exactly_after_the_tree_was_turned_over(office: Office) -> None:
    await family(office, top=9)
    await node(office, "n1", cpu=64, gpu=8)
    await quota(office, "low", "q", hard={GPU: "4"})
    for name in ("a", "b", "c"):
        await allocation(office, "low", name, cpu=3, gpu=1)
    await bind(office, "low", "a", "n1")
    await bind(office, "low", "b", "n1")
    await change(office, "Tenant", "", "low", parent="", limits={"cpu": 1})
    await set_system(office, gpu=1, cpu=1)
    await delete(office, "ResourceQuota", "low", "q")
    await quota(office, "low", "other", hard={"cpu": "2", "nodes": "1"})
    await change(office, "Tenant", "", "top", limits={})
    await assert_counters_equal_charges(office)
    await end(office, "low", "a")
    await end(office, "low", "b", Phase.PENDING)
    await assert_counters_equal_charges(office)
    for name in ("b", "c"):
        await delete(office, "Allocation", "low", name)
    assert all((one.accepted, one.bound) == (0, 0) for one in (await counters(office)).values())


# Limits that appear and disappear.


async def test_a_limit_that_appears_on_a_parent_counts_what_is_below_it(office: Office) -> None:
    await family(office)
    await allocation(office, "low", "a", gpu=2)
    await allocation(office, "top", "b", gpu=1)
    assert await gpus(office, "tenant:top") == (1, 0)  # its own: nothing limits the subtree
    assert code(await change(office, "Tenant", "", "top", limits={GPU: 4})) == "ok"
    assert await gpus(office, "tenant:top") == (3, 0)
    assert code(await allocation(office, "mid", "c", gpu=2)) == "quota_exceeded"
    assert code(await change(office, "Tenant", "", "top", limits={})) == "ok"
    assert await gpus(office, "tenant:top") == (1, 0)
    assert code(await allocation(office, "mid", "c", gpu=2)) == "ok"
    await assert_counters_equal_charges(office)


async def test_a_limit_over_more_than_can_be_counted_is_refused_and_changes_nothing(office: Office) -> None:
    await family(office)
    for name in ("top", "mid"):
        assert code(await allocation(office, name, "huge", gpu=5 * 10**15)) == "ok"
    before = await counters(office)
    assert code(await change(office, "Tenant", "", "top", limits={GPU: 4})) == "in_use"
    assert await counters(office) == before


async def test_a_tier_reaches_all_its_tenants_when_it_is_edited(office: Office) -> None:
    await tier(office, "small", gpu=1)
    await tenant(office, "one", tier="small")
    await tenant(office, "own", tier="small", limits={GPU: 3})
    await tenant(office, "parent", tier="small")
    await tenant(office, "child", parent="parent")
    for name in ("one", "own", "child"):
        await namespace(office, name, name)
    assert code(await allocation(office, "one", "a", gpu=2)) == "quota_exceeded"
    assert code(await allocation(office, "child", "a", gpu=2)) == "quota_exceeded"
    assert code(await change(office, "Tier", "", "small", limits={GPU: 2})) == "ok"
    assert code(await allocation(office, "one", "a", gpu=2)) == "ok"
    assert code(await allocation(office, "child", "a", gpu=2)) == "ok"
    assert code(await allocation(office, "own", "a", gpu=3)) == "ok"
    rows = await counters(office)
    assert {name: rows[f"tenant:{name}", GPU].hard for name in ("one", "own", "parent", "child")} == {
        "one": 2000, "own": 3000, "parent": 2000, "child": UNLIMITED,
    }  # fmt: skip
    assert code(await change(office, "Tier", "", "small", limits={"cpu": 1})) == "ok"
    assert (await counters(office))["tenant:one", GPU].hard == UNLIMITED
    assert await gpus(office, "tenant:parent") == (0, 0)
    await assert_counters_equal_charges(office)


async def test_a_limit_of_the_system_holds_for_all(office: Office) -> None:
    await family(office)
    await allocation(office, "low", "a", gpu=1)
    await allocation(office, "default", "b", gpu=1)
    assert await gpus(office, "system") is None  # a row that everybody locks exists only while it limits
    assert code(await set_system(office, gpu=3)) == "ok"
    assert await gpus(office, "system") == (2, 0)
    refused = refusal(await allocation(office, "default", "c", gpu=2))
    assert refused.message == (
        "allocation rejected: the system would exceed nvidia.com/gpu quota (current: 2, requested: 2, limit: 3)"
    )
    assert code(await set_system(office, gpu=4)) == "ok"
    assert code(await allocation(office, "default", "c", gpu=2)) == "ok"
    assert await gpus(office, "system") == (4, 0)
    await assert_counters_equal_charges(office)
    assert code(await set_system(office)) == "ok"
    assert await gpus(office, "system") is None
    await assert_counters_equal_charges(office)


async def test_reduction_below_usage_stops_nothing_and_refuses_only_increases(office: Office) -> None:
    await tenant(office, "physics", limits={GPU: 4})
    await namespace(office, "physics", "physics")
    await node(office, "n1", gpu=8)
    for name in ("a", "b"):
        await allocation(office, "physics", name, gpu=2)
    await bind(office, "physics", "a", "n1")
    assert code(await change(office, "Tenant", "", "physics", limits={GPU: 1})) == "ok"
    assert (await get(office, "Allocation", "physics", "a")).fields["status.phase"] == "Scheduled"
    refused = refusal(await allocation(office, "physics", "c", gpu=1))
    assert refused.message == (
        'allocation rejected: tenant "physics" exceeds nvidia.com/gpu quota\n'
        "  Current usage: 4 nvidia.com/gpu\n"
        "  New limit: 1 nvidia.com/gpu\n"
        "  Hint: Wait for running allocations to complete, or contact your tenant admin."
    )
    assert code(await bind(office, "physics", "b", "n1")) == "quota_exceeded"  # it was let in, and waits
    assert code(await end(office, "physics", "a", Phase.RUNNING)) == "ok"
    assert code(await end(office, "physics", "a")) == "ok"
    assert code(await delete(office, "Allocation", "physics", "b")) == "ok"
    assert code(await allocation(office, "physics", "c", gpu=1)) == "ok"
    await assert_counters_equal_charges(office)


# Quotas of namespaces.


async def test_a_new_quota_counts_what_is_there(office: Office) -> None:
    await node(office, "n1", gpu=8)
    await allocation(office, "default", "a", gpu=2)
    await allocation(office, "default", "b", gpu=3)
    await bind(office, "default", "a", "n1")
    assert code(await quota(office, "default", "q", hard={GPU: "5", "pods": "9"}, soft={"cpu": "1"})) == "ok"
    rows = await counters(office)
    assert rows["quota:default/q", GPU] == Counter(5000, None, 5000, 2000)
    assert rows["quota:default/q", "pods"] == Counter(9000, None, 2000, 1000)
    assert rows["quota:default/q", "cpu"] == Counter(UNLIMITED, 1000, 0, 0)
    assert code(await allocation(office, "default", "c", gpu=1)) == "quota_exceeded"
    await assert_counters_equal_charges(office)


async def test_a_new_quota_counts_by_its_scopes(office: Office) -> None:
    await allocation(office, "default", "endless", gpu=1)
    await allocation(office, "default", "ending", spec={"ttl": "1h"}, gpu=2)
    await allocation(office, "default", "urgent", spec={"priorityClass": "high-priority"}, gpu=4)
    await create(office, "Allocation", {"metadata": {"name": "nothing", "namespace": "default"}, "spec": {}})
    hard = {GPU: "9", "pods": "9"}
    await quota(office, "default", "ending", hard=hard, scopes=["Terminating"])
    await quota(office, "default", "endless", hard=hard, scopes=["NotTerminating"])
    await quota(office, "default", "nothing", hard=hard, scopes=["BestEffort"])
    urgent = {"matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority"]}]}
    await quota(office, "default", "urgent", hard=hard, scopeSelector=urgent)
    rows = await counters(office)
    used = {
        name: (
            rows[f"quota:default/{name}", GPU].accepted // 1000,
            rows[f"quota:default/{name}", "pods"].accepted // 1000,
        )
        for name in ("ending", "endless", "nothing", "urgent")
    }
    assert used == {"ending": (2, 1), "endless": (5, 3), "nothing": (0, 1), "urgent": (4, 1)}
    assert code(await allocation(office, "default", "more", spec={"ttl": "1h"}, gpu=8)) == "quota_exceeded"
    assert code(await allocation(office, "default", "more", gpu=4)) == "ok"
    await assert_counters_equal_charges(office)


async def test_a_quota_whose_scopes_change_counts_anew(office: Office) -> None:
    await allocation(office, "default", "endless", gpu=1)
    await allocation(office, "default", "ending", spec={"ttl": "1h"}, gpu=2)
    await quota(office, "default", "q", hard={GPU: "9"})
    assert await gpus(office, "quota:default/q") == (3, 0)
    await change(office, "ResourceQuota", "default", "q", scopes=["Terminating"])
    assert await gpus(office, "quota:default/q") == (2, 0)
    await change(office, "ResourceQuota", "default", "q", hard={"pods": "9"})
    assert await gpus(office, "quota:default/q") is None
    await delete(office, "ResourceQuota", "default", "q")
    assert not [scope for scope, _ in await counters(office) if scope.startswith("quota:")]
    await assert_counters_equal_charges(office)


async def test_a_quota_needs_a_namespace_that_is_there(office: Office) -> None:
    assert code(await quota(office, "nowhere", "q", hard={GPU: "1"})) == "not_found"
    await namespace(office, "ending")
    await delete(office, "Namespace", "", "ending")
    assert code(await quota(office, "ending", "q", hard={GPU: "1"})) == "terminating"
    assert code(await allocation(office, "ending", "a")) == "terminating"


# Namespaces and deletions.


async def test_the_tenant_of_a_namespace_stands_while_it_is_in_use(office: Office) -> None:
    await family(office)
    await allocation(office, "low", "a", gpu=1)
    refused = refusal(await move_namespace(office, "low", "top"))
    assert code(refused) == "in_use"
    assert refused.message == ('namespaces "low" belongs to tenant "low" and is in use: its tenant cannot be changed')
    await delete(office, "Allocation", "low", "a")
    assert code(await move_namespace(office, "low", "nobody")) == "invalid"
    assert code(await move_namespace(office, "low", "top")) == "ok"
    await allocation(office, "low", "b", gpu=2)
    assert await gpus(office, "tenant:top") == (2, 0)
    assert (await get(office, "Allocation", "low", "b")).tenant == "top"
    await assert_counters_equal_charges(office)


async def test_a_tenant_with_credit_is_not_deleted(office: Office) -> None:
    """Whoever gets its name next would have it."""
    await tenant(office, "physics")
    owner = Owner("physics")
    topped = await credit.top_up(office, owner, nanocredits("50"), actor="test")
    assert isinstance(topped, Receipt)
    refused = refusal(await delete(office, "Tenant", "", "physics"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "physics" still has credit: physics (50, 0 held)')
    taken = await credit.adjust(office, owner, -nanocredits("50"), actor="test", reason="paid out")
    assert isinstance(taken, Receipt)
    assert code(await delete(office, "Tenant", "", "physics")) == "ok"
    late = await credit.top_up(office, owner, nanocredits("1"), actor="test")
    assert isinstance(late, Refusal)
    assert late.code is Code.NOT_FOUND, "nothing comes to an account that was left behind"


async def test_what_is_in_use_is_not_deleted(office: Office) -> None:
    await family(office)
    await tier(office, "gold", gpu=9)
    await change(office, "Tenant", "", "low", tier="gold")
    refused = refusal(await delete(office, "Tenant", "", "top"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "top" still has tenants mid')
    refused = refusal(await delete(office, "Tenant", "", "low"))
    assert (code(refused), refused.message) == ("in_use", 'tenants "low" still has namespaces low')
    refused = refusal(await delete(office, "Tier", "", "gold"))
    assert (code(refused), refused.message) == ("in_use", 'tiers "gold" is used by tenants low')
    await change(office, "Tenant", "", "low", tier="")
    assert code(await delete(office, "Tier", "", "gold")) == "ok"
    await tenant(office, "lone", limits={GPU: 1})
    assert ("tenant:lone", GPU) in await counters(office)
    assert code(await delete(office, "Tenant", "", "lone")) == "ok"
    assert ("tenant:lone", GPU) not in await counters(office)


async def test_another_office_charges_by_the_new_tree_at_once(office: Office, database_url: str) -> None:
    await family(office)
    async with opened(database_url) as other:
        for limit in (1, 3, 2):
            await change(office, "Tenant", "", "top", limits={GPU: limit})
            assert code(await allocation(other, "low", "a", gpu=limit + 1)) == "quota_exceeded"
            assert code(await allocation(other, "low", "a", gpu=limit)) == "ok"
            assert code(await delete(other, "Allocation", "low", "a")) == "ok"
