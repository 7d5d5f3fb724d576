"""Tokens on a real PostgreSQL."""

import asyncio
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bursar.core.values.access import Role
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.access.token import (
    TTL_SECONDS_MAX,
    TokenFileError,
    consume_token,
    create_token,
    ensure_admin_token,
    find_tokens,
    is_token_of,
    list_tokens,
    parse_token,
    revoke_token,
    token_death,
)
from bursar.store.access.token import TokenRecord
from bursar.store.db.database import Connection, connect
from support.runtime.tokens import ML, ML_UID, put_tenant

NOW = datetime(2031, 5, 1, 12, 0, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


@pytest.fixture(autouse=True)
async def _tenant(db: Connection) -> None:
    await put_tenant(db)


async def _create(db: Connection, **wanted: Any) -> tuple[TokenRecord, str]:
    usual = {"role": Role.USER, "tenant": ML, "tenant_uid": ML_UID, "created_by": "user:root", "now": NOW}
    made = await create_token(db, **{**usual, **wanted})
    assert not isinstance(made, Refusal), made
    return made


async def _find(db: Connection, token_id: str) -> TokenRecord:
    return (await find_tokens(db, [token_id]))[token_id]


async def test_a_token_reads_bsr_id_secret_and_finds_its_row(db: Connection) -> None:
    record, text = await _create(db, user="alice", ttl_seconds=60)
    assert re.fullmatch(r"bsr_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", text)
    presented = parse_token(text)
    assert presented is not None
    found = await _find(db, presented.id)
    assert found == record
    assert is_token_of(found, presented)
    assert (found.user, found.role, found.tenant) == ("alice", Role.USER, "ml")
    assert found.expires_at == NOW + timedelta(seconds=60)


async def test_the_secret_is_nowhere_in_the_database_and_in_no_repr(db: Connection) -> None:
    record, text = await _create(db)
    secret = text.split("_", 2)[2]
    stored = await db.fetchval("SELECT token::text FROM token")
    for shown in (stored, repr(record), repr(parse_token(text))):
        assert secret not in shown
        assert secret.encode().hex() not in shown
    assert record.hash.hex() not in repr(record)


async def test_another_secret_with_the_same_id_is_not_the_token(db: Connection) -> None:
    record, _ = await _create(db)
    _, other = await _create(db)
    forged = parse_token(f"bsr_{record.id}_{other.split('_', 2)[2]}")
    assert forged is not None
    assert not is_token_of(record, forged)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bsr_",
        "bsr_0123456789ab_",
        "bsr_0123456789AB_" + "a" * 43,
        "bsr_0123456789ab_" + "a" * 42,
        "bsr_0123456789ab_" + "a" * 44,
        "bsr_0123456789ab_" + "a" * 43 + "\n",
        "bsr_0123456789a\u0661_" + "a" * 43,
    ],
)
def test_texts_that_cannot_be_tokens(text: str) -> None:
    assert parse_token(text) is None


async def test_a_token_for_nobody_in_particular_can_be_traced_to_itself(db: Connection) -> None:
    record, _ = await _create(db)
    assert record.user == f"user-{record.id}"
    record, _ = await _create(db, role=Role.NODE, tenant="", node="gpu-1")
    assert record.user == "gpu-1"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"tenant": ""}, "role user belongs to a tenant"),
        ({"role": Role.NODE, "tenant": ""}, "role node belongs to one node"),
        ({"ttl_seconds": 0}, "time to live"),
        ({"ttl_seconds": TTL_SECONDS_MAX + 1}, "time to live"),
        ({"single_use": True}, "single use is only for bootstrap tokens, with which nodes join"),
        ({"user": "a\x00b"}, "printable"),
    ],
)
async def test_tokens_that_are_refused_leave_nothing_behind(db: Connection, wanted: dict[str, Any], said: str) -> None:
    made = await create_token(db, **{"role": Role.USER, "tenant": "ml", "created_by": "x", "now": NOW, **wanted})
    assert isinstance(made, Refusal)
    assert made.code is Code.INVALID
    assert said in made.message
    assert await list_tokens(db) == []


async def test_a_token_dies_by_time_by_revocation_or_by_use(db: Connection) -> None:
    mortal, _ = await _create(db, ttl_seconds=60)
    assert token_death(mortal, NOW + timedelta(seconds=59)) == ""
    assert token_death(mortal, NOW + timedelta(seconds=60)) == "the token expired at 2031-05-01T12:01:00Z"
    eternal, _ = await _create(db)
    assert token_death(eternal, NOW + timedelta(days=4000)) == ""
    revoked = await revoke_token(db, eternal.id, NOW, by="user:test")
    assert revoked is not None
    assert token_death(revoked, NOW) == "the token was revoked at 2031-05-01T12:00:00Z"
    once, _ = await _create(db, role=Role.NODE, tenant="", node="gpu-1", single_use=True)
    assert await consume_token(db, once.id, LATER)
    assert "used at 2031-05-01T13:00:00Z" in token_death(await _find(db, once.id), LATER)


