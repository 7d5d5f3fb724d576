"""Binding prepaid work: capacity, quota and credit in one decision, held whole or not at all."""

import msgspec
import pytest

from bursar.commands.credit.credit import PutAccount
from bursar.commands.scheduling.bind import Bind
from bursar.commands.scheduling.evict import EvictionVictim, Preempt
from bursar.core.credit.account import Owner
from bursar.core.objects.object import Key, Stored
from bursar.core.values.money import nanocredits
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import bind, preempt
from support.credit.ledgers import LAB, assert_books_balance, funded, priced, receipt, stop_clock
from support.credit.paying import (
    account,
    assert_all_is_paid,
    leases,
    machine,
    paid_nodes,
    prepaid,
    state,
    submitted_by,
)
from support.runtime.runtime import (
    TEST,
    allocation,
    bind_unit,
    change,
    code,
    create,
    document,
    member,
    node,
    refusal,
    tenant,
)
from support.runtime.runtime import bind as bind_one
from support.scheduling.evictions import PREEMPTED, running, status, stored

GPU = "nvidia.com/gpu"


@pytest.fixture
async def lab(runtime: Runtime) -> Runtime:
    """A prepaid tenant, two nodes of H100s at 0.01 credits a second, and no account yet."""
    await stop_clock(runtime)
    await paid_nodes(runtime, "n1", "n2")
    return runtime


async def amend(runtime: Runtime, owner: Owner = LAB, **changes: object) -> None:
    receipt(await credit.put_account(runtime, PutAccount(actor="user:test", whose=owner, changes=changes)))


# What is held.


async def test_the_first_window_is_held_with_the_capacity_and_does_not_run_yet(lab: Runtime) -> None:
    await funded(lab, "50")
    await allocation(lab, "default", "train", gpu=4)
    shown = document(await bind_one(lab, "default", "train", "n1"))["status"]
    (lease,) = await leases(lab, "train")
    assert shown["nodes"][0]["lease"] == f"lease-{lease['id']}"
    assert (lease["node"], lease["epoch"], lease["class"], lease["gpus"]) == ("n1", 1, "h100", 4000)
    assert (lease["rate"], lease["held"], lease["started_at"]) == (40_000_000, nanocredits("0.6"), 0)
    held = await account(lab)
    assert (held["posted"], held["held"], held["gpus"]) == (nanocredits("50"), nanocredits("0.6"), 4000)
    await assert_all_is_paid(lab)
    await assert_books_balance(lab)


async def test_each_node_of_a_wide_allocation_has_its_own_lease_at_its_own_price(lab: Runtime) -> None:
    await machine(lab, "old", "a100")
    await priced(lab, "0.002", "a100")
    await funded(lab, "50")
    await allocation(lab, "default", "wide", spec={"nodes": 2}, gpu=2)
    shown = document(await bind_one(lab, "default", "wide", "n1", "old"))["status"]
    fast, slow = await leases(lab, "wide")
    assert [one["lease"] for one in shown["nodes"]] == [f"lease-{fast['id']}", f"lease-{slow['id']}"]
    assert (fast["rate"], slow["rate"]) == (20_000_000, 4_000_000)
    assert (await account(lab))["held"] == nanocredits("0.3") + nanocredits("0.06")
    await assert_all_is_paid(lab)


async def test_who_has_a_node_alone_pays_for_all_of_it(lab: Runtime) -> None:
    await funded(lab, "50")
    await allocation(lab, "default", "alone", spec={"exclusive": True}, gpu=1)
    assert code(await bind_one(lab, "default", "alone", "n1")) == "ok"
    (lease,) = await leases(lab, "alone")
    assert (lease["gpus"], lease["rate"]) == (8000, 80_000_000)


async def test_a_share_of_a_gpu_costs_its_share(lab: Runtime) -> None:
    await funded(lab, "50")
    await allocation(lab, "default", "part", gpu="0.25")
    assert code(await bind_one(lab, "default", "part", "n1")) == "ok"
    assert [one["rate"] for one in await leases(lab)] == [2_500_000]


