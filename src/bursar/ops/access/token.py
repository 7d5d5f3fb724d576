"""Tokens: create, revoke and consume them, and make the administrator's first token before the first request.

A token reads `bsr_<id>_<secret>`. The id finds the row; of the secret only the SHA-256 is stored, which is enough
because it is 32 random bytes and not a password that somebody chose.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from bursar.core.objects.approval import QUOTA_GATE
from bursar.core.values.access import EVERY, Role, identity_fault
from bursar.core.values.refusal import Refusal, invalid
from bursar.ops.access.audit import token_note
from bursar.store.access import token as store
from bursar.store.access.token import TokenRecord
from bursar.store.db.database import Connection
from bursar.store.objects.change import save_notes

TTL_SECONDS_MAX = 10 * 365 * 24 * 3600
QUOTA_SERVICE = "quota-service"  # the user of the quota service's token
SERVICE_TOKEN_SECONDS = 24 * 3600
_STARTER = "system:start"

_ID_BYTES = 6
_SECRET_BYTES = 32
_TEXT = re.compile(r"bsr_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", re.ASCII)
_FILE_CHARS_MAX = 256
_FILE_HINT = "name a file that the server owns, in a directory that it may write to"


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as it was presented: its id, and the hash of its secret. The secret itself is not kept."""

    id: str
    hash: bytes = field(repr=False)


class TokenFileError(Exception):
    """A token cannot be read from or written to its file; the message says what to do."""


async def create_token(
    db: Connection,
    *,
    role: Role,
    tenant: str = "",
    tenant_uid: str = "",
    user: str = "",
    node: str = "",
    ttl_seconds: int | None = None,
    single_use: bool = False,
    tenants: Collection[str] = (),
    gates: Collection[str] = (),
    created_by: str,
    now: datetime,
) -> tuple[TokenRecord, str] | Refusal:
    """Create a token and return it with its text, which is shown only this once.

    A tenant's token is valid while the tenant with this uid exists.
    """
    if fault := _fault(role, tenant, user, node, ttl_seconds, single_use):
        return invalid(f"invalid token request: {fault}")
    token_id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
    record = TokenRecord(
        id=token_id,
        hash=_digest(secret),
        role=role,
        tenant=tenant,
        tenant_uid=tenant_uid,
        # A token without a user gets a name of its own, so that its actions can be traced to it.
        user=user or (node if role is Role.NODE else f"{role}-{token_id}"),
        node=node,
        single_use=single_use,
        created_at=now,
        created_by=created_by,
        expires_at=None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
        tenants=tuple(tenants),
        gates=tuple(gates),
    )
    async with db.transaction():
        await store.save_token(db, record)
        await save_notes(db, [token_note(record, "ADDED", "create", created_by)])
    return record, f"bsr_{token_id}_{secret}"


def _fault(role: Role, tenant: str, user: str, node: str, ttl_seconds: int | None, single_use: bool) -> str:
    if ttl_seconds is not None and not 0 < ttl_seconds <= TTL_SECONDS_MAX:
        return f"its time to live must be between 1 and {TTL_SECONDS_MAX} seconds"
    if single_use and role is not Role.NODE:
        return "single use is only for bootstrap tokens, with which nodes join"
    if "/" in user:
        return "the user's name must not contain a slash, because users are recorded as TENANT/USER"
    return identity_fault(role, user=user, tenant=tenant, node=node)


async def revoke_token(db: Connection, token_id: str, now: datetime, *, by: str) -> TokenRecord | None:
    """Revoke a token for ever; None if there is none with this id. A token that was revoked before stays as it is, and
    the audit log has one line.

    Other processes drop it when their cache entry expires; for this one see `Authenticator.forget`.
    """
    async with db.transaction():
        revoked = await store.save_revoked(db, token_id, now, by)
        if revoked is not None:
            await save_notes(db, [token_note(revoked, "DELETED", "revoke", by)])
            return revoked
    return (await store.load_tokens(db, [token_id])).get(token_id)


async def consume_token(db: Connection, token_id: str, now: datetime, key: bytes | None = None) -> bool:
    """Consume a bootstrap token before the enrolment; of two attempts, one succeeds. `key` is the fingerprint of the
    key that it is used for, if any."""
    return await store.save_used(db, token_id, now, key)


async def is_used_for(db: Connection, token_id: str, now: datetime, key: bytes | None) -> bool:
    """Whether a consumed token may be used again: with the same key, because the answer may have been lost."""
    return key is not None and await store.load_used_for(db, token_id, now, key)


