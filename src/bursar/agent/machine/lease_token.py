"""What is granted counts only as far as it is signed: how an agent verifies the token of an answer.

A token is believed if one of the keys that this stream was told has signed it, with the one algorithm there is, and if
it was made for this node, for this stream, and for the very beat that is answered. Beats are answered in their order,
so a token that comes again, or late, is refused. No clock is asked: a token holds lengths, which are counted from when
its beat was sent.

Whatever shortens is believed without a token: a stream that is not to be trusted may stop work, and never prolong it.
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
    """Why a token is not believed, for people."""

    why: str


@dataclass(frozen=True, slots=True)
class Believed:
    """What counts of what was granted, what of it is signed, and why the rest does not count."""

    grants: dict[Place, LeaseGrant]
    signed: dict[Place, SignedLease]
    why: str = ""


class Trust:
    """What one agent believes, stream after stream."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._nonce = ""
        self._seq = 0  # of the last token that was believed
        self._keys: dict[str, OKPKey] = {}

    def begin(self) -> str:
        """A new stream: nothing that was said on another counts on it. The word by which its tokens are known."""
        self._nonce, self._seq, self._keys = uuid.uuid4().hex, 0, {}
        return self._nonce

    def learn(self, keys: Mapping[str, bytes]) -> None:
        """These are believed from now on, and no others. Telling none changes nothing."""
        if keys:
            self._keys = {key_id: _key(key_id, raw) for key_id, raw in keys.items() if len(raw) == KEY_BYTES}

    def believe(self, leases: Mapping[Place, LeaseGrant], token: str, seq: int) -> Believed:
        """Of what an answer grants, that which is signed, and never longer than it is signed. That there is no more is
        believed in any case."""
        prolonging = {place for place, grant in leases.items() if grant.seconds > 0}
        verified = self.verify(token, seq) if prolonging else {}
        signed, why = ({}, verified.why) if isinstance(verified, Distrusted) else (verified, "")
        grants: dict[Place, LeaseGrant] = {}
        for place, grant in leases.items():
            if place not in prolonging or _covers(signed.get(place), grant):
                grants[place] = grant
                continue
            why = why or f"more is granted to {place[0]} than is signed"
            if grant.final:
                grants[place] = replace(grant, seconds=0.0)
        kept = {place: signed[place] for place, grant in grants.items() if grant.seconds > 0}
        return Believed(grants, kept, why)

    def verify(self, token: str, seq: int) -> dict[Place, SignedLease] | Distrusted:
        """What is signed in the answer to this beat, by placement."""
        if not token:
            return Distrusted("there is no token")
        if len(token) > TOKEN_CHARS_MAX:
            return Distrusted("the token is too long to be read")
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
            return Distrusted(f"the token is signed with a key that is not believed: {str(header.get('kid'))[:64]!r}")
        try:
            return msgspec.convert(jwt.decode(token, key, registry=_REGISTRY).claims, _Claims)
        except msgspec.ValidationError as error:
            return Distrusted(f"the token does not say what it must: {error}")
        except Exception:
            # Whatever a hostile text makes the parser raise: nobody knows who wrote it.
            return Distrusted("the token's signature does not match")

    def _fault(self, claims: _Claims, seq: int) -> str:
        if claims.iss != ISSUER:
            return f"the token was issued by {claims.iss[:64]!r}"
        if claims.aud != self._node:
            return f"the token is for node {claims.aud[:64]!r}"
        if claims.nonce != self._nonce:
            return "the token is of another stream"
        if claims.seq != seq:
            return f"the token is of beat {claims.seq}, and beat {seq} is answered"
        if seq <= self._seq:
            return f"the token came before: beat {self._seq} was answered already"
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
