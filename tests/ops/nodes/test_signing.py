"""Keys that sign what is granted to nodes: made once, changed with an overlap, and gone when their time is over."""

import asyncio

import asyncpg
from joserfc import jws, jwt
from joserfc.jwk import OKPKey

from bursar.agent.machine.lease_token import Distrusted, Trust
from bursar.core.values.refusal import Code, Refusal
from bursar.loops.housekeeping import change_keys
from bursar.ops.nodes.signing import Granted, Ring, Signing, rotate, rotate_old
from bursar.ops.runtime.runtime import Runtime
from bursar.store.nodes import signing as store
from support.runtime.runtime import change, claim, opened

LEASE = Granted("lease-7", "alloc-1", 2, 120)


async def ring_of(runtime: Runtime) -> Ring:
    """As a process that has just started sees it."""
    return await Signing(runtime.database).ring()


def tokens_of(ring: Ring, node: str = "n1") -> tuple[Trust, str]:
    """A stream that was told these keys, and its word."""
    trust = Trust(node)
    nonce = trust.begin()
    trust.learn(ring.public_keys())
    return trust, nonce


async def test_the_first_key_is_made_once_however_many_ask(database_url: str) -> None:
    async with opened(database_url) as one, opened(database_url) as two:
        rings = await asyncio.gather(*(Signing(runtime.database).ring() for runtime in (one, two) for _ in range(8)))
        assert len({ring.ids for ring in rings}) == 1
        assert len(rings[0].ids) == 1


async def test_what_one_process_signs_is_believed_by_whoever_another_told_the_keys(database_url: str) -> None:
    async with opened(database_url) as one, opened(database_url) as two:
        trust, nonce = tokens_of(await ring_of(one))
        believed = trust.verify((await ring_of(two)).sign("n1", nonce, 1, [LEASE]), 1)
        assert not isinstance(believed, Distrusted)
        (lease,) = believed.values()
        assert (lease.id, lease.place, lease.seconds, lease.final) == ("lease-7", ("alloc-1", 2), 120, False)


async def test_a_token_holds_lengths_and_no_times(runtime: Runtime) -> None:
    ring = await ring_of(runtime)
    claims = jwt.decode(ring.sign("n1", "word", 3, [LEASE]), ring.keys[-1], algorithms=["Ed25519"]).claims
    assert {*claims} == {"iss", "aud", "jti", "nonce", "seq", "leases"}
    assert (claims["aud"], claims["nonce"], claims["seq"]) == ("n1", "word", 3)


async def test_the_new_key_signs_and_the_old_one_is_believed_for_a_while(runtime: Runtime) -> None:
    before = await ring_of(runtime)
    after = await rotate(runtime.database, by="user:root")
    assert isinstance(after, Ring)
    assert after.ids[0] == before.ids[0]
    assert len(after.ids) == 2
    trust, nonce = tokens_of(after)
    assert not isinstance(trust.verify(before.sign("n1", nonce, 1, [LEASE]), 1), Distrusted)
    token = after.sign("n1", nonce, 2, [LEASE])
    assert jws.extract_compact(token.encode()).headers()["kid"] == after.ids[-1] != before.ids[-1]
    assert not isinstance(trust.verify(token, 2), Distrusted)


async def test_without_an_overlap_the_old_key_is_not_believed_any_more(runtime: Runtime) -> None:
    before = await ring_of(runtime)
    after = await rotate(runtime.database, by="user:root", overlap_seconds=0)
    assert isinstance(after, Ring)
    assert before.ids[0] not in after.ids
    assert (await ring_of(runtime)).ids == after.ids
    trust, nonce = tokens_of(after)
    refused = trust.verify(before.sign("n1", nonce, 1, [LEASE]), 1)
    assert isinstance(refused, Distrusted)
    assert "not trusted" in refused.why