async def restore_token(db: Connection, token_id: str) -> None:
    """Make a bootstrap token usable again, because the enrolment was refused."""
    await store.save_unused(db, token_id)


async def find_tokens(db: Connection, token_ids: Collection[str]) -> dict[str, TokenRecord]:
    """The tokens with these ids, by id; unknown ids are left out."""
    return await store.load_tokens(db, token_ids)


async def list_tokens(db: Connection, tenants: Collection[str] | None = None) -> list[TokenRecord]:
    """The tokens of these tenants, or of all."""
    return await store.list_tokens(db, tenants)


def parse_token(text: str) -> TokenText | None:
    """Parse a presented token; None if it is not of the form of a token."""
    match = _TEXT.fullmatch(text)
    return TokenText(match[1], _digest(match[2])) if match else None


def is_token_of(record: TokenRecord, presented: TokenText) -> bool:
    return hmac.compare_digest(record.hash, presented.hash)


def token_death(record: TokenRecord, now: datetime) -> str:
    """Why a token is no longer valid, as a sentence; empty while it is. A token that was consumed for a key remains
    valid for that key, which is compared where it is consumed."""
    if record.revoked_at is not None:
        return f"the token was revoked at {_utc(record.revoked_at)}"
    if record.used_at is not None and record.used_key is None:
        return token_use(record.used_at)
    if record.expires_at is not None and record.expires_at <= now:
        return f"the token expired at {_utc(record.expires_at)}"
    if not record.lives:
        return "the token's tenant was deleted"
    return ""


def token_use(at: datetime) -> str:
    return f"the token was for a single use, and was used at {_utc(at)}"


async def ensure_admin_token(db: Connection, path: Path | None, now: datetime) -> str | None:
    """Make sure that there is an administrator's token, and return it if a new one had to be created.

    Without a path, one is created only if there has never been any; the caller shows it. With a path, the file holds a
    valid administrator's token when this returns: the one it had, else a new one.
    """
    async with db.transaction():
        await store.lock_tokens(db)
        if path is None:
            wanted = not await store.load_role_exists(db, Role.SYSTEM_ADMIN)
        else:
            wanted = not await _holds_admin_token(db, path, now)
        if not wanted:
            return None
        made = await create_token(db, role=Role.SYSTEM_ADMIN, user="admin", created_by=_STARTER, now=now)
        assert not isinstance(made, Refusal), made
        if path is not None:
            # Before the commit: an invalid token in a file is replaced at the next start; a token in no file is lost.
            _write_secret(path, made[1] + "\n")
        return made[1]


async def _holds_admin_token(db: Connection, path: Path, now: datetime) -> bool:
    presented = _read_token(path)
    if presented is None:
        return False
    record = (await store.load_tokens(db, [presented.id])).get(presented.id)
    if record is None or not is_token_of(record, presented):
        return False
    return record.role is Role.SYSTEM_ADMIN and not token_death(record, now)


async def renew_service_token(db: Connection, path: Path, now: datetime, *, owner: tuple[int, int] | None) -> None:
    """Write a new token of the quota service to its file, which belongs to `owner` (uid, gid), and revoke the token
    that the file had. It expires, so that one which is left behind is of no use for long."""
    before = _read_token(path)
    async with db.transaction():
        made = await create_token(
            db, role=Role.APPROVER, user=QUOTA_SERVICE, tenants=(EVERY,), gates=(QUOTA_GATE,), created_by=_STARTER,
            now=now, ttl_seconds=SERVICE_TOKEN_SECONDS,
        )  # fmt: skip
        assert not isinstance(made, Refusal), made
        record = (await store.load_tokens(db, [before.id])).get(before.id) if before is not None else None
        if record is not None and before is not None and record.user == QUOTA_SERVICE and is_token_of(record, before):
            await revoke_token(db, record.id, now, by=_STARTER)
        _write_secret(path, made[1] + "\n", owner)


def _read_token(path: Path) -> TokenText | None:
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(_FILE_CHARS_MAX)
        path.chmod(0o600)
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise TokenFileError(f"cannot use {path} for a token: {error.strerror}; {_FILE_HINT}") from error
    return parse_token(text.strip())


def _write_secret(path: Path, text: str, owner: tuple[int, int] | None = None) -> None:
    """Write the file atomically, readable only by its owner from the first byte on."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if owner is not None:
                os.fchown(file.fileno(), *owner)
        beside.replace(path)
    except OSError as error:
        raise TokenFileError(f"cannot write a token to {path}: {error.strerror}; {_FILE_HINT}") from error
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _utc(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
