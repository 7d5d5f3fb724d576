"""What is granted to nodes, signed: one JWT per node and beat, with keys that are made here and change now and then.

A token says for how long each lease of the node is paid, counted from when the beat that it answers was sent: lengths
and no times, so nobody's clock matters. It names its node, the agent's own word for the stream (`nonce`) and the number
of the beat, so it is good for one answer to one beat, and for nothing else.

The youngest key signs. When a new one is made, the older ones are believed for a while longer: whoever knows the keys
of a moment ago still believes what was signed then. Each agent is told the keys on the stream that the tokens come on;
everybody else finds them at /.well-known/jwks.json.
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

from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.command import REUSED
from bursar.store.db import idempotency as request_store
from bursar.store.db.database import AWAY, Connection, Database
from bursar.store.db.idempotency import IdempotencyKey
from bursar.store.nodes import signing as store
from bursar.store.nodes.signing import KeyRecord

log = structlog.get_logger()

ALGORITHM = "Ed25519"
ISSUER = "bursar"
# Nothing else that anybody signs with these keys can be taken for a token of leases.
TYPE = "bursar-lease+jwt"
RELOAD_SECONDS = 5.0
OVERLAP_SECONDS = 24 * 3600.0
DAY_SECONDS = 86_400.0

_encode = msgspec.json.encode


class Granted(Struct, frozen=True):
    """A lease that is paid for so many seconds from when the beat was sent; whether they are its last. `rate` is in
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
    """The keys that are believed now, oldest first."""

    keys: tuple[OKPKey, ...] = field(repr=False)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(str(key.kid) for key in self.keys)

    def public_keys(self) -> dict[str, bytes]:
        """The 32 bytes of each public half, by the key's id."""
        return {str(key.kid): key.public_key.public_bytes_raw() for key in self.keys}

    def jwks(self) -> dict[str, Any]:
        """For everybody: RFC 7517."""
        return {"keys": [_shown(key) for key in self.keys]}

    def seal(self, purpose: str, message: bytes) -> bytes:
        """By which we know again what we gave to somebody to bring back: HMAC-SHA256, with the newest key."""
        return _seal(self.keys[-1], purpose, message)

    def is_sealed(self, purpose: str, message: bytes, seal: bytes) -> bool:
        return any(hmac.compare_digest(_seal(key, purpose, message), seal) for key in self.keys)

    def sign(self, node: str, nonce: str, seq: int, leases: Iterable[Granted]) -> str:
        claims = _Claims(ISSUER, node, os.urandom(16).hex(), nonce, seq, tuple(leases))
        return _compact(self.keys[-1], claims)


def _seal(key: OKPKey, purpose: str, message: bytes) -> bytes:
    private = key.private_key
    assert isinstance(private, Ed25519PrivateKey), "only such keys are made here"
    # For each purpose a key of its own: what is sealed for one is worth nothing for another.
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
    """RFC 7515, by hand: there is one of these for every beat, and what a library does around the signature costs as
    much as the signature."""
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
    """The ring of this process: read again every few seconds, and used as it was while the database is away."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._ring: Ring | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def ring(self) -> Ring:
        """The keys that are believed; the first is made by whoever needs one. Raises what the database raises where
        none was ever read."""
        if self._ring is not None and self._clock() - self._read_at < RELOAD_SECONDS:
            return self._ring
        async with self._reading:
            # Those who waited here while another looked find that it has just been done.
            if self._ring is None or self._clock() - self._read_at >= RELOAD_SECONDS:
                await self._read()
        assert self._ring is not None, "reading it has not failed"
        return self._ring

    def forget(self) -> None:
        """This process has changed the keys: who asks next sees the change."""
        self._read_at = float("-inf")

    async def _read(self) -> None:
        try:
            async with self._database.reader() as db:
                self._ring = _ring(await store.load_believed(db) or await _make_first(db))
            self._read_at = self._clock()
        except AWAY as error:
            if self._ring is None:
                raise
            log.info("the signing keys could not be read again", error=repr(error))
            self._read_at = self._clock()


async def rotate(
    database: Database, *, by: str, overlap_seconds: float = OVERLAP_SECONDS, claim: IdempotencyKey | None = None
) -> Ring | Refusal:
    """Make the key that signs from now on. With an overlap of 0 the older ones are not believed any more: for keys that
    somebody may have stolen. Asked for again, it is not done again."""
    async with database.reader() as db, db.transaction():
        if claim is not None and not await request_store.claim(db, [claim]):
            remembered = (await request_store.load(db, [claim.key]))[claim.key]
            same = remembered.fingerprint == claim.fingerprint
            return _ring(await store.load_believed(db)) if same else REUSED
        await store.lock(db)
        return await _rotate(db, by, overlap_seconds)


async def rotate_old(database: Database, days: int, *, by: str) -> bool:
    """Rotate if the youngest key is older than that, and remove those whose time is over; whether there is a new one.
    However many ask at once, there is one."""
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
    log.info("a new key signs what is granted to nodes", key=key_id, by=by)
    return _ring(await store.load_believed(db))


async def _make_first(db: Connection) -> list[KeyRecord]:
    async with db.transaction():
        await store.lock(db)
        # While we waited for the lock another may have been here.
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
    assert "d" not in shown, "the private half is shown to nobody"
    return shown
