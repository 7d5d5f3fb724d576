"""Authentication: turns the Authorization header into an Identity, or a Refusal with a remedy.

Token rows and memberships are cached for two seconds (`fresh_rows`). Only the row is cached; the secret and the expiry
are checked for every request. A JWT that names no tenant gets the tenant and the role of its user's membership.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from bursar.api.http.fresh_rows import FRESH_SECONDS, FreshRows, Recent
from bursar.core.quota.tenant_tree import Tenant
from bursar.core.values.access import EVERY, Identity, Role, TenantName, lesser_role, tenant_name, unauthenticated
from bursar.core.values.instant import timestamp
from bursar.core.values.names import quoted
from bursar.core.values.refusal import Cause, Code, Refusal
from bursar.ops.access.token import TokenText, find_tokens, is_token_of, parse_token, token_death
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.store.access.token import TokenRecord
from bursar.store.db.database import Database
from bursar.store.objects.member import Membership, load_memberships

if TYPE_CHECKING:
    from bursar.api.http.oidc import Oidc, Verified

TENANT_HEADER: Final = "x-bursar-tenant"

_CHARS_MAX = 16 * 1024
_JWTS_MAX = 10_000
_LISTED_MAX = 20


class Authenticator:
    def __init__(
        self,
        database: Database,
        *,
        oidc: Oidc | None = None,
        trees: TreeCache | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._oidc = oidc
        self._trees = trees or TreeCache()
        self._clock = clock
        self._monotonic = monotonic
        self.tokens: FreshRows[TokenRecord] = FreshRows(database, find_tokens, monotonic)
        self.memberships: FreshRows[tuple[Membership, ...]] = FreshRows(database, load_memberships, monotonic)
        self._verified: Recent[bytes, Verified] = Recent(_JWTS_MAX)

    async def authenticate(self, authorization: str | None, tenant: str = "") -> Identity | Refusal:
        """Authenticate a request; `tenant` is the one that it names, for users who are members of several. Raises
        Unavailable if the database is needed and away."""
        if not authorization:
            return unauthenticated("the request carries no credentials")
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text or len(text) > _CHARS_MAX:
            return unauthenticated("the Authorization header must read `Bearer <token>`")
        if presented := parse_token(text):
            return await self._authenticate_token(presented)
        if text.count(".") == 2:
            return await self._authenticate_jwt(text, tenant)
        return unauthenticated("the token is neither a Bursar token nor a JWT")

    def forget(self, token_id: str) -> None:
        """Forget the cached row of a token, because it has changed."""
        self.tokens.forget(token_id)

    async def close(self) -> None:
        await asyncio.gather(self.tokens.close(), self.memberships.close())

    # Our own tokens.

    async def _authenticate_token(self, presented: TokenText) -> Identity | Refusal:
        record = await self.tokens.get(presented.id)
        # An unknown id and a wrong secret give the same answer.
        if record is None or not is_token_of(record, presented):
            return unauthenticated("the token is unknown")
        if death := token_death(record, self._clock()):
            return unauthenticated(death)
        return _identity(record)

    # JWTs.

    async def _authenticate_jwt(self, text: str, tenant: str) -> Identity | Refusal:
        if self._oidc is None:
            return unauthenticated("JWTs are not accepted here: no OIDC issuer is configured")
        key = hashlib.sha256(text.encode()).digest()
        now = self._monotonic()
        verified = self._verified.get(key, now - FRESH_SECONDS)
        if verified is None or verified.good_until <= self._clock().timestamp():
            answer = await self._oidc.verify(text)
            if isinstance(answer, Refusal):
                return answer
            identity = await self._settled(answer)
            if isinstance(identity, Refusal):
                return identity
            verified = replace(answer, identity=identity)
            self._verified.put(key, now, verified)
        if verified.by_membership:
            return _as_member(verified.identity, await self.memberships.get(verified.identity.user) or (), tenant)
        return verified.identity

    async def _settled(self, verified: Verified) -> Identity | Refusal:
        """Resolve the tenants that a JWT names. A JWT issued before a tenant was created was meant for an earlier
        tenant of that name: it is refused or, if it is an approver's, does not cover that tenant.

        The cached tree is fresh enough: a caller admitted for a deleted tenant sees nothing.
        """
        identity, issued_at = verified.identity, verified.issued_at
        if identity.role is Role.APPROVER:
            return await self._settled_approver(identity, issued_at)
        if not identity.tenant:
            return identity
        tenant = (await self._tenants([identity.tenant]))[0]
        if tenant is None:
            return unauthenticated("the JWT's tenant does not exist", "ask the administrator of Bursar to create it")
        if issued_at is None:
            return _NO_TIME
        if not _is_older(tenant, issued_at):
            return unauthenticated("the JWT was issued before its tenant was created")
        return replace(identity, tenant_uid=tenant.uid)

    async def _settled_approver(self, identity: Identity, issued_at: float | None) -> Identity | Refusal:
        names = [name for name, _ in identity.tenants]
        if EVERY in names:
            return replace(identity, tenants=((EVERY, ""),))
        if issued_at is None:
            return _NO_TIME
        found = [one for one in await self._tenants(names) if one is not None and _is_older(one, issued_at)]
        if not found:
            return unauthenticated(
                "none of the JWT's tenants exists, or all were created after it was issued",
                "ask the administrator of your identity provider which tenants you decide for",
            )
        tenants: tuple[TenantName, ...] = tuple((one.name, one.uid) for one in found)
        return replace(identity, tenants=tenants)

    async def _tenants(self, names: Sequence[str]) -> list[Tenant | None]:
        """The tenants of these names; the tree is read again if the cached one lacks some."""
        tree = self._trees.latest
        if not all(name in tree.tenants for name in names):
            async with self._database.reader() as db:
                tree = await self._trees.refresh(db)
        return [tree.tenants.get(name) for name in names]


_NO_TIME = unauthenticated("the JWT does not say when it was issued: the claim iat is missing")


def _is_older(tenant: Tenant, issued_at: float) -> bool:
    """Whether a tenant existed when a JWT was issued."""
    return timestamp(datetime.fromtimestamp(issued_at, UTC)) >= tenant.created_at


def _as_member(identity: Identity, memberships: Sequence[Membership], tenant: str) -> Identity | Refusal:
    """The identity of a user in the tenant that the request names, or in the only one that the user is a member of.
    The role is that of the membership, unless the JWT gives a lesser one."""
    if not memberships:
        return unauthenticated(
            f"the JWT names no tenant, and user {quoted(identity.user)} is a member of none",
            "ask the administrator of your tenant: `bursar member add TENANT USER`",
        )
    names = ", ".join(one.tenant for one in memberships[:_LISTED_MAX])
    if len(memberships) > _LISTED_MAX:
        names += f" and {len(memberships) - _LISTED_MAX} more"
    if not tenant and len(memberships) > 1:
        return Refusal(
            Code.INVALID,
            f"you are a member of several tenants: {names}",
            f"Name one of them with the header {_HEADER_SHOWN}; for the command line with BURSAR_TENANT.",
            (Cause("FieldValueRequired", f"must be one of {names}", field=_HEADER_SHOWN),),
        )
    one = next((one for one in memberships if one.tenant == tenant or not tenant), None)
    if one is None:
        return Refusal(
            Code.FORBIDDEN,
            f"you are not a member of tenant {quoted(tenant)}, only of {names}",
            f"Name one of your own tenants with the header {_HEADER_SHOWN}, or ask that tenant's administrator.",
        )
    role = lesser_role(identity.role, one.role)
    return replace(identity, role=role, tenant=one.tenant, tenant_uid=one.tenant_uid)


_HEADER_SHOWN: Final = "X-Bursar-Tenant"


def _identity(record: TokenRecord) -> Identity:
    return Identity(
        user=record.user,
        role=record.role if record.member_role is None else lesser_role(record.role, record.member_role),
        tenant=record.tenant,
        node=record.node,
        token_id=record.id,
        bootstrap=record.single_use and record.role is Role.NODE,
        tenant_uid=record.tenant_uid,
        tenants=tuple(tenant_name(one) for one in record.tenants),
        gates=record.gates,
    )
