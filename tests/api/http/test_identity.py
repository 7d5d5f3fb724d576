"""From the Authorization header to an identity, on a real PostgreSQL that can be cut off."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc import jwt
from joserfc.jwk import OKPKey

from bursar.api.http.fresh_rows import ANSWER_SECONDS_MAX, FRESH_SECONDS, FRESH_WHILE_AWAY_SECONDS, RETRY_SECONDS
from bursar.api.http.identity import Authenticator
from bursar.api.http.oidc import Oidc
from bursar.api.http.oidc_settings import OidcSettings
from bursar.core.values.access import Identity, Role
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.access.token import consume_token, create_token, revoke_token
from bursar.store.access.token import TokenRecord
from bursar.store.db.database import Connection, Database, Unavailable
from support.runtime.tokens import ML, ML_UID, put_tenant

NOW = datetime(2031, 5, 1, 12, 0, tzinfo=UTC)


class Clock:
    """Wall and monotonic time, moved together."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wall(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return 1000 + self.seconds


class Wire:
    """A forwarder in front of the database: it counts what the server is asked, and can be cut."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._socket = f"{query['host'][0]}/.s.PGSQL.{query.get('port', ['5432'])[0]}"
        self._name = parts.path.lstrip("/")
        self._user = parts.netloc.partition("@")[0]
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.questions = 0
        self.flowing = asyncio.Event()
        self.flowing.set()

    @property
    def url(self) -> str:
        return f"postgresql://{self._user}@127.0.0.1:{self.port}/{self._name}?sslmode=disable"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there_reader, there_writer = await asyncio.open_unix_connection(self._socket)
        with suppress(asyncio.CancelledError):
            await asyncio.wait(
                [
                    asyncio.create_task(self._copy(reader, there_writer, count=True)),
                    asyncio.create_task(self._copy(there_reader, writer, count=False)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        writer.close()
        there_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                self.questions += count
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def wire(database_url: str) -> AsyncIterator[Wire]:
    wire = Wire(database_url)
    await wire.open()
    yield wire
    await wire.cut()


@pytest.fixture
async def authenticator(wire: Wire, clock: Clock) -> AsyncIterator[Authenticator]:
    database = await Database.open(wire.url)
    authenticator = Authenticator(database, clock=clock.wall, monotonic=clock.monotonic)
    yield authenticator
    await authenticator.close()
    await database.close()


@pytest.fixture(autouse=True)
async def _tenant(db: Connection) -> None:
    await put_tenant(db)


async def _token(db: Connection, **wanted: Any) -> tuple[TokenRecord, str]:
    usual = {"role": Role.USER, "tenant": ML, "tenant_uid": ML_UID, "user": "alice", "created_by": "root", "now": NOW}
    made = await create_token(db, **{**usual, **wanted})
    assert not isinstance(made, Refusal), made
    return made[0], f"Bearer {made[1]}"


async def _refused(authenticator: Authenticator, header: str | None) -> str:
    answer = await authenticator.authenticate(header)
    assert isinstance(answer, Refusal), answer
    assert answer.code is Code.UNAUTHENTICATED
    assert "bursar login" in answer.message
    return answer.message


async def test_a_token_gives_its_identity(authenticator: Authenticator, db: Connection) -> None:
    record, header = await _token(db)
    wanted = Identity("alice", Role.USER, tenant=ML, token_id=record.id, tenant_uid=ML_UID)
    assert await authenticator.authenticate(header) == wanted
    assert await authenticator.authenticate(header.replace("Bearer", "bearer")) == wanted


async def test_a_joining_node_is_marked(authenticator: Authenticator, db: Connection, clock: Clock) -> None:
    node: dict[str, Any] = {"role": Role.NODE, "tenant": "", "user": "", "node": "gpu-1"}
    record, header = await _token(db, **node, single_use=True)
    identity = await authenticator.authenticate(header)
    assert isinstance(identity, Identity)
    assert (identity.bootstrap, identity.actor) == (True, "node:gpu-1")
    assert await consume_token(db, record.id, NOW)
    clock.seconds += FRESH_SECONDS + 0.1
    assert "was for a single use" in await _refused(authenticator, header)
    _, lasting = await _token(db, **node)
    identity = await authenticator.authenticate(lasting)
    assert isinstance(identity, Identity)
    assert not identity.bootstrap


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "carries no credentials"),
        ("", "carries no credentials"),
        ("Bearer", "must read `Bearer <token>`"),
        ("Bearer ", "must read `Bearer <token>`"),
        ("Basic YWxpY2U6c2VjcmV0", "must read `Bearer <token>`"),
        ("Bearer " + "a" * 20_000, "must read `Bearer <token>`"),
        ("Bearer nonsense", "neither a Bursar token nor a JWT"),
        ("Bearer bsr_short", "neither a Bursar token nor a JWT"),
        ("Bearer bsr_000000000000_" + "a" * 43, "the token is unknown"),
        ("Bearer a.b.c", "no OIDC issuer is configured"),
    ],
)
async def test_headers_that_are_refused(authenticator: Authenticator, header: str | None, said: str) -> None:
    assert said in await _refused(authenticator, header)


async def test_a_wrong_secret_is_told_nothing_and_does_not_spoil_the_right_one(
    authenticator: Authenticator, db: Connection
) -> None:
    record, header = await _token(db)
    wrong = f"Bearer bsr_{record.id}_{'a' * 43}"
    unknown = await _refused(authenticator, f"Bearer bsr_000000000000_{'a' * 43}")
    for _ in range(2):
        assert await _refused(authenticator, wrong) == unknown
        assert isinstance(await authenticator.authenticate(header), Identity)
    await revoke_token(db, record.id, NOW, by="user:test")
    authenticator.forget(record.id)
    assert await _refused(authenticator, wrong) == unknown


async def test_a_token_expires_on_time_although_it_is_remembered(
    authenticator: Authenticator, db: Connection, clock: Clock
) -> None:
    _, header = await _token(db, ttl_seconds=1)
    assert isinstance(await authenticator.authenticate(header), Identity)
    clock.seconds = 1.0
    assert "expired at 2031-05-01T12:00:01Z" in await _refused(authenticator, header)


async def test_a_revocation_holds_at_once_here_and_in_two_seconds_elsewhere(
    authenticator: Authenticator, db: Connection, clock: Clock
) -> None:
    here, header_here = await _token(db)
    elsewhere, header_elsewhere = await _token(db)
    for header in (header_here, header_elsewhere):
        await authenticator.authenticate(header)
    await revoke_token(db, here.id, NOW, by="user:test")
    authenticator.forget(here.id)
    await revoke_token(db, elsewhere.id, NOW, by="user:test")
    assert "was revoked at 2031-05-01T12:00:00Z" in await _refused(authenticator, header_here)
    assert isinstance(await authenticator.authenticate(header_elsewhere), Identity)
    clock.seconds += FRESH_SECONDS + 0.1
    assert "was revoked" in await _refused(authenticator, header_elsewhere)


async def test_good_and_bad_tokens_are_remembered_for_two_seconds(
    authenticator: Authenticator, db: Connection, wire: Wire, clock: Clock
) -> None:
    _, good = await _token(db)
    bad = f"Bearer bsr_000000000000_{'a' * 43}"
    await authenticator.authenticate(good)
    await _refused(authenticator, bad)
    await asyncio.sleep(0.05)  # the pool tidies its connection after it was given back
    before = wire.questions
    for _ in range(500):
        assert isinstance(await authenticator.authenticate(good), Identity)
        await _refused(authenticator, bad)
    assert wire.questions == before
    clock.seconds += FRESH_SECONDS + 0.1
    await authenticator.authenticate(good)
    assert wire.questions > before


async def test_a_flood_of_invented_tokens_is_few_questions_and_forgets_no_good_one(
    authenticator: Authenticator, db: Connection, wire: Wire
) -> None:
    _, good = await _token(db)
    await authenticator.authenticate(good)
    before = wire.questions
    headers = [f"Bearer bsr_{number:012x}_{'a' * 43}" for number in range(20_000)]
    answers = await asyncio.gather(*map(authenticator.authenticate, headers))
    assert all(isinstance(answer, Refusal) for answer in answers)
    assert wire.questions - before < 200
    assert authenticator.tokens.unknown <= 10_000
    await wire.cut()
    assert isinstance(await authenticator.authenticate(good), Identity)


async def test_a_token_made_after_it_was_guessed_works_after_two_seconds_or_at_once_if_told(
    authenticator: Authenticator, db: Connection
) -> None:
    record, header = await _token(db)
    await db.execute("UPDATE token SET id = 'ffffffffffff' WHERE id = $1", record.id)
    await _refused(authenticator, header)
    await db.execute("UPDATE token SET id = $1", record.id)
    authenticator.forget(record.id)
    assert isinstance(await authenticator.authenticate(header), Identity)


async def test_whoever_hangs_up_does_not_take_the_answer_from_the_others(
    authenticator: Authenticator, db: Connection
) -> None:
    _, header = await _token(db)
    first, second = (asyncio.create_task(authenticator.authenticate(header)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert isinstance(await second, Identity)


async def test_while_the_database_is_away_those_it_vouched_for_go_on_for_thirty_seconds(
    authenticator: Authenticator, db: Connection, wire: Wire, clock: Clock
) -> None:
    _, known = await _token(db)
    _, new = await _token(db)
    await authenticator.authenticate(known)
    await wire.cut()
    clock.seconds = FRESH_SECONDS + 1
    assert isinstance(await authenticator.authenticate(known), Identity)
    with pytest.raises(Unavailable):
        await authenticator.authenticate(new)
    clock.seconds = FRESH_WHILE_AWAY_SECONDS - 1
    assert isinstance(await authenticator.authenticate(known), Identity)
    clock.seconds = FRESH_WHILE_AWAY_SECONDS + 1
    with pytest.raises(Unavailable):
        await authenticator.authenticate(known)
    await wire.open()
    clock.seconds += RETRY_SECONDS
    assert isinstance(await authenticator.authenticate(known), Identity)
    assert isinstance(await authenticator.authenticate(new), Identity)


async def test_a_database_that_hangs_is_away_after_two_seconds(
    authenticator: Authenticator, db: Connection, wire: Wire, clock: Clock
) -> None:
    _, known = await _token(db)
    _, new = await _token(db)
    await authenticator.authenticate(known)
    clock.seconds = FRESH_SECONDS + 1
    wire.flowing.clear()
    began = time.monotonic()
    assert isinstance(await authenticator.authenticate(known), Identity)
    with pytest.raises(Unavailable):
        await authenticator.authenticate(new)
    assert time.monotonic() - began < ANSWER_SECONDS_MAX + 1
    wire.flowing.set()
    clock.seconds += RETRY_SECONDS
    assert isinstance(await authenticator.authenticate(new), Identity)


async def test_an_expired_token_is_refused_also_while_the_database_is_away(
    authenticator: Authenticator, db: Connection, wire: Wire, clock: Clock
) -> None:
    _, header = await _token(db, ttl_seconds=10)
    await authenticator.authenticate(header)
    await wire.cut()
    clock.seconds = 11
    assert "expired" in await _refused(authenticator, header)


async def test_jwts_are_authenticated_in_the_same_place(
    database_url: str, clock: Clock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key = OKPKey.generate_key("Ed25519", {"kid": "ed-1"})
    path = tmp_path_factory.mktemp("jwks") / "jwks.json"
    path.write_bytes(_jwks(key))
    oidc = Oidc(
        OidcSettings("https://issuer.example", "bursar", jwks=str(path)), clock=lambda: clock.wall().timestamp()
    )
    database = await Database.open(database_url)
    authenticator = Authenticator(database, oidc=oidc, clock=clock.wall, monotonic=clock.monotonic)
    claims = {
        "iss": "https://issuer.example",
        "aud": "bursar",
        "sub": "bob",
        "exp": NOW.timestamp() - 29,
        "bursar_role": "billing-admin",
    }
    header = f"Bearer {jwt.encode({'alg': 'Ed25519', 'kid': 'ed-1'}, claims, key, algorithms=['Ed25519'])}"
    for _ in range(2):
        assert await authenticator.authenticate(header) == Identity("bob", Role.BILLING_ADMIN)
    clock.seconds = 1.5  # still remembered, but past its time and the leeway
    assert "expired at 2031-05-01T11:59:31Z" in await _refused(authenticator, header)
    await _refused(authenticator, header[:-4] + "AAAA")
    await authenticator.close()
    await database.close()


def _jwks(key: OKPKey) -> bytes:
    return json.dumps({"keys": [key.as_dict(private=False)]}).encode()
