"""A tenant is deleted while others use its name: whatever comes first, nothing is left for a namesake."""

import asyncio

from bursar.commands.credit.credit import OpenLease, PutAccount, TopUp
from bursar.core.credit.account import Owner
from bursar.core.values.money import NANO
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as store
from support.credit.ledgers import GPU, HOUR, asking, assert_books_balance, funded, leased, priced, receipt
from support.runtime.runtime import code, delete, tenant

LAB = Owner("lab")


async def uid_of(runtime: Runtime, name: str = "lab") -> str:
    async with runtime.database.reader() as db:
        return (await runtime.trees.refresh(db)).tenants[name].uid


async def accounts(runtime: Runtime) -> list[tuple[str, str, int, str]]:
    async with runtime.database.reader() as db:
        return [(one.tenant, one.user, one.posted, one.tenant_uid) for one in await store.list_accounts(db)]


async def test_a_namesake_has_accounts_of_its_own(runtime: Runtime) -> None:
    await tenant(runtime, "lab")
    first = await uid_of(runtime)
    receipt(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"credit_limit": 5 * NANO})))
    assert code(await delete(runtime, "Tenant", "", "lab")) == "ok"
    assert await accounts(runtime) == [(f"lab@{first}", "", 0, first)]
    await tenant(runtime, "lab")
    second = await uid_of(runtime)
    assert first != second
    await priced(runtime)
    assert code(await credit.open_lease(runtime, asking(owner=LAB))) == "not_found"
    await funded(runtime, "3", LAB)
    assert await accounts(runtime) == [("lab", "", 3 * NANO, second), (f"lab@{first}", "", 0, first)]


async def test_what_was_asked_for_one_tenant_is_not_done_to_its_namesake(runtime: Runtime) -> None:
    """A caller that found the first tenant's uid, and was delayed until the second one existed."""
    await priced(runtime)
    await tenant(runtime, "lab")
    first = await uid_of(runtime)
    await delete(runtime, "Tenant", "", "lab")
    await tenant(runtime, "lab")
    late = TopUp(tenant_uid=first, whose=LAB, amount=NANO, actor="user:test")
    assert code(await credit.submit(runtime, late, LAB)) == "not_found"
    await funded(runtime, "50", LAB)
    before = await accounts(runtime)
    assert code(await credit.submit(runtime, late, LAB)) == "not_found"
    leasing = OpenLease(tenant_uid=first, whose=LAB, job="a", amounts={GPU: 1000}, klass="h100", window=HOUR)
    assert code(await credit.submit(runtime, leasing, LAB)) == "not_found"
    amending = PutAccount(tenant_uid=first, whose=LAB, changes={"credit_limit": NANO}, only_old=True)
    assert code(await credit.submit(runtime, amending, LAB)) == "not_found"
    assert await accounts(runtime) == before
    await assert_books_balance(runtime)


async def test_credit_that_comes_while_the_tenant_is_deleted_is_never_lost(runtime: Runtime, rival: Runtime) -> None:
    """Either it comes first, and the tenant stays; or the tenant is gone, and nothing was taken."""
    outcomes = set()
    for round_ in range(12):
        name = f"lab-{round_}"
        await tenant(runtime, name)
        paid, gone = await asyncio.gather(
            credit.top_up(rival, Owner(name), NANO, actor="user:test"), delete(runtime, "Tenant", "", name)
        )
        outcomes.add((code(paid), code(gone)))
        found = [one[:3] for one in await accounts(runtime) if one[0].partition("@")[0] == name]
        assert found == ([(name, "", NANO)] if not isinstance(paid, Refusal) else [])
    assert outcomes <= {("ok", "in_use"), ("not_found", "ok")}
    await assert_books_balance(runtime)


async def test_a_lease_that_is_opened_while_the_tenant_is_deleted_keeps_it(runtime: Runtime, rival: Runtime) -> None:
    await priced(runtime)
    for round_ in range(6):
        owner = Owner(f"lab-{round_}")
        await tenant(runtime, owner.tenant)
        receipt(await credit.put_account(runtime, PutAccount(whose=owner, changes={"credit_limit": 50 * NANO})))
        opened, gone = await asyncio.gather(
            credit.open_lease(rival, asking(owner=owner)), delete(runtime, "Tenant", "", owner.tenant)
        )
        assert (code(opened), code(gone)) in {("ok", "in_use"), ("not_found", "ok")}
    await assert_books_balance(runtime)


async def test_a_free_lease_that_is_open_keeps_the_tenant_too(runtime: Runtime) -> None:
    await priced(runtime, "0")
    await tenant(runtime, "lab")
    receipt(await credit.put_account(runtime, PutAccount(whose=LAB, changes={})))
    await leased(runtime, owner=LAB)
    assert code(await delete(runtime, "Tenant", "", "lab")) == "in_use"
