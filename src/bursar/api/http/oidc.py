"""JWTs of an OIDC provider: verified against its published keys, and turned into an Identity.

Only signatures with a private key count: `none` and the HMAC algorithms are not in the list, and symmetric keys are
not taken from a key set, so that a public key cannot be used as an HMAC secret. The key set is kept while the
provider is away; it is read again when a token names an unknown key, at most every ten seconds, and periodically, so
that a key the provider withdrew is not trusted for ever.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import structlog
from joserfc import jws, jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, JoseError, MissingClaimError, SecurityWarning
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey

from bursar.api.http.oidc_settings import OidcSettings
from bursar.core.values.access import EVERY, OF_TENANTS, Identity, Role, identity_fault, unauthenticated
from bursar.core.values.refusal import Code, Refusal
from bursar.wire.shared.approval import gate_faults

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
LEEWAY_SECONDS = 30
REFRESH_UNKNOWN_SECONDS = 10.0
REFRESH_REGULAR_SECONDS = 300.0
# Without any key set no JWT can be verified, so the retries are more frequent.
REFRESH_EMPTY_SECONDS = 1.0

_FETCH_SECONDS_MAX = 5.0
_DOCUMENT_BYTES_MAX = 1024 * 1024

_log = structlog.get_logger(__name__)

# Providers put headers of their own beside the standard ones; those marked critical are still refused.
_REGISTRY = jws.JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)

SigningJwk = RSAKey | ECKey | OKPKey


@dataclass(frozen=True, slots=True)
class Verified:
    identity: Identity
    good_until: float  # epoch seconds
    issued_at: float | None = None
    # Whether the user's membership gives the tenant, and the role up to that of the identity.
    by_membership: bool = False


class KeysError(Exception):
    """The provider's keys cannot be read now; the message says which step failed."""


