"""The authority: made once, signs what it should, and knows which certificates still count."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bursar.commands.command import Command, Result
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.object import Key as ObjectKey
from bursar.core.values.access import Role
from bursar.core.values.certificate import CONTROL_PLANE_URI, NodeIdentity, identity_in, server_name
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.access.token import create_token, find_tokens
from bursar.ops.nodes.node_ca import enrol, ensure_authority, issue, refused_identities, renew
from bursar.ops.nodes.x509 import Issued, new_authority, read_request, sign_client, sign_node, sign_server
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import Database, connect
from bursar.store.nodes import node_ca as store
from support.nodes.certificates import Key, new_key, read, request_for, uris_in
from support.runtime.runtime import TEST, delete, document, node

NOW = datetime(2031, 5, 1, 12, 0, 30, 250, tzinfo=UTC)


async def refused(runtime: Runtime, *identities: NodeIdentity) -> dict[NodeIdentity, Refusal]:
    async with runtime.database.reader() as db:
        return await refused_identities(db, identities)


def got(issued: Issued | Refusal) -> Issued:
    assert isinstance(issued, Issued), issued
    return issued


# The authority.


async def test_many_who_start_at_once_have_one_authority(database_url: str) -> None:
    databases = [await Database.open(database_url, readers=1) for _ in range(8)]
    try:
        found = await asyncio.gather(*(ensure_authority(one) for one in databases))
        again = await ensure_authority(databases[0])
    finally:
        await asyncio.gather(*(one.close() for one in databases))
    assert len({one.pem for one in (*found, again)}) == 1
    assert len({one.key_pem for one in found}) == 1


async def test_who_waits_for_the_lock_takes_what_the_other_made(database_url: str) -> None:
    """A deliberate race: the second has looked, found nothing, and waits; then the first commits."""
    database, rival = await Database.open(database_url, readers=1), await connect(database_url)
    try:
        made = new_authority("the rival's", NOW)
        async with rival.transaction():
            await store.lock(rival)
            second = asyncio.create_task(ensure_authority(database))
            while not await rival.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await store.save(rival, store.AuthorityRecord(made.pem.decode(), made.key_pem.decode()))
        assert (await second).pem == made.pem
    finally:
        await rival.close()
        await database.close()


def test_the_authority_signs_certificates_and_no_authorities() -> None:
    authority = new_authority("a", NOW)
    assert authority.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value == (
        x509.BasicConstraints(ca=True, path_length=0)
    )
    assert "PRIVATE" not in repr(authority)
    assert "PRIVATE" not in repr(sign_client(authority, NOW))
    assert "PRIVATE" not in repr(store.AuthorityRecord("", authority.key_pem.decode()))


# What it signs.


def test_a_certificate_says_whose_it_is_whatever_was_asked_for() -> None:
    authority, key = new_authority("a", NOW), new_key()
    public = read_request(request_for(key, subject="the-queen"))
    assert not isinstance(public, Refusal)
    issued = sign_node(authority, public, NodeIdentity("gpu-1", 7), NOW)
    certificate = read(issued.certificate)
    certificate.verify_directly_issued_by(authority.certificate)
    assert certificate.public_key() == key.public_key()
    assert [one.value for one in certificate.subject] == ["gpu-1"]
    assert identity_in(uris_in(certificate)) == NodeIdentity("gpu-1", 7)
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == [server_name("gpu-1")]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.not_valid_before_utc == (NOW - timedelta(minutes=1)).replace(microsecond=0)
    assert certificate.not_valid_after_utc == issued.expires_at == (NOW + timedelta(hours=24)).replace(microsecond=0)
    assert issued.authority == authority.pem


def test_no_two_certificates_have_a_serial_number_in_common() -> None:
    authority, key = new_authority("a", NOW), new_key().public_key()
    serials = {read(sign_node(authority, key, NodeIdentity("n", 1), NOW).certificate).serial_number for _ in range(20)}
    assert len(serials) == 20


def test_nothing_outlives_the_authority() -> None:
    authority = new_authority("a", NOW)
    late = authority.certificate.not_valid_after_utc - timedelta(hours=1)
    issued = sign_node(authority, new_key().public_key(), NodeIdentity("n", 1), late)
    assert issued.expires_at == authority.certificate.not_valid_after_utc
    assert read(issued.certificate).not_valid_after_utc == issued.expires_at


def test_the_longest_name_has_a_certificate() -> None:
    name = ".".join(["n" * 50] * 5)[:253]
    certificate = read(
        sign_node(new_authority("a", NOW), new_key().public_key(), NodeIdentity(name, 1), NOW).certificate
    )
    assert identity_in(uris_in(certificate)) == NodeIdentity(name, 1)
    assert len(str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)) == 64


def test_ours_are_good_for_one_direction_each() -> None:
    authority = new_authority("a", NOW)
    server = read(sign_server(authority, ["localhost", "10.0.0.1", "::1"], NOW).certificate)
    client = read(sign_client(authority, NOW).certificate)
    usage = x509.ExtendedKeyUsage
    assert list(server.extensions.get_extension_for_class(usage).value) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert list(client.extensions.get_extension_for_class(usage).value) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert uris_in(client) == [CONTROL_PLANE_URI]
    assert identity_in(uris_in(client)) is identity_in(uris_in(server)) is None
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert {str(one) for one in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.1", "::1"}


@pytest.mark.parametrize(
    "key",
    [
        ec.generate_private_key(ec.SECP256R1()),
        rsa.generate_private_key(65537, 2048),
        rsa.generate_private_key(65537, 3072),
    ],
    ids=["p256", "rsa2048", "rsa3072"],
)
def test_keys_that_are_signed(key: Key) -> None:
    public = read_request(request_for(key))
    assert not isinstance(public, Refusal), public
    read(sign_node(new_authority("a", NOW), public, NodeIdentity("n", 1), NOW).certificate)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (ec.generate_private_key(ec.SECP384R1()), "has a key on secp384r1: the curve must be P-256"),
        (rsa.generate_private_key(65537, 1024), "has an RSA key of 1024 bits"),
        (ed25519.Ed25519PrivateKey.generate(), "has an Ed25519 key, which gRPC's TLS does not support"),
        (dsa.generate_private_key(1024), "has a key of an unsupported type"),
        (ed448.Ed448PrivateKey.generate(), "has a key of an unsupported type"),
    ],
    ids=["p384", "rsa1024", "ed25519", "dsa", "ed448"],
)
def test_keys_that_are_not_signed(key: Key, why: str) -> None:
    refusal = read_request(request_for(key))
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.causes[0].field) == (Code.INVALID, "certificateRequest")
    assert why in refusal.message
    assert "P-256" in refusal.hint


def _of_another_key() -> bytes:
    """A request whose key is another's: the last bytes of it are the signature."""
    der = x509.load_pem_x509_csr(request_for(new_key())).public_bytes(serialization.Encoding.DER)
    broken = x509.load_der_x509_csr(der[:-1] + bytes([der[-1] ^ 1]))
    return broken.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("pem", "why"),
    [
        (b"", "must be a PKCS #10"),
        (b"hello", "must be a PKCS #10"),
        (new_authority("a", NOW).pem, "must be a PKCS #10"),
        (b"-----BEGIN CERTIFICATE REQUEST-----\naGVsbG8=\n-----END CERTIFICATE REQUEST-----\n", "must be a PKCS #10"),
        (request_for(new_key()) + b"#" * 20_000, "must have at most 16384 bytes"),
        (_of_another_key(), "must be signed with its own key"),
    ],
    ids=["empty", "text", "certificate", "garbage", "long", "forged"],
)
def test_requests_that_are_none(pem: bytes, why: str) -> None:
    refusal = read_request(pem)
    assert isinstance(refusal, Refusal)
    assert why in refusal.message