async def test_the_user_who_submitted_it_pays_if_they_have_an_account_else_the_pool(lab: Runtime) -> None:
    await funded(lab, "10")
    await amend(lab, Owner("default", "ann"))
    await funded(lab, "10", Owner("default", "ann"))
    await tenant(lab, "other")
    for user, name in (("default/ann", "a"), ("default/bob", "b"), ("other/ann", "c"), ("ann", "d")):
        assert code(await submitted_by(lab, user, name)) == "ok"
        assert (await status(lab, name))["user"] == user
        assert code(await bind_one(lab, "default", name, "n1")) == "ok"
    assert (await account(lab, user="ann"))["held"] == nanocredits("0.15")
    assert (await account(lab))["held"] == nanocredits("0.45"), "another tenant's ann is somebody else"
    await assert_books_balance(lab)


async def test_the_allocations_of_a_job_are_paid_by_who_submitted_it(lab: Runtime) -> None:
    spec = {"template": {"spec": {"resources": {"requests": {GPU: "1"}}}}, "parallelism": 2}
    await create(lab, "Job", {"metadata": {"name": "sweep", "namespace": "default"}, "spec": spec})
    for name in ("sweep-0", "sweep-1"):
        found = await object_ops.get(lab, Key("Allocation", "default", name))
        assert isinstance(found, Stored)
        assert msgspec.json.decode(found.status)["user"] == "test"