class Oidc:
    def __init__(
        self,
        settings: OidcSettings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._keys: list[SigningJwk] | None = None
        self._tried_at = float("-inf")
        self._refreshing = asyncio.Lock()
        self._background: asyncio.Task[None] | None = None

    async def verify(self, text: str) -> Verified | Refusal:
        """Verify a JWT; return its identity, or the reason why it is refused."""
        header = _header(text)
        if header is None:
            return unauthenticated("the token is not a well-formed JWT")
        if header.get("alg") not in ALGORITHMS:
            return unauthenticated(f"the JWT's algorithm is not accepted: it must be one of {', '.join(ALGORITHMS)}")
        keys = await self._keys_for(header.get("kid"))
        if self._keys is None:
            return Refusal(
                Code.UNAVAILABLE,
                "the OIDC provider's keys cannot be read now, so JWTs cannot be verified; try again shortly",
                retry_after_seconds=math.ceil(REFRESH_EMPTY_SECONDS),
            )
        claims = next((claims for key in keys if (claims := _signed_claims(text, key)) is not None), None)
        if claims is None:
            reason = "its signature does not match" if keys else "it is signed with a key the issuer does not publish"
            return unauthenticated(f"the JWT is not valid: {reason}")
        return self._check(claims)

    async def close(self) -> None:
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)

    # Claims.

    def _check(self, claims: dict[str, Any]) -> Verified | Refusal:
        settings = self._settings
        registry = jwt.JWTClaimsRegistry(
            now=int(self._clock()),
            leeway=LEEWAY_SECONDS,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "value": settings.audience},
            exp={"essential": True},
        )
        try:
            registry.validate(claims)
        except ExpiredTokenError:
            return unauthenticated(f"the JWT expired at {_time(claims['exp'])}")
        except MissingClaimError as error:
            return unauthenticated(f"the JWT lacks a required claim: {error.description}")
        except InvalidClaimError as error:
            return unauthenticated(
                f"the JWT is not for this server, or not yet or no longer valid: {error.description}"
            )
        member = self._is_member(claims)
        identity = self._member(claims) if member else self._identity(claims)
        if isinstance(identity, Refusal):
            return identity
        return Verified(identity, claims["exp"] + LEEWAY_SECONDS, claims.get("iat"), by_membership=member)

    def _is_member(self, claims: Mapping[str, Any]) -> bool:
        """Whether the claims leave the tenant open, and give no role beyond those of a tenant."""
        settings = self._settings
        role = _text(claims.get(settings.role_claim))
        return settings.tenant_claim not in claims and (settings.role_claim not in claims or role in OF_TENANTS)

    def _member(self, claims: Mapping[str, Any]) -> Identity | Refusal:
        """The user, with the role beyond which no membership goes."""
        user = self._user(claims)
        if isinstance(user, Refusal):
            return user
        if fault := identity_fault(Role.TENANT_ADMIN, user=user, tenant=EVERY, node=""):
            return unauthenticated(f"the JWT's claims do not fit: {fault}", _ASK)
        role = _text(claims.get(self._settings.role_claim))
        return Identity(user=user, role=Role(role) if role else Role.TENANT_ADMIN)

    def _user(self, claims: Mapping[str, Any]) -> str | Refusal:
        names = self._settings.user_claims
        user = next((value for name in names if (value := _text(claims.get(name)))), "")
        return user or unauthenticated(f"the JWT names no user: it has no claim {' or '.join(names)}", _ASK)

    def _identity(self, claims: Mapping[str, Any]) -> Identity | Refusal:
        settings = self._settings
        user = self._user(claims)
        if isinstance(user, Refusal):
            return user
        role_name = _text(claims.get(settings.role_claim))
        if not role_name:
            return unauthenticated(f"the JWT gives no role: the claim {settings.role_claim} is missing", _ASK)
        # Nodes authenticate with a key made on the node, never with a JWT of a provider.
        roles = [str(role) for role in Role if role is not Role.NODE]
        if role_name not in roles:
            return unauthenticated(f"the JWT's {settings.role_claim} must be one of {', '.join(roles)}", _ASK)
        role, tenant = Role(role_name), _text(claims.get(settings.tenant_claim))
        if fault := identity_fault(role, user=user, tenant=tenant, node=""):
            return unauthenticated(f"the JWT's claims do not fit: {fault}", _ASK)
        if role is Role.APPROVER:
            return self._approver(claims, user)
        return Identity(user=user, role=role, tenant=tenant)

    def _approver(self, claims: Mapping[str, Any], user: str) -> Identity | Refusal:
        """An approver with its tenants and gates; the tenants' uids are resolved later."""
        settings = self._settings
        tenants, gates = (_texts(claims.get(one)) for one in (settings.tenants_claim, settings.gates_claim))
        for claim, values in ((settings.tenants_claim, tenants), (settings.gates_claim, gates)):
            if not values:
                return unauthenticated(
                    f"the JWT's role is approver, but its claim {claim} is missing, empty or no list of names", _ASK
                )
        if fault := next(gate_faults(settings.gates_claim, gates, EVERY), None):
            return unauthenticated(f"the JWT's claims do not fit: {fault.field} {fault.message}", _ASK)
        return Identity(user=user, role=Role.APPROVER, tenants=tuple((one, "") for one in tenants), gates=gates)

    # Keys.

    async def _keys_for(self, kid: object) -> list[SigningJwk]:
        """The keys that may have signed a token; reads the key set again if there are none."""
        if not (keys := self._candidates(kid)):
            await self._refresh(REFRESH_EMPTY_SECONDS if self._keys is None else REFRESH_UNKNOWN_SECONDS)
            keys = self._candidates(kid)
        elif self._monotonic() - self._tried_at > REFRESH_REGULAR_SECONDS and not self._refreshing.locked():
            self._background = asyncio.create_task(self._refresh(REFRESH_REGULAR_SECONDS))
        return keys

    def _candidates(self, kid: object) -> list[SigningJwk]:
        keys = self._keys or []
        if kid is None:
            return keys if len(keys) == 1 else []
        return [key for key in keys if key.kid == kid]

    async def _refresh(self, at_least_seconds_apart: float) -> None:
        async with self._refreshing:
            # A caller that waited for the lock while another one read the keys finds them fresh.
            if self._monotonic() - self._tried_at < at_least_seconds_apart:
                return
            self._tried_at = self._monotonic()
            try:
                self._keys = _import_keys(await self._fetch_jwks())
            except KeysError as error:
                _log.warning(
                    "oidc_keys_unreadable",
                    message="the keys of the OIDC provider cannot be read; the last ones are kept",
                    error=str(error),
                )

    async def _fetch_jwks(self) -> object:
        where = self._settings.jwks or await self._discover()
        if where.startswith(("https://", "http://")):
            return await self._fetch(where)
        try:
            return msgspec.json.decode(await asyncio.to_thread(Path(where).read_bytes))
        except (OSError, msgspec.DecodeError) as error:
            raise KeysError(f"{where}: {error}") from error

    async def _discover(self) -> str:
        document = await self._fetch(self._settings.issuer.rstrip("/") + "/.well-known/openid-configuration")
        if not isinstance(document, dict) or document.get("issuer") != self._settings.issuer:
            raise KeysError(f"the discovery document is not that of issuer {self._settings.issuer}")
        where = document.get("jwks_uri")
        if not isinstance(where, str) or not where.startswith(("https://", "http://")):
            raise KeysError("the discovery document has no usable jwks_uri")
        return where

    async def _fetch(self, url: str) -> object:
        try:
            context = ssl.create_default_context(cafile=self._settings.ca_file or None)
            async with (
                asyncio.timeout(_FETCH_SECONDS_MAX),
                httpx2.AsyncClient(timeout=_FETCH_SECONDS_MAX, verify=context) as client,
                client.stream("GET", url) as response,
            ):
                response.raise_for_status()
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > _DOCUMENT_BYTES_MAX:
                        raise KeysError(f"{url} is longer than {_DOCUMENT_BYTES_MAX} bytes")
            return msgspec.json.decode(body)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, TimeoutError, msgspec.DecodeError) as error:
            raise KeysError(f"{url}: {error!r}") from error


