"""Signed leases: one JWT per node and heartbeat, and the rotation of the keys that sign them.

A token gives the paid time of each lease of the node, counted from when the heartbeat was sent: durations, no absolute
times, so clocks need not agree. It names its node, the agent's `nonce` of the stream and the number of the heartbeat,
so it is valid as the answer to that heartbeat only.

The newest key signs. After a rotation the older keys stay valid for a while, for verifiers that do not have the new one
yet. Agents get the keys on the stream that the tokens come on; other verifiers read /.well-known/jwks.json.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc.jwk import OKPKey
from msgspec import Struct

from bursar.commands.command import REUSED
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Refusal
from bursar.store.db import idempotency as request_store
from bursar.store.db.database import AWAY, Connection, Database
from bursar.store.nodes import signing as store
from bursar.store.nodes.signing import KeyRecord

log = structlog.get_logger()

ALGORITHM = "Ed25519"
ISSUER = "bursar"
# The type keeps other JWTs signed with these keys from being accepted as lease tokens.
TYPE = "bursar-lease+jwt"
RELOAD_SECONDS = 5.0
OVERLAP_SECONDS = 24 * 3600.0
DAY_SECONDS = 86_400.0

_encode = msgspec.json.encode


class Granted(Struct, frozen=True):
    """A lease that is paid for `seconds` from when the heartbeat was sent, and whether these are its last. `rate` is in
    credits a second, and `expires_at` in seconds since 1970, by the ledger's clock."""

    id: str
    uid: str
    epoch: int
    seconds: float
    rate: str = "0"
    expires_at: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class Ring:
    """The key ring: the valid keys, oldest first."""

    keys: tuple[OKPKey, ...] = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(str(key.kid) for key in self.keys)

    def public_keys(self) -> dict[str, bytes]:
        """The 32 bytes of each public key, by the key's id."""
        return {str(key.kid): key.public_key.public_bytes_raw() for key in self.keys}

    def jwks(self) -> dict[str, Any]:
        """The public key set (RFC 7517)."""
        return {"keys": [_shown(key) for key in self.keys]}

    def seal(self, purpose: str, message: bytes) -> bytes:
        """Authenticate data that a client gets and sends back: HMAC-SHA256, with the newest key."""
        return _seal(self.keys[-1], purpose, message)

    def is_sealed(self, purpose: str, message: bytes, seal: bytes) -> bool:
        return any(hmac.compare_digest(_seal(key, purpose, message), seal) for key in self.keys)

    def sign(self, node: str, nonce: str, seq: int, leases: Iterable[Granted]) -> str:
        claims = _Claims(ISSUER, node, os.urandom(16).hex(), nonce, seq, tuple(leases))
        return _compact(self.keys[-1], claims)


def _seal(key: OKPKey, purpose: str, message: bytes) -> bytes:
    private = key.private_key
    assert isinstance(private, Ed25519PrivateKey), "only such keys are made here"
    # Each purpose has a derived key of its own, so that a seal for one is invalid for another.
    secret = hmac.digest(private.private_bytes_raw(), f"bursar {purpose}".encode(), "sha256")
    return hmac.digest(secret, message, "sha256")


class _Claims(Struct, frozen=True):
    iss: str
    aud: str
    jti: str
    nonce: str
    seq: int
    leases: tuple[Granted, ...]


def _compact(key: OKPKey, claims: _Claims) -> str:
    """Encode a JWS (RFC 7515) by hand: every heartbeat needs one, and a library's overhead costs as much as the
    signature."""
    private = key.private_key
    assert isinstance(private, Ed25519PrivateKey), "only such keys are made here"
    message = _protected(str(key.kid)) + b"." + _base64(_encode(claims))
    return (message + b"." + _base64(private.sign(message))).decode("ascii")


@lru_cache(16)
def _protected(key_id: str) -> bytes:
    return _base64(_encode({"alg": ALGORITHM, "kid": key_id, "typ": TYPE}))


def _base64(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


class Signing:
    """The key ring of this process: reloaded every few seconds, and kept while the database is away."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._ring: Ring | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def ring(self) -> Ring:
        """The valid keys; the first key is created on demand. Database errors are raised only if none was ever
        read."""
        if self._ring is not None and self._clock() - self._read_at < RELOAD_SECONDS:
            return self._ring
        async with self._reading:
            # Another task may have reloaded it while this one waited for the lock.
            if self._ring is None or self._clock() - self._read_at >= RELOAD_SECONDS:
                await self._read()
        assert self._ring is not None, "_read has set it, or raised"
        return self._ring

    def forget(self) -> None:
        """Reload the keys at the next use, because this process changed them."""
        self._read_at = float("-inf")

    async def _read(self) -> None:
        try:
            async with self._database.reader() as db:
                self._ring = _ring(await store.load_believed(db) or await _make_first(db))
            self._read_at = self._clock()
        except AWAY as error:
            if self._ring is None:
                raise
            log.info(
                "signing_keys_not_reloaded", message="the lease-signing keys could not be reloaded", error=repr(error)
            )
            self._read_at = self._clock()


async def rotate(
    database: Database, *, by: str, overlap_seconds: float = OVERLAP_SECONDS,
    idempotency_key: IdempotencyKey | None = None,
) -> Ring | Refusal:  # fmt: skip
    """Rotate: create the key that signs from now on. An overlap of 0 invalidates the older keys at once, for keys that
    may be compromised. With an `idempotency_key`, a repeated request does not rotate again."""
    async with database.reader() as db, db.transaction():
        if idempotency_key is not None and not await request_store.claim(db, [idempotency_key]):
            remembered = (await request_store.load(db, [idempotency_key.key]))[idempotency_key.key]
            same = remembered.fingerprint == idempotency_key.fingerprint
            return _ring(await store.load_believed(db)) if same else REUSED
        await store.lock(db)
        return await _rotate(db, by, overlap_seconds)


async def rotate_old(database: Database, days: int, *, by: str) -> bool:
    """Rotate if the newest key is older than `days`, and delete retired keys; whether a new one was created. Concurrent
    calls create only one."""
    async with database.reader() as db, db.transaction():
        await store.lock(db)
        await store.forget_retired(db)
        believed = await store.load_believed(db)
        if believed and believed[-1].age_seconds < days * DAY_SECONDS:
            return False
        await _rotate(db, by, OVERLAP_SECONDS)
        return True


async def _rotate(db: Connection, by: str, overlap_seconds: float) -> Ring:
    key = OKPKey.generate_key("Ed25519")
    key_id = key.thumbprint()
    await store.save(db, key_id, key.as_pem(private=True).decode(), by)
    await store.retire_others(db, key_id, overlap_seconds)
    log.info("signing_key_created", message="created a new lease-signing key", key=key_id, by=by)
    return _ring(await store.load_believed(db))


async def _make_first(db: Connection) -> list[KeyRecord]:
    async with db.transaction():
        await store.lock(db)
        # Another process may have created it while this one waited for the lock.
        if not await store.load_believed(db):
            await _rotate(db, "system:signing", OVERLAP_SECONDS)
        return await store.load_believed(db)


def _ring(records: Sequence[KeyRecord]) -> Ring:
    return Ring(tuple(_key(one.id, one.private_key) for one in records))


@lru_cache(16)
def _key(key_id: str, private_key: str) -> OKPKey:
    return OKPKey.import_key(private_key, {"kid": key_id, "use": "sig", "alg": ALGORITHM})


def _shown(key: OKPKey) -> dict[str, Any]:
    shown: dict[str, Any] = key.as_dict(private=False)
    assert "d" not in shown, "the private key is never shown"
    return shown