# What counts.


async def test_enrolling_anew_ends_what_was_before(runtime: Runtime) -> None:
    document(await node(runtime, "gpu-1", cpu=8))
    first = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    assert await refused(runtime, first.identity) == {}
    second = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    answers = await refused(runtime, first.identity, second.identity)
    assert list(answers) == [first.identity]
    assert answers[first.identity].code is Code.UNAUTHENTICATED
    assert "was revoked" in answers[first.identity].message
    assert "bursar node token --name gpu-1" in answers[first.identity].hint


async def test_renewing_ends_nothing(runtime: Runtime) -> None:
    document(await node(runtime, "gpu-1", cpu=8))
    first = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    second = got(await renew(runtime.database, first.identity, request_for(new_key())))
    third = got(await issue(runtime.database, "gpu-1", request_for(new_key())))
    assert first.identity == second.identity == third.identity
    assert await refused(runtime, first.identity) == {}
    assert read(first.certificate).serial_number != read(second.certificate).serial_number


async def test_whoever_was_replaced_cannot_renew(runtime: Runtime) -> None:
    document(await node(runtime, "gpu-1", cpu=8))
    stolen = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    refusal = await renew(runtime.database, stolen.identity, request_for(new_key()))
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.UNAUTHENTICATED


async def test_a_deleted_node_is_nobody_and_its_successor_somebody_else(runtime: Runtime) -> None:
    document(await node(runtime, "gpu-1", cpu=8))
    first = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    document(await delete(runtime, "Node", "", "gpu-1"))
    assert "node 'gpu-1' no longer exists" in (await refused(runtime, first.identity))[first.identity].message
    document(await node(runtime, "gpu-1", cpu=8))
    assert "was revoked" in (await refused(runtime, first.identity))[first.identity].message
    second = got(await issue(runtime.database, "gpu-1", request_for(new_key())))
    assert await refused(runtime, second.identity) == {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disown(Command):
    """What any command may decide beside what it is for."""

    def decide(self, batch: UnitOfWork) -> Result:
        batch.disown_node(self.key.name)
        return batch.put(batch.objects[self.key], self.origin)


async def test_a_node_can_be_disowned_and_stay(runtime: Runtime) -> None:
    """Its certificates and all its tokens count no more, from the same commit on; others' do."""
    for name in ("gpu-1", "gpu-2"):
        document(await node(runtime, name, cpu=8))
    mine = got(await enrol(runtime.database, "gpu-1", request_for(new_key())))
    other = got(await enrol(runtime.database, "gpu-2", request_for(new_key())))
    async with runtime.database.reader() as db:
        tokens = [
            await create_token(db, role=Role.NODE, node=name, created_by="test", now=datetime.now(UTC))
            for name in ("gpu-1", "gpu-2")
        ]
    document(await runtime.changing.submit(Disown(key=ObjectKey("Node", "", "gpu-1"), origin=TEST), ""))
    assert list(await refused(runtime, mine.identity, other.identity)) == [mine.identity]
    ids = [made[0].id for made in tokens if not isinstance(made, Refusal)]
    async with runtime.database.reader() as db:
        found = await find_tokens(db, ids)
    assert [found[one].revoked_at is None for one in ids] == [False, True]


async def test_a_node_that_does_not_exist_has_no_certificate(runtime: Runtime) -> None:
    for verb in (enrol, issue):
        refusal = await verb(runtime.database, "ghost", request_for(new_key()))
        assert isinstance(refusal, Refusal)
        assert refusal.code is Code.NOT_FOUND
    never = NodeIdentity("ghost", 1)
    assert list(await refused(runtime, never)) == [never]


async def test_whoever_enrols_while_the_node_is_deleted_gets_nothing_that_counts(runtime: Runtime) -> None:
    """However the two fall, no certificate from before the deletion counts for the node's successor."""
    for turn in range(10):
        document(await node(runtime, f"gpu-{turn}", cpu=8))
        got(await enrol(runtime.database, f"gpu-{turn}", request_for(new_key())))
        issued, _ = await asyncio.gather(
            enrol(runtime.database, f"gpu-{turn}", request_for(new_key())), delete(runtime, "Node", "", f"gpu-{turn}")
        )
        document(await node(runtime, f"gpu-{turn}", cpu=8))
        if isinstance(issued, Issued):
            assert list(await refused(runtime, issued.identity)) == [issued.identity]
        else:
            assert issued.code is Code.NOT_FOUND


async def test_two_who_enrol_at_once_do_not_both_count(runtime: Runtime) -> None:
    document(await node(runtime, "gpu-1", cpu=8))
    requests = [request_for(new_key()) for _ in range(6)]
    issued = await asyncio.gather(*(enrol(runtime.database, "gpu-1", one) for one in requests))
    identities = {got(one).identity for one in issued}
    assert len(identities) == 6
    assert len(await refused(runtime, *identities)) == 5