_ASK = "ask the administrator of your identity provider to set it"


def _header(text: str) -> dict[str, Any] | None:
    try:
        header = jws.extract_compact(text.encode("ascii"), registry=_REGISTRY).headers()
    except Exception:
        # The parser may raise anything for a hostile text: it is not a JWT.
        return None
    return header if isinstance(header, dict) else None


def _signed_claims(text: str, key: SigningJwk) -> dict[str, Any] | None:
    """The claims, if this key signed them."""
    try:
        with warnings.catch_warnings():
            # `EdDSA` is the old name of Ed25519, and what most providers still write.
            warnings.simplefilter("ignore", SecurityWarning)
            return jwt.decode(text, key, registry=_REGISTRY).claims
    except Exception:
        # As above: the text is hostile until its signature has been verified.
        return None


def _import_keys(document: object) -> list[SigningJwk]:
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise KeysError("the key set has no list of keys")
    keys = [key for entry in entries if (key := _import_key(entry)) is not None]
    if not keys:
        raise KeysError("the key set holds no key that could verify a signature")
    return keys


def _import_key(entry: object) -> SigningJwk | None:
    """Import one key of the set; None if it is not for signatures, or not supported, as RFC 7517 requires."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    try:
        key = JWKRegistry.import_key(entry)
    except (JoseError, ValueError, TypeError):
        return None
    return key if isinstance(key, RSAKey | ECKey | OKPKey) else None


def _text(value: object) -> str:
    """A claim with one text. Some providers wrap it in a list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else ""


def _texts(value: object) -> tuple[str, ...]:
    """A claim with several texts; one text alone is a list of one. Empty if it is anything else."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        return ()
    return tuple(dict.fromkeys(values))


def _time(value: float) -> str:
    try:
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):
        return "a time out of range"
