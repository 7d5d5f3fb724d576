"""The certificates that the control plane makes for itself: renewed while it runs, without a stream noticing."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509

from bursar.core.values.refusal import Refusal
from bursar.ops.nodes.node_ca import enrol, ensure_authority
from bursar.ops.nodes.x509 import OUR_LIFE, Issued, sign_client
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.workloads.log_source import LogReading
from bursar.rpc.agent_client import Agents
from bursar.rpc.tls import ServerCredentials, calling
from support.nodes.agent_streams import Served, opened_app
from support.nodes.certificates import new_key, pem_of, read, request_for
from support.nodes.log_nodes import kept
from support.runtime.runtime import document, node


async def enrolled(runtime: Runtime, name: str) -> grpc.ChannelCredentials:
    key = new_key()
    document(await node(runtime, name, cpu=8))
    issued = await enrol(runtime.database, name, request_for(key))
    assert isinstance(issued, Issued)
    return grpc.ssl_channel_credentials(issued.authority, pem_of(key), issued.certificate)


async def shown(app: Served) -> x509.Certificate:
    """The certificate that a client sees when it connects now."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", app.port, ssl=trusting)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return x509.load_der_x509_certificate(der)


async def test_agents_come_in_after_the_first_certificate_has_ended_and_streams_stay(database_url: str) -> None:
    async with opened_app(database_url, insecure=False, life=timedelta(seconds=3)) as app:
        early, late = [await enrolled(app.runtime, name) for name in ("n1", "n2")]
        first = await shown(app)
        stream = app.agent("n1", early)
        await stream.heartbeat(inventory=True)
        # Only time itself ends a certificate.
        await asyncio.sleep((first.not_valid_after_utc - datetime.now(UTC)).total_seconds() + 1.0)
        # Who comes now would be shown the one that has ended, if nobody had made another.
        await app.agent("n2", late).heartbeat(inventory=True)
        second = await shown(app)
        assert second.not_valid_after_utc > first.not_valid_after_utc
        assert second.public_key() != first.public_key()
        assert second.issuer == first.issuer
        # The one that came first has been on its stream all the while.
        await stream.heartbeat()


async def test_a_certificate_is_shown_for_two_thirds_of_its_life(runtime: Runtime) -> None:
    authority = await ensure_authority(runtime.database)
    time = begun = datetime.now(UTC)
    credentials = ServerCredentials(lambda at, life: sign_client(authority, at, life), OUR_LIFE, lambda: time)
    first = credentials.newest()
    time = begun + OUR_LIFE * 0.66
    assert credentials.newest() is first
    time = begun + OUR_LIFE * 0.67
    second = credentials.newest()
    assert read(second.certificate).not_valid_after_utc - time > OUR_LIFE - timedelta(seconds=2)
    assert credentials.newest() is second


async def test_a_clock_that_was_ahead_leaves_no_certificate_that_begins_later(runtime: Runtime) -> None:
    authority = await ensure_authority(runtime.database)
    time = datetime.now(UTC) + timedelta(days=10)
    credentials = ServerCredentials(lambda at, life: sign_client(authority, at, life), OUR_LIFE, lambda: time)
    assert read(credentials.newest().certificate).not_valid_before_utc > datetime.now(UTC)
    time = datetime.now(UTC)
    assert read(credentials.newest().certificate).not_valid_before_utc < datetime.now(UTC)


async def test_agents_are_called_with_a_certificate_that_is_good(runtime: Runtime, tmp_path: Path) -> None:
    """Over a channel that is kept the old one would be shown again; to begin with, it has ended already."""
    document(await node(runtime, "n1", cpu=8))
    time = datetime.now(UTC) - OUR_LIFE - timedelta(hours=1)
    agents = Agents(runtime.database, credentials=await calling(runtime.database, clock=lambda: time))
    try:
        async with kept(runtime, "n1", tmp_path) as ledger:
            ledger.write("alloc-1", 1, b"words")
            assert isinstance(await agents.open("n1", LogReading("alloc-1", 1)), Refusal)
            time = datetime.now(UTC)
            output = await agents.open("n1", LogReading("alloc-1", 1))
            assert not isinstance(output, Refusal | None)
            piece = await output.next()
            assert piece is not None
            assert piece.data == b"words"
            await output.close()
    finally:
        await agents.close()
