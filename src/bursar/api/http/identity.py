"""Authentication: turns the Authorization header into an Identity, or a Refusal with a remedy.

Token rows are cached for two seconds, unknown ids too. Lookups that arrive while a query is running are batched into
the next one, so however many requests arrive, with good tokens or bad ones, the database gets one query at a time. Only
the row is cached; the secret and the expiry are checked for every request.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from bursar.core.values.access import Identity, Role, tenant_name, unauthenticated
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal
from bursar.ops.access.token import TokenText, find_tokens, is_token_of, parse_token, token_death
from bursar.ops.quota.tenant_tree import TreeCache
from bursar.store.access.token import TokenRecord
from bursar.store.db.database import Database, Unavailable

if TYPE_CHECKING:
    from bursar.api.http.oidc import Oidc, Verified

FRESH_SECONDS = 2.0
# While the database is away, recently verified tokens stay valid: watches continue, other requests get a 503.
FRESH_WHILE_AWAY_SECONDS = 30.0
ANSWER_SECONDS_MAX = 2.0
RETRY_SECONDS = 1.0

_CHARS_MAX = 16 * 1024
_KNOWN_MAX = 50_000
_UNKNOWN_MAX = 10_000
_JWTS_MAX = 10_000

K = TypeVar("K")
V = TypeVar("V")

# The row, None if there is none, or the reason why it could not be read.
Answer: TypeAlias = TokenRecord | Unavailable | None
Found: TypeAlias = dict[str, TokenRecord] | Unavailable


class _Recent(Generic[K, V]):
    """A bounded cache of values with the times at which they were read."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K, not_before: float) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and entry[0] >= not_before else None

    def put(self, key: K, at: float, value: V) -> None:
        self._entries[key] = (at, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._size_max:
            self._entries.popitem(last=False)

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)


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
        self._known: _Recent[str, TokenRecord] = _Recent(_KNOWN_MAX)
        # A separate cache, so that a flood of invented ids cannot evict valid ones.
        self._unknown: _Recent[str, bool] = _Recent(_UNKNOWN_MAX)
        self._verified: _Recent[bytes, Verified] = _Recent(_JWTS_MAX)
        self._questions: dict[str, asyncio.Future[Answer]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[Found]] = set()
        self._forgotten_meanwhile: set[str] = set()
        self._away_until = float("-inf")

    async def authenticate(self, authorization: str | None) -> Identity | Refusal:
        """Authenticate a request. Raises Unavailable if the database is needed and away."""
        if not authorization:
            return unauthenticated("the request carries no credentials")
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text or len(text) > _CHARS_MAX:
            return unauthenticated("the Authorization header must read `Bearer <token>`")
        if presented := parse_token(text):
            return await self._authenticate_token(presented)
        if text.count(".") == 2:
            return await self._authenticate_jwt(text)
        return unauthenticated("the token is neither a Bursar token nor a JWT")

    def forget(self, token_id: str) -> None:
        """Forget the cached row of a token after a change in this process."""
        self._known.drop(token_id)
        self._unknown.drop(token_id)
        self._forgotten_meanwhile.add(token_id)

    async def close(self) -> None:
        tasks = [*self._reads, *([self._asking] if self._asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Our own tokens.

    async def _authenticate_token(self, presented: TokenText) -> Identity | Refusal:
        record = await self._record(presented.id)
        # An unknown id and a wrong secret give the same answer.
        if record is None or not is_token_of(record, presented):
            return unauthenticated("the token is unknown")
        if death := token_death(record, self._clock()):
            return unauthenticated(death)
        return _identity(record)

    async def _record(self, token_id: str) -> TokenRecord | None:
        now = self._monotonic()
        if record := self._known.get(token_id, now - FRESH_SECONDS):
            return record
        if self._unknown.get(token_id, now - FRESH_SECONDS):
            return None
        answer = Unavailable("the database is away") if now < self._away_until else await self._ask(token_id)
        if not isinstance(answer, Unavailable):
            return answer
        if record := self._known.get(token_id, self._monotonic() - FRESH_WHILE_AWAY_SECONDS):
            return record
        raise Unavailable(str(answer))

    async def _ask(self, token_id: str) -> Answer:
        question = self._questions.get(token_id)
        if question is None:
            question = self._questions[token_id] = asyncio.get_running_loop().create_future()
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_database())
        # Shielded: a client that disconnects must not cancel the query of the others.
        return await asyncio.shield(question)

    async def _ask_database(self) -> None:
        while self._questions:
            questions, self._questions = self._questions, {}
            self._forgotten_meanwhile.clear()
            asked_at = self._monotonic()
            try:
                found = await self._read_in_time(list(questions))
                if isinstance(found, Unavailable):
                    self._away_until = self._monotonic() + RETRY_SECONDS
                    _answer_all(questions, found)
                else:
                    self._remember(asked_at, questions, found)
            finally:
                # After a bug, or at the end of this process: no request is left waiting.
                _answer_all(questions, Unavailable("tokens could not be read"))

    async def _read_in_time(self, token_ids: list[str]) -> Found:
        # Not by asyncio.timeout: a hanging connection takes seconds more to be released, and no request waits for it.
        read = asyncio.create_task(self._read(token_ids))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        done, _ = await asyncio.wait({read}, timeout=ANSWER_SECONDS_MAX)
        if done:
            return read.result()
        read.cancel()
        return Unavailable("the database does not answer")

    async def _read(self, token_ids: list[str]) -> Found:
        try:
            async with self._database.reader() as db:
                return await find_tokens(db, token_ids)
        except Unavailable as error:
            return error

    def _remember(
        self, asked_at: float, questions: dict[str, asyncio.Future[Answer]], found: dict[str, TokenRecord]
    ) -> None:
        for token_id, question in questions.items():
            record = found.get(token_id)
            if token_id not in self._forgotten_meanwhile:
                self._known.drop(token_id)
                if record is None:
                    self._unknown.put(token_id, asked_at, True)
                else:
                    self._known.put(token_id, asked_at, record)
            _answer(question, record)

    # JWTs.

    async def _authenticate_jwt(self, text: str) -> Identity | Refusal:
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
        return verified.identity

    async def _settled(self, verified: Verified) -> Identity | Refusal:
        """Resolve the tenant of a JWT, which names it. A JWT issued before the tenant was created is refused: it was
        meant for an earlier tenant of that name.

        The cached tree is fresh enough: a caller admitted for a deleted tenant sees nothing.
        """
        identity, issued_at = verified.identity, verified.issued_at
        if not identity.tenant:
            return identity
        tenant = self._trees.latest.tenants.get(identity.tenant)
        if tenant is None:
            async with self._database.reader() as db:
                tenant = (await self._trees.refresh(db)).tenants.get(identity.tenant)
        if tenant is None:
            return unauthenticated("the JWT's tenant does not exist", "ask the administrator of Bursar to create it")
        if issued_at is None:
            return unauthenticated("the JWT does not say when it was issued: the claim iat is missing")
        if timestamp(datetime.fromtimestamp(issued_at, UTC)) < tenant.created_at:
            return unauthenticated("the JWT was issued before its tenant was created")
        return replace(identity, tenant_uid=tenant.uid)


def _identity(record: TokenRecord) -> Identity:
    return Identity(
        user=record.user,
        role=record.role,
        tenant=record.tenant,
        node=record.node,
        token_id=record.id,
        bootstrap=record.single_use and record.role is Role.NODE,
        tenant_uid=record.tenant_uid,
        tenants=tuple(tenant_name(one) for one in record.tenants),
        gates=record.gates,
    )


def _answer_all(questions: dict[str, asyncio.Future[Answer]], answer: Unavailable) -> None:
    for question in questions.values():
        _answer(question, answer)


def _answer(question: asyncio.Future[Answer], answer: Answer) -> None:
    if not question.done():
        question.set_result(answer)
