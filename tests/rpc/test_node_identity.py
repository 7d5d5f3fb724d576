"""Who calls, over real TLS: a server with our credentials, and callers with good, bad, old and others' certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from bursar.core.values.certificate import NodeIdentity, is_control_plane, server_name
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.nodes.node_ca import enrol, ensure_authority
from bursar.ops.nodes.x509 import Issued, KeyPair, new_authority, read_request, sign_client, sign_node
from bursar.ops.runtime.runtime import Runtime
from bursar.rpc.identity import identity_of, other_node, revoked
from bursar.rpc.tls import calling, channel_options, server_credentials
from support.nodes.certificates import Key, new_key, pem_of, request_for
from support.runtime.runtime import delete, document, node

Context = grpc.aio.ServicerContext[Any, Any]


class Asked:
    """A servicer that remembers who called."""

    def __init__(self, *, insecure: bool = False) -> None:
        self.insecure = insecure
        self.nodes: list[str | Refusal | None] = []
        self.identities: list[NodeIdentity | Refusal | None] = []
        self.names: list[str] = []

    async def who(self, _: bytes, context: Context) -> bytes:
        identity = identity_of(context, insecure=self.insecure)
        self.nodes.append(identity.node if isinstance(identity, NodeIdentity) else identity)
        self.identities.append(identity)
        self.names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
        return b"ok"


@asynccontextmanager
async def serving(asked: Asked, credentials: grpc.ServerCredentials | None) -> AsyncIterator[int]:
    server = grpc.aio.server()
    handler: Any = grpc.unary_unary_rpc_method_handler(asked.who)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Who", {"Ask": handler}),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def call(target: str, credentials: grpc.ChannelCredentials, options: Any = ()) -> str:
    """What the server said, or the name of the status that came instead."""
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        try:
            answer = await _ask(channel)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return answer.decode()


async def _ask(channel: grpc.aio.Channel) -> bytes:
    who: Any = channel.unary_unary("/test.Who/Ask")
    answer: bytes = await who(b"", timeout=10)
    return answer


def credentials(pair: KeyPair | Issued, authority: bytes, key: bytes = b"") -> grpc.ChannelCredentials:
    held = pair.key if isinstance(pair, KeyPair) else key
    return grpc.ssl_channel_credentials(authority, held, pair.certificate)


async def enrolled(runtime: Runtime, name: str, key: Key | None = None) -> tuple[Issued, grpc.ChannelCredentials]:
    """A node with its certificate, and what it calls with."""
    held = key or new_key()
    document(await node(runtime, name, cpu=8))
    issued = await enrol(runtime.database, name, request_for(held))
    assert isinstance(issued, Issued)
    return issued, credentials(issued, issued.authority, pem_of(held))


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)],
    ids=["p256", "rsa"],
)
async def test_a_node_is_known_by_its_certificate(runtime: Runtime, key: Key) -> None:
    issued, credentials = await enrolled(runtime, "gpu-1", key)
    asked = Asked()
    async with serving(asked, await server_credentials(runtime.database, ["127.0.0.1"])) as port:
        assert await call(f"127.0.0.1:{port}", credentials) == "ok"
    assert asked.nodes == ["gpu-1"]
    assert asked.identities == [issued.identity]
    assert await revoked(runtime.database, issued.identity) is None


async def test_grpc_takes_no_ed25519_which_is_why_none_is_signed(runtime: Runtime) -> None:
    authority, key, moment = (
        await ensure_authority(runtime.database),
        ed25519.Ed25519PrivateKey.generate(),
        datetime.now(UTC),
    )
    public: Any = key.public_key()
    issued = sign_node(authority, public, NodeIdentity("gpu-1", 1), moment)
    async with serving(Asked(), await server_credentials(runtime.database, [])) as port:
        assert await call(f"127.0.0.1:{port}", credentials(issued, authority.pem, pem_of(key))) == "UNAVAILABLE"


async def test_the_server_is_known_by_its_hosts(runtime: Runtime) -> None:
    _, credentials = await enrolled(runtime, "gpu-1")
    async with serving(Asked(), await server_credentials(runtime.database, ["bursar.example", "0.0.0.0"])) as port:
        for host in ("bursar.example", "localhost", "127.0.0.1"):
            options = (("grpc.ssl_target_name_override", host),)
            assert await call(f"127.0.0.1:{port}", credentials, options) == "ok"
        options = (("grpc.ssl_target_name_override", "elsewhere.example"),)
        assert await call(f"127.0.0.1:{port}", credentials, options) == "UNAVAILABLE"


async def test_a_node_cannot_pass_for_the_server(runtime: Runtime) -> None:
    """Its certificate is of the same authority and good for serving, but names no host."""
    _, credentials = await enrolled(runtime, "gpu-1")
    key = new_key()
    document(await node(runtime, "localhost", cpu=8))
    issued = await enrol(runtime.database, "localhost", request_for(key, subject="localhost"))
    assert isinstance(issued, Issued)
    imposter = grpc.ssl_server_credentials([(pem_of(key), issued.certificate)], issued.authority, True)
    async with serving(Asked(), imposter) as port:
        assert await call(f"localhost:{port}", credentials) == "UNAVAILABLE"


async def test_without_a_certificate_of_ours_nobody_comes_in(runtime: Runtime) -> None:
    authority, moment = await ensure_authority(runtime.database), datetime.now(UTC)
    document(await node(runtime, "gpu-1", cpu=8))
    key = new_key()
    public = read_request(request_for(key))
    assert not isinstance(public, Refusal)
    foreign = sign_node(new_authority("Bursar node authority", moment), public, NodeIdentity("gpu-1", 1), moment)
    expired = sign_node(authority, public, NodeIdentity("gpu-1", 1), moment - timedelta(hours=24, seconds=1))
    early = sign_node(authority, public, NodeIdentity("gpu-1", 1), moment + timedelta(hours=1))
    callers = [grpc.ssl_channel_credentials(authority.pem)]
    callers += [credentials(one, authority.pem, pem_of(key)) for one in (foreign, expired, early)]
    asked = Asked()
    async with serving(asked, await server_credentials(runtime.database, [])) as port:
        answers = await asyncio.gather(*(call(f"127.0.0.1:{port}", one) for one in callers))
    assert answers == ["UNAVAILABLE"] * 4
    assert asked.nodes == []


async def test_the_control_plane_is_not_taken_for_a_node(runtime: Runtime) -> None:
    asked = Asked()
    async with serving(asked, await server_credentials(runtime.database, [])) as port:
        assert await call(f"127.0.0.1:{port}", (await calling(runtime.database)).newest()) == "ok"
    (refusal,) = asked.nodes
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.FORBIDDEN
    assert "not that of a node" in refusal.message


async def test_a_revoked_certificate_passes_tls_and_is_refused(runtime: Runtime) -> None:
    issued, credentials = await enrolled(runtime, "gpu-1")
    document(await delete(runtime, "Node", "", "gpu-1"))
    asked = Asked()
    async with serving(asked, await server_credentials(runtime.database, [])) as port:
        assert await call(f"127.0.0.1:{port}", credentials) == "ok"
    assert asked.identities == [issued.identity]
    refusal = await revoked(runtime.database, issued.identity)
    assert refusal is not None
    assert refusal.code is Code.UNAUTHENTICATED


async def test_an_insecure_server_believes_the_heartbeat(runtime: Runtime) -> None:
    for insecure in (True, False):
        asked = Asked(insecure=insecure)
        async with serving(asked, None) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await _ask(channel)
        (found,) = asked.nodes
        if insecure:
            assert found is None
            assert await revoked(runtime.database, None) is None
        else:
            assert isinstance(found, Refusal)
            assert found.code is Code.UNAUTHENTICATED
            assert "no certificate" in found.message


async def test_an_agent_is_called_by_its_name_at_any_address(runtime: Runtime) -> None:
    key, name = new_key(), "gpu-1.rack-7.example"
    document(await node(runtime, name, cpu=8))
    issued = await enrol(runtime.database, name, request_for(key))
    assert isinstance(issued, Issued)
    agent = grpc.ssl_server_credentials([(pem_of(key), issued.certificate)], issued.authority, True)
    asked = Asked()
    async with serving(asked, agent) as port:
        ours = (await calling(runtime.database)).newest()
        assert await call(f"127.0.0.1:{port}", ours, channel_options(name)) == "ok"
        assert is_control_plane(asked.names)
        assert await call(f"127.0.0.1:{port}", ours, channel_options("gpu-2")) == "UNAVAILABLE"
        assert await call(f"127.0.0.1:{port}", ours) == "UNAVAILABLE"


async def test_the_longest_name_can_be_called(runtime: Runtime) -> None:
    key, name = new_key(), ".".join(["n" * 50] * 5)[:253]
    assert len(server_name(name)) < 253
    document(await node(runtime, name, cpu=8))
    issued = await enrol(runtime.database, name, request_for(key))
    assert isinstance(issued, Issued)
    agent = grpc.ssl_server_credentials([(pem_of(key), issued.certificate)], issued.authority, True)
    async with serving(Asked(), agent) as port:
        assert (
            await call(f"127.0.0.1:{port}", (await calling(runtime.database)).newest(), channel_options(name)) == "ok"
        )


async def test_a_certificate_of_ours_for_calling_serves_nobody(runtime: Runtime) -> None:
    authority = await ensure_authority(runtime.database)
    pair = sign_client(authority, datetime.now(UTC))
    _, credentials = await enrolled(runtime, "gpu-1")
    server = grpc.ssl_server_credentials([(pair.key, pair.certificate)], authority.pem, True)
    async with serving(Asked(), server) as port:
        assert await call(f"127.0.0.1:{port}", credentials) == "UNAVAILABLE"


def test_a_node_speaks_for_itself() -> None:
    identity = NodeIdentity("gpu-1", 1)
    assert other_node(identity, "gpu-1") is None
    assert other_node(identity, "") is None
    assert other_node(None, "gpu-2") is None
    refusal = other_node(identity, "gpu-2")
    assert refusal is not None
    assert refusal.code is Code.FORBIDDEN
    assert "'gpu-1'" in refusal.message
    assert "'gpu-2'" in refusal.message
