"""Accounts: when they may be closed, and when their owners are told that little is left."""

from typing import Any

import msgspec

from bursar.commands.credit.credit import CloseLeaseCommand, PutAccount
from bursar.core.credit.account import AccountStatus, Owner, no_account
from bursar.core.values.money import NANO, credits_of
from bursar.core.values.refusal import Code
from bursar.ops.credit import credit
from bursar.ops.runtime.runtime import Runtime
from support.credit.ledgers import LAB, account_of, asking, funded, leased, priced, receipt
from support.runtime.runtime import code, refusal


async def test_closing_an_account_waits_for_its_leases_and_is_for_ever(runtime: Runtime) -> None:
    await priced(runtime)
    await funded(runtime, "50")
    lease = await leased(runtime)
    closing = PutAccount(whose=LAB, changes={"status": "closed"})
    assert code(await credit.put_account(runtime, closing)) == "in_use"
    await credit.close_lease(runtime, CloseLeaseCommand(number=lease))
    left = (await account_of(runtime)).posted
    full = refusal(await credit.put_account(runtime, closing))
    assert (full.code, full.message) == (
        Code.IN_USE, f"account default has {credits_of(left)} credits left: only an empty account can be closed",
    )  # fmt: skip
    assert full.hint.startswith(f"First refund or adjust: bursar credit adjust -{credits_of(left)} --account default")
    assert (full.causes[0].dimension, full.causes[0].current_usage) == ("posted", credits_of(left))
    assert (await account_of(runtime)).status is AccountStatus.ACTIVE
    receipt(await credit.adjust(runtime, LAB, -left, actor="user:test", reason="paid out"))
    receipt(await credit.put_account(runtime, closing))
    assert code(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"status": "active"}))) == "ended"
    assert code(await credit.top_up(runtime, LAB, NANO, actor="user:test")) == "account_inactive"
    assert code(await credit.open_lease(runtime, asking())) == "account_inactive"
    # It is closed already: to say so again changes nothing, and other limits may still be set.
    receipt(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"status": "closed", "low_balance": 5})))


async def notices(runtime: Runtime) -> list[tuple[str, str]]:
    async with runtime.database.reader() as db:
        rows = await db.fetch("SELECT type, data FROM notice WHERE type = 'credit.low' ORDER BY id")
    return [(row["type"], msgspec.json.decode(row["data"])["available"]) for row in rows]


async def test_whose_balance_is_low_by_a_new_threshold_is_told_at_once(runtime: Runtime) -> None:
    async def set_(**changes: Any) -> None:
        receipt(await credit.put_account(runtime, PutAccount(whose=LAB, changes=changes)))

    await funded(runtime, "10")
    await set_(low_balance=10 * NANO)
    assert await notices(runtime) == [], "it has as much as that"
    await set_(low_balance=11 * NANO)
    assert await notices(runtime) == [("credit.low", "10")]
    await set_(low_balance=12 * NANO)
    assert len(await notices(runtime)) == 1, "it was low before, and that was told"
    await set_(low_balance=None)
    await set_(low_balance=20 * NANO)
    assert len(await notices(runtime)) == 2
    await set_(low_balance=20 * NANO, credit_limit=30 * NANO)
    await set_(credit_limit=5 * NANO)
    assert (await notices(runtime))[2:] == [("credit.low", "15")], "less may be owed: that is less to spend"
    assert code(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"low_balance": -1}))) == "invalid"
    assert len(await notices(runtime)) == 3


async def test_an_account_that_owes_is_not_closed(runtime: Runtime) -> None:
    await funded(runtime, "1")
    receipt(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"credit_limit": 5 * NANO})))
    receipt(await credit.adjust(runtime, LAB, -3 * NANO, actor="user:test", reason="on credit"))
    owing = refusal(await credit.put_account(runtime, PutAccount(whose=LAB, changes={"status": "closed"})))
    assert owing.message == "account default owes 2 credits: only an empty account can be closed"
    assert "bursar credit adjust 2 --account default" in owing.hint


async def test_who_is_not_there_is_told_of_in_the_same_words_everywhere(runtime: Runtime) -> None:
    ghost = Owner("default", "ghost")
    expected = no_account(ghost)
    assert expected.hint == "A billing admin opens it: bursar credit open default/ghost"
    assert await credit.adjust(runtime, ghost, NANO, actor="user:test", reason="x") == expected
    assert await credit.refund(runtime, ghost, NANO, actor="user:test", reason="x") == expected
    assert await credit.open_lease(runtime, asking(owner=ghost)) == expected
    assert await credit.refund(runtime, LAB, NANO, actor="user:test", reason="x") == no_account(LAB)
    nowhere = refusal(await credit.top_up(runtime, Owner("nowhere"), NANO, actor="user:test"))
    assert (nowhere.message, nowhere.hint) == (
        'accounts "nowhere" not found', "Create the tenant first: bursar create tenant nowhere",
    )  # fmt: skip
