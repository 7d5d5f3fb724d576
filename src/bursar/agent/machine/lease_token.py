"""Verification of lease tokens: paid time counts only as far as a valid token signs it.

A token is valid if it is signed with Ed25519 by a key that was announced on this stream, and if its audience is this
node, its nonce is that of the stream, and its `seq` is that of the answered heartbeat. Answers come in order, so a
replayed or late token is refused. Tokens hold durations that count from the time the heartbeat was sent, so clocks need
not agree.

A grant that shortens needs no token: an untrusted stream may stop work, but never prolong it.
"""

from __future__ import annotations

import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from joserfc import jws, jwt
from joserfc.jwk import OKPKey

from bursar.agent.machine.types import LeaseGrant, Place

ALGORITHM = "Ed25519"
ISSUER = "bursar"
TYPE = "bursar-lease+jwt"
TOKEN_CHARS_MAX = 1 << 20
KEY_BYTES = 32

_REGISTRY = jws.JWSRegistry(algorithms=[ALGORITHM])


class SignedLease(msgspec.Struct, frozen=True):
    id: str
    uid: str
    epoch: int
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    final: bool

    @property
    def place(self) -> Place:
        return self.uid, self.epoch


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    aud: str
    jti: str
    nonce: str
    seq: int
    leases: tuple[SignedLease, ...]


@dataclass(frozen=True, slots=True)
class Distrusted:
    """The token is invalid, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Believed:
    """The grants that count, the signed leases among them, and why the rest does not count."""

    grants: dict[Place, LeaseGrant]
    signed: dict[Place, SignedLease]
    why: str = ""


class Trust:
    """The trusted keys, the nonce and the sequence number of the current stream."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._nonce = ""
        self._seq = 0  # of the last valid token
        self._keys: dict[str, OKPKey] = {}

    def begin(self) -> str:
        """Begin a new stream, on which keys and tokens of earlier streams are void; returns its nonce."""
        self._nonce, self._seq, self._keys = uuid.uuid4().hex, 0, {}
        return self._nonce

    def learn(self, keys: Mapping[str, bytes]) -> None:
        """Trust exactly these keys from now on; an empty set changes nothing."""
        if keys:
            self._keys = {key_id: _key(key_id, raw) for key_id, raw in keys.items() if len(raw) == KEY_BYTES}

    def believe(self, leases: Mapping[Place, LeaseGrant], token: str, seq: int) -> Believed:
        """The grants of an answer, each at most as long as the token signs. Grants of zero seconds need no token."""
        prolonging = {place for place, grant in leases.items() if grant.seconds > 0}
        verified = self.verify(token, seq) if prolonging else {}
        signed, why = ({}, verified.why) if isinstance(verified, Distrusted) else (verified, "")
        grants: dict[Place, LeaseGrant] = {}
        for place, grant in leases.items():
            if place not in prolonging or _covers(signed.get(place), grant):
                grants[place] = grant
                continue
            why = why or f"the grant to {place[0]} is longer than the token signs"
            if grant.final:
                grants[place] = replace(grant, seconds=0.0)
        kept = {place: signed[place] for place, grant in grants.items() if grant.seconds > 0}
        return Believed(grants, kept, why)

    def verify(self, token: str, seq: int) -> dict[Place, SignedLease] | Distrusted:
        """The signed leases of the answer to heartbeat `seq`, by placement."""
        if not token:
            return Distrusted("the answer has no token")
        if len(token) > TOKEN_CHARS_MAX:
            return Distrusted(f"the token is longer than {TOKEN_CHARS_MAX} characters")
        claims = self._claims(token)
        if isinstance(claims, Distrusted):
            return claims
        if fault := self._fault(claims, seq):
            return Distrusted(fault)
        leases = {one.place: one for one in claims.leases}
        if len(leases) != len(claims.leases):
            return Distrusted("the token names a placement twice")
        self._seq = seq
        return leases

    def _claims(self, token: str) -> _Claims | Distrusted:
        header = _header(token)
        if header is None:
            return Distrusted("the token is not well-formed")
        if header.get("alg") != ALGORITHM or header.get("typ") != TYPE:
            return Distrusted(f"the token is not a {TYPE} with algorithm {ALGORITHM}")
        key = self._keys.get(str(header.get("kid")))
        if key is None:
            return Distrusted(f"the token is signed with a key that is not trusted: {str(header.get('kid'))[:64]!r}")
        try:
            return msgspec.convert(jwt.decode(token, key, registry=_REGISTRY).claims, _Claims)
        except msgspec.ValidationError as error:
            return Distrusted(f"the token's claims are invalid: {error}")
        except Exception:
            # A hostile token may make the parser raise anything.
            return Distrusted("the token's signature does not match")

    def _fault(self, claims: _Claims, seq: int) -> str:
        if claims.iss != ISSUER:
            return f"the token was issued by {claims.iss[:64]!r}"
        if claims.aud != self._node:
            return f"the token is for node {claims.aud[:64]!r}"
        if claims.nonce != self._nonce:
            return "the token is of another stream"
        if claims.seq != seq:
            return f"the token is for heartbeat {claims.seq}, but the answer is to heartbeat {seq}"
        if seq <= self._seq:
            return f"the token is a replay: heartbeat {self._seq} was answered already"
        return ""


def _covers(lease: SignedLease | None, grant: LeaseGrant) -> bool:
    return lease is not None and grant.seconds <= lease.seconds and (bool(grant.final) or not lease.final)


def _header(token: str) -> Mapping[str, object] | None:
    try:
        header = jws.extract_compact(token.encode("ascii"), registry=_REGISTRY).headers()
    except Exception:
        # As above.
        return None
    return header if isinstance(header, dict) else None


def _key(key_id: str, raw: bytes) -> OKPKey:
    x = urlsafe_b64encode(raw).rstrip(b"=").decode()
    return OKPKey.import_key({"kty": "OKP", "crv": ALGORITHM, "x": x, "kid": key_id, "use": "sig", "alg": ALGORITHM})
