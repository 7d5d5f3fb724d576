"""A tenant is deleted while others use its name: whatever comes first, nothing is left for a namesake."""

import asyncio

from bursar.core.credit.account import Owner
from bursar.core.values.money import NANO
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.credit.credit import OpenLease, PutAccount, TopUp
from bursar.ops.runtime.runtime import Office
from bursar.store.credit import ledger as store
from support.credit.ledgers import GPU, HOUR, asking, assert_books_balance, funded, leased, priced, receipt
from support.runtime.runtime import code, delete, tenant

LAB = Owner("lab")


async def uid_of(office: Office, name: str = "lab") -> str:
    async with office.database.reader() as db:
        return (await office.trees.refresh(db)).tenants[name].uid


async def accounts(office: Office) -> list[tuple[str, str, int, str]]:
    async with office.database.reader() as db:
        return [(one.tenant, one.user, one.posted, one.tenant_uid) for one in await store.list_accounts(db)]


async def test_a_namesake_has_accounts_of_its_own(office: Office) -> None:
    await tenant(office, "lab")
    first = await uid_of(office)
    receipt(await credit.put_account(office, PutAccount(whose=LAB, changes={"credit_limit": 5 * NANO})))
    assert code(await delete(office, "Tenant", "", "lab")) == "ok"
    assert await accounts(office) == [(f"lab@{first}", "", 0, first)]
    await tenant(office, "lab")
    second = await uid_of(office)
    assert first != second
    await priced(office)
    assert code(await credit.open_lease(office, asking(owner=LAB))) == "not_found"
    await funded(office, "3", LAB)
    assert await accounts(office) == [("lab", "", 3 * NANO, second), (f"lab@{first}", "", 0, first)]


async def test_what_was_asked_for_one_tenant_is_not_done_to_its_namesake(office: Office) -> None:
    """Whoever found the first one's uid, and was held up until the second was there."""
    await priced(office)
    await tenant(office, "lab")
    first = await uid_of(office)
    await delete(office, "Tenant", "", "lab")
    await tenant(office, "lab")
    late = TopUp(tenant_uid=first, whose=LAB, amount=NANO, actor="user:test")
    assert code(await credit.submit(office, late, LAB)) == "not_found"
    await funded(office, "50", LAB)
    before = await accounts(office)
    assert code(await credit.submit(office, late, LAB)) == "not_found"
    leasing = OpenLease(tenant_uid=first, whose=LAB, job="a", amounts={GPU: 1000}, klass="h100", window=HOUR)
    assert code(await credit.submit(office, leasing, LAB)) == "not_found"
    amending = PutAccount(tenant_uid=first, whose=LAB, changes={"credit_limit": NANO}, only_old=True)
    assert code(await credit.submit(office, amending, LAB)) == "not_found"
    assert await accounts(office) == before
    await assert_books_balance(office)


async def test_credit_that_comes_while_the_tenant_is_deleted_is_never_lost(office: Office, rival: Office) -> None:
    """Either it comes first, and the tenant stays; or the tenant is gone, and nothing was taken."""
    outcomes = set()
    for round_ in range(12):
        name = f"lab-{round_}"
        await tenant(office, name)
        paid, gone = await asyncio.gather(
            credit.top_up(rival, Owner(name), NANO, actor="user:test"), delete(office, "Tenant", "", name)
        )
        outcomes.add((code(paid), code(gone)))
        found = [one[:3] for one in await accounts(office) if one[0].partition("@")[0] == name]
        assert found == ([(name, "", NANO)] if not isinstance(paid, Refusal) else [])
    assert outcomes <= {("ok", "in_use"), ("not_found", "ok")}
    await assert_books_balance(office)


async def test_a_lease_that_is_opened_while_the_tenant_is_deleted_keeps_it(office: Office, rival: Office) -> None:
    await priced(office)
    for round_ in range(6):
        owner = Owner(f"lab-{round_}")
        await tenant(office, owner.tenant)
        receipt(await credit.put_account(office, PutAccount(whose=owner, changes={"credit_limit": 50 * NANO})))
        opened, gone = await asyncio.gather(
            credit.open_lease(rival, asking(owner=owner)), delete(office, "Tenant", "", owner.tenant)
        )
        assert (code(opened), code(gone)) in {("ok", "in_use"), ("not_found", "ok")}
    await assert_books_balance(office)


async def test_a_free_lease_that_is_open_keeps_the_tenant_too(office: Office) -> None:
    await priced(office, "0")
    await tenant(office, "lab")
    receipt(await credit.put_account(office, PutAccount(whose=LAB, changes={})))
    await leased(office, owner=LAB)
    assert code(await delete(office, "Tenant", "", "lab")) == "in_use"