async def test_a_tier_says_how_its_tenants_pay_unless_they_say_it_themselves(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await machine(runtime, "n1")
    billing = {"mode": "prepaid", "leaseSeconds": 100, "discountPercent": 12.5}
    await create(runtime, "Tier", {"metadata": {"name": "gold"}, "spec": {"billing": billing}})
    await change(runtime, "Tenant", "", "default", tier="gold", billing={"leaseMode": "reserve", "discountPercent": 50})
    await funded(runtime, "10")
    await allocation(runtime, "default", "one", gpu=1)
    assert code(await bind_one(runtime, "default", "one", "n1")) == "ok"
    (lease,) = await leases(runtime)
    assert (lease["mode"], lease["discount"], lease["rate"]) == ("reserve", 5000, 5_000_000)
    assert lease["held"] == nanocredits("0.5")


async def test_how_far_ahead_is_paid_is_said_by_the_settings_where_nobody_else_does(runtime: Runtime) -> None:
    await stop_clock(runtime)
    await priced(runtime)
    await machine(runtime, "n1")
    await change(runtime, "Tenant", "", "default", billing={"mode": "prepaid"})
    settings = {"metadata": {"name": "system"}, "spec": {"credits": {"leaseSeconds": 30}}}
    assert code(await create(runtime, "Settings", settings)) in ("ok", "already_exists")
    await change(runtime, "Settings", "", "system", credits={"leaseSeconds": 30})
    await funded(runtime, "10")
    await allocation(runtime, "default", "one", gpu=1)
    assert code(await bind_one(runtime, "default", "one", "n1")) == "ok"
    assert (await account(runtime))["held"] == nanocredits("0.3")


async def test_who_does_not_pay_beforehand_needs_no_account(runtime: Runtime) -> None:
    await node(runtime, "n1", gpu=1)
    await allocation(runtime, "default", "free", gpu=1)
    shown = document(await bind_one(runtime, "default", "free", "n1"))["status"]
    assert "lease" not in shown["nodes"][0]
    assert await leases(runtime) == []


# What is refused.


async def test_without_an_account_nothing_is_placed_and_it_is_told_what_would_help(lab: Runtime) -> None:
    await submitted_by(lab, "default/ann", "train")
    before = await state(lab)
    no = refusal(await bind_one(lab, "default", "train", "n1"))
    assert str(no.code) == "insufficient_credit"
    assert no.message == "tenant default is prepaid, and there is no account default/ann or default"
    assert "top" in no.hint
    assert await state(lab) == before


@pytest.mark.parametrize(
    ("changes", "gpus", "expected", "told"),
    [
        ({}, 8, "insufficient_credit", "has 1 credit available, 1.2 are needed"),
        ({"status": "suspended"}, 1, "account_inactive", "is suspended"),
        ({"gpus_max": 2000}, 3, "concurrency_exceeded", "may use 2 GPUs at once"),
        ({"daily_cap": nanocredits("0.2")}, 2, "daily_cap_exceeded", "may spend 0.2 credits a day"),
        (
            {"spend_rate_max": nanocredits("0.001"), "spend_burst": nanocredits("0.2")},
            2,
            "spend_rate_exceeded",
            "may spend 0.001 credits a second",
        ),
    ],
)
async def test_every_limit_of_the_account_refuses_and_leaves_everything_as_it_was(
    lab: Runtime, changes: dict[str, object], gpus: int, expected: str, told: str
) -> None:
    await funded(lab, "1")
    await amend(lab, LAB, **changes)
    await allocation(lab, "default", "train", gpu=gpus)
    before = await state(lab)
    no = refusal(await bind_one(lab, "default", "train", "n1"))
    assert str(no.code) == expected
    assert told in no.message
    assert no.hint
    assert await state(lab) == before


async def test_devices_without_a_price_are_not_given_away(lab: Runtime) -> None:
    await machine(lab, "new", "b200")
    await funded(lab, "100")
    await allocation(lab, "default", "train", gpu=1)
    before = await state(lab)
    no = refusal(await bind_one(lab, "default", "train", "new"))
    assert str(no.code) == "unpriced"
    assert "b200" in no.message
    assert "h100" in no.hint
    assert await state(lab) == before


async def test_a_gang_is_paid_for_as_a_whole_or_not_at_all(lab: Runtime) -> None:
    await funded(lab, "0.44")  # for two of three
    gang = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
    for name in ("a", "b", "c"):
        await allocation(lab, "default", name, spec=gang, gpu=1)
    places = {"a": ("n1",), "b": ("n1",), "c": ("n2",)}
    before = await state(lab)
    no = refusal(await bind_unit(lab, "default", places))
    assert str(no.code) == "insufficient_credit"
    assert "0.44 credits available, 0.45 are needed" in no.message
    assert await state(lab) == before
    await funded(lab, "0.01")
    assert isinstance(await bind_unit(lab, "default", places), tuple)
    assert (await account(lab))["held"] == nanocredits("0.45")
    await assert_all_is_paid(lab)


async def test_what_is_refused_for_quota_holds_no_credit(lab: Runtime) -> None:
    await funded(lab, "10")
    await allocation(lab, "default", "train", gpu=2)
    await change(lab, "Tenant", "", "default", limits={GPU: "1"})
    before = await state(lab)
    assert code(await bind_one(lab, "default", "train", "n1")) == "quota_exceeded"
    assert await state(lab) == before


async def test_of_one_batch_those_are_placed_that_can_be_paid_for(lab: Runtime) -> None:
    """What one unit holds is gone for those after it, and a refused one takes nothing from them."""
    await funded(lab, "0.45")
    for name, gpus in (("a", 1), ("dear", 4), ("b", 1), ("c", 1), ("late", 1)):
        await allocation(lab, "default", name, gpu=gpus)
    units = []
    for name in ("a", "dear", "b", "c", "late"):
        one = await member(lab, "default", name, "n1")
        assert not isinstance(one, Refusal)
        units.append(Bind.unit([one], TEST))
    codes = [code(reply) for reply in await bind(lab, units)]
    assert codes == ["ok", "insufficient_credit", "ok", "ok", "insufficient_credit"]
    assert (await account(lab))["held"] == nanocredits("0.45")
    await assert_all_is_paid(lab)
    await assert_books_balance(lab)


async def test_nobody_has_to_go_for_who_cannot_pay(lab: Runtime) -> None:
    await tenant(lab, "guest")
    await change(lab, "Tenant", "", "default", billing={"mode": "none"})
    await running(lab, "low", "n1", gpu=8)
    await prepaid(lab)
    await funded(lab, "1")
    await allocation(lab, "default", "urgent", gpu=8)
    nominee, victim = await stored(lab, "urgent"), await stored(lab, "low")
    plan = Preempt(
        key=nominee.key, uid=nominee.uid, origin=TEST, nominated=("n1",), until=now(),
        victims=(EvictionVictim(victim.key, victim.uid, PREEMPTED),),
    )  # fmt: skip
    before = await state(lab)
    (reply,) = await preempt(lab, [plan])
    assert code(reply) == "insufficient_credit"
    assert await state(lab) == before
    await funded(lab, "1")
    (reply,) = await preempt(lab, [plan])
    assert code(reply) == "ok"
    assert (await account(lab))["held"] == 0, "it is held when it is placed"