async def test_the_first_revocation_stands_and_an_unknown_token_is_none(db: Connection) -> None:
    record, _ = await _create(db)
    await revoke_token(db, record.id, NOW, by="user:test")
    again = await revoke_token(db, record.id, LATER, by="user:test")
    assert again is not None
    assert again.revoked_at == NOW
    assert await revoke_token(db, "000000000000", NOW, by="user:test") is None


async def test_tokens_are_listed_by_tenant(db: Connection) -> None:
    for minute, tenant in enumerate(("ml", "ml-vision", "physics")):
        await _create(db, tenant=tenant, now=NOW + timedelta(minutes=minute))
    assert [record.tenant for record in await list_tokens(db, {"ml", "ml-vision"})] == ["ml", "ml-vision"]
    assert await list_tokens(db, []) == []
    assert len(await list_tokens(db)) == 3


async def test_of_twenty_who_use_a_single_use_token_at_once_one_succeeds(db: Connection, database_url: str) -> None:
    once, _ = await _create(db, role=Role.NODE, tenant="", node="gpu-1", single_use=True)

    async def use() -> bool:
        own = await connect(database_url)
        try:
            async with own.transaction():
                used = await consume_token(own, once.id, NOW)
                await asyncio.sleep(0.01)
            return used
        finally:
            await own.close()

    assert sum(await asyncio.gather(*(use() for _ in range(20)))) == 1


async def test_a_registration_that_fails_gives_the_token_back(db: Connection) -> None:
    once, _ = await _create(db, role=Role.NODE, tenant="", node="gpu-1", single_use=True)
    registration = db.transaction()
    await registration.start()
    assert await consume_token(db, once.id, NOW)
    await registration.rollback()
    assert await consume_token(db, once.id, NOW)


async def test_what_is_dead_or_lasting_cannot_be_used_up(db: Connection) -> None:
    node: dict[str, Any] = {"role": Role.NODE, "tenant": "", "node": "gpu-1"}
    expired, _ = await _create(db, **node, single_use=True, ttl_seconds=60)
    revoked, _ = await _create(db, **node, single_use=True)
    await revoke_token(db, revoked.id, NOW, by="user:test")
    lasting, _ = await _create(db, **node)
    for record in (expired, revoked, lasting):
        assert not await consume_token(db, record.id, LATER)


async def test_the_first_start_makes_one_admin_token_and_the_second_none(db: Connection) -> None:
    text = await ensure_admin_token(db, None, NOW)
    assert text is not None
    assert parse_token(text) is not None
    assert await ensure_admin_token(db, None, LATER) is None
    assert [record.role for record in await list_tokens(db)] == [Role.SYSTEM_ADMIN]


async def test_the_admin_token_is_put_into_a_file_that_only_its_owner_reads(db: Connection, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    text = await ensure_admin_token(db, path, NOW)
    assert path.read_text() == f"{text}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["admin.token"]


async def test_a_living_token_in_the_file_is_kept_and_its_file_closed_to_others(db: Connection, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    await ensure_admin_token(db, path, NOW)
    kept = path.read_text()
    path.chmod(0o644)
    assert await ensure_admin_token(db, path, LATER) is None
    assert path.read_text() == kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_an_absent_file_is_filled_with_a_new_token(db: Connection, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    first = await ensure_admin_token(db, path, NOW)
    path.unlink()
    second = await ensure_admin_token(db, path, LATER)
    assert second not in {None, first}
    assert path.read_text() == f"{second}\n"


@pytest.mark.parametrize("content", ["", "nonsense", "bsr_0123456789ab_" + "a" * 43, "\u0661\n", "x" * 100_000])
async def test_a_file_without_a_living_admin_token_is_replaced(db: Connection, tmp_path: Path, content: str) -> None:
    path = tmp_path / "admin.token"
    path.write_text(content)
    text = await ensure_admin_token(db, path, NOW)
    assert text is not None
    assert path.read_text() == f"{text}\n"


async def test_a_revoked_token_and_one_of_a_lesser_role_are_replaced(db: Connection, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    first = await ensure_admin_token(db, path, NOW)
    presented = parse_token(first or "")
    assert presented is not None
    await revoke_token(db, presented.id, NOW, by="user:test")
    assert await ensure_admin_token(db, path, LATER) is not None
    _, lesser = await _create(db, user="alice")
    path.write_text(lesser)
    assert await ensure_admin_token(db, path, LATER) is not None
    assert path.read_text().strip() != lesser


async def test_servers_that_start_together_make_one_token(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "admin.token"

    async def start() -> str | None:
        own = await connect(database_url)
        try:
            return await ensure_admin_token(own, path, NOW)
        finally:
            await own.close()

    made = [text for text in await asyncio.gather(*(start() for _ in range(8))) if text]
    assert len(made) == 1
    assert path.read_text().strip() == made[0]


async def test_a_file_that_cannot_be_written_leaves_no_token_and_says_what_to_do(
    db: Connection, tmp_path: Path
) -> None:
    with pytest.raises(TokenFileError, match="name a file that the server owns"):
        await ensure_admin_token(db, tmp_path / "absent" / "admin.token", NOW)
    with pytest.raises(TokenFileError, match="Is a directory"):
        await ensure_admin_token(db, tmp_path, NOW)
    assert await list_tokens(db) == []