async def test_a_shorter_overlap_holds_for_older_keys_too_and_a_longer_one_does_not(
    runtime: Runtime,
) -> None:
    await ring_of(runtime)
    await rotate(runtime.database, by="a", overlap_seconds=1000)
    await rotate(runtime.database, by="b", overlap_seconds=9000)
    async with runtime.database.reader() as db:
        first, second, third = await store.load_believed(db)
    assert third.retired_at is None
    assert first.retired_at is not None
    assert second.retired_at is not None
    assert first.retired_at < second.retired_at
    after = await rotate(runtime.database, by="c", overlap_seconds=0)
    assert isinstance(after, Ring)
    assert len(after.ids) == 1


async def test_keys_that_are_old_are_replaced_by_one_of_all_who_look(database_url: str) -> None:
    async with opened(database_url) as one, opened(database_url) as two:
        assert await rotate_old(one.database, 90, by="system") is True  # there was none
        assert await rotate_old(one.database, 90, by="system") is False
        await _age(database_url, days=91)
        made = await asyncio.gather(
            *(rotate_old(runtime.database, 90, by="system") for runtime in (one, two, one, two))
        )
        assert sorted(made) == [False, False, False, True]
        assert len((await ring_of(two)).ids) == 2


async def test_the_private_half_of_a_key_that_is_not_believed_is_removed(database_url: str, runtime: Runtime) -> None:
    await ring_of(runtime)
    await rotate(runtime.database, by="user:root", overlap_seconds=0)
    assert await rotate_old(runtime.database, 90, by="system") is False
    db = await asyncpg.connect(database_url)
    try:
        assert await db.fetchval("SELECT count(*) FROM signing_key") == 1
    finally:
        await db.close()


async def test_a_rotation_asked_for_again_is_done_once(runtime: Runtime) -> None:
    await ring_of(runtime)
    once = await rotate(runtime.database, by="user:root", idempotency_key=claim("r-1", "body"))
    again = await rotate(runtime.database, by="user:root", idempotency_key=claim("r-1", "body"))
    assert isinstance(once, Ring)
    assert isinstance(again, Ring)
    assert again.ids == once.ids
    other = await rotate(runtime.database, by="user:root", idempotency_key=claim("r-1", "another body"))
    assert isinstance(other, Refusal)
    assert other.code is Code.REQUEST_REUSED
    assert (await ring_of(runtime)).ids == once.ids


async def test_a_process_sees_new_keys_when_it_looks_again_and_goes_on_with_the_old_ones_until_then(
    runtime: Runtime,
) -> None:
    clock = [0.0]
    signing = Signing(runtime.database, clock=lambda: clock[0])
    before = await signing.ring()
    after = await rotate(runtime.database, by="user:root")
    assert isinstance(after, Ring)
    assert (await signing.ring()).ids == before.ids
    clock[0] += 60
    assert (await signing.ring()).ids == after.ids


async def test_only_public_halves_are_shown(runtime: Runtime) -> None:
    (shown,) = (await ring_of(runtime)).jwks()["keys"]
    assert {*shown} == {"kty", "crv", "x", "kid", "use", "alg"}
    assert (shown["kty"], shown["crv"], shown["alg"]) == ("OKP", "Ed25519", "Ed25519")
    assert not OKPKey.import_key(shown).is_private
    assert "PRIVATE" not in repr(await ring_of(runtime))


async def test_upkeep_changes_keys_as_often_as_the_settings_say(database_url: str, runtime: Runtime) -> None:
    before = await ring_of(runtime)
    assert await change_keys(runtime) is False
    await _age(database_url, days=40)
    assert await change_keys(runtime) is False
    reply = await change(runtime, "Settings", "", "system", credits={"keyDays": 30})
    assert not isinstance(reply, Refusal)
    assert await change_keys(runtime) is True
    assert (await ring_of(runtime)).ids[0] == before.ids[0]
    assert len((await ring_of(runtime)).ids) == 2


async def _age(database_url: str, *, days: int) -> None:
    db = await asyncpg.connect(database_url)
    try:
        await db.execute("UPDATE signing_key SET created_at = created_at - make_interval(days => $1)", days)
    finally:
        await db.close()
