"""The agent's own gRPC server: authentication of callers, and its responses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from bursar.agent.control import identity
from bursar.agent.control.identity import AgentIdentity
from bursar.agent.control.server import AgentServerError, Snapshot, advertised, opened_app
from bursar.agent.machine.state import Machine
from bursar.agent.machine.types import Directive, Place, Run, Stop
from bursar.core.values.certificate import server_name
from bursar.ops.nodes.x509 import Authority, sign_client
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb
from bursar.wire.scheduler.v1.node_agent_pb2_grpc import NodeAgentStub
from support.nodes.directive_messages import directive_message
from support.nodes.played_control_plane import authority, joined, node_certificate

RUN = Run("a", 2, "ml", "train", command=("true",))


@dataclass(slots=True)
class ServedNode:
    """A node that decides with the real machine, and starts nothing."""

    folder: Path
    name: str = "node-1"
    machine: Machine = field(default_factory=Machine)
    told: list[Directive] = field(default_factory=list)
    live: bool = True

    def tell(self, directive: Directive) -> None:
        self.told.append(directive)
        self.machine.tell([directive], 0.0)

    def snapshot(self) -> Snapshot:
        return Snapshot({"cpu": "4"}, statuses=self.machine.inventory(), cgroups="v2")

    def log(self, place: Place) -> tuple[Path, Callable[[], bool]] | None:
        return (self.folder, lambda: not self.live) if place[0] == "a" else None


def control_credentials(ours: Authority) -> grpc.ChannelCredentials:
    pair = sign_client(ours, datetime.now(UTC))
    return grpc.ssl_channel_credentials(ours.pem, pair.key, pair.certificate)


def node_credentials(credentials: AgentIdentity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)


@asynccontextmanager
async def calling(port: int, channel_credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[Any]:
    address = f"127.0.0.1:{port}"
    options = (("grpc.ssl_target_name_override", server_name("node-1")),)
    opened = (
        grpc.aio.insecure_channel(address)
        if channel_credentials is None
        else grpc.aio.secure_channel(address, channel_credentials, options)
    )
    async with opened as channel:
        yield NodeAgentStub(channel)


@asynccontextmanager
async def insecure(context: ServedNode) -> AsyncIterator[Any]:
    async with opened_app(context, "127.0.0.1:0", identity=None) as port, calling(port) as stub:
        yield stub


async def test_the_control_plane_comes_in(tmp_path: Path) -> None:
    ours = authority()
    credentials = joined(tmp_path, ours, "node-1")
    context = ServedNode(tmp_path)
    async with (
        opened_app(context, "127.0.0.1:0", identity=lambda: credentials) as port,
        calling(port, control_credentials(ours)) as stub,
    ):
        snapshot = await stub.GetResourceSnapshot(pb.SnapshotRequest(node_id="node-1"))
    assert (snapshot.node_id, dict(snapshot.capacity), snapshot.cgroups) == ("node-1", {"cpu": "4"}, "v2")


async def test_only_so_many_connections_are_kept(tmp_path: Path) -> None:
    ours = authority()
    credentials = joined(tmp_path, ours, "node-1")
    async with opened_app(ServedNode(tmp_path), "127.0.0.1:0", identity=lambda: credentials) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(257)]
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(silent[-1][0].read(), 5) == b""
        assert not silent[0][0].at_eof()
        for _, writer in silent:
            writer.close()


async def test_another_node_does_not(tmp_path: Path) -> None:
    ours = authority()
    (tmp_path / "other").mkdir()
    credentials, other = joined(tmp_path, ours, "node-1"), joined(tmp_path / "other", ours, "node-2")
    context = ServedNode(tmp_path)
    async with opened_app(context, "127.0.0.1:0", identity=lambda: credentials) as port:
        for mine in (credentials, other):
            async with calling(port, node_credentials(mine)) as stub:
                calls = [
                    stub.BindAllocation(pb.BindRequest(allocation_id="a", directive=directive_message(RUN))),
                    stub.EvictAllocation(pb.EvictRequest(allocation_id="a")),
                    stub.GetResourceSnapshot(pb.SnapshotRequest()),
                    stub.ReadLog(pb.ReadLogRequest(allocation_id="a")).read(),
                ]
                for call in calls:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await call
                    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert not context.told


async def test_nobody_of_another_authority_comes_in(tmp_path: Path) -> None:
    ours, theirs = authority(), authority()
    credentials = joined(tmp_path, ours, "node-1")
    stranger = sign_client(theirs, datetime.now(UTC))
    channel_credentials = grpc.ssl_channel_credentials(ours.pem, stranger.key, stranger.certificate)
    async with (
        opened_app(ServedNode(tmp_path), "127.0.0.1:0", identity=lambda: credentials) as port,
        calling(port, channel_credentials) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetResourceSnapshot(pb.SnapshotRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nobody_comes_in_without_a_certificate(tmp_path: Path) -> None:
    ours = authority()
    credentials = joined(tmp_path, ours, "node-1")
    async with (
        opened_app(ServedNode(tmp_path), "127.0.0.1:0", identity=lambda: credentials) as port,
        calling(port, grpc.ssl_channel_credentials(ours.pem)) as stub,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetResourceSnapshot(pb.SnapshotRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_newest_certificate_is_shown(tmp_path: Path) -> None:
    ours = authority()
    credentials = [joined(tmp_path, ours, "node-1", ago=timedelta(hours=25))]  # has expired
    async with opened_app(ServedNode(tmp_path), "127.0.0.1:0", identity=lambda: credentials[-1]) as port:
        async with calling(port, control_credentials(ours)) as stub:
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetResourceSnapshot(pb.SnapshotRequest())
        request = identity.certificate_request(credentials[0].key, "node-1")
        credentials.append(identity.renewed(tmp_path, credentials[0], node_certificate(ours, request, "node-1")))
        async with calling(port, control_credentials(ours)) as stub:
            assert (await stub.GetResourceSnapshot(pb.SnapshotRequest())).node_id == "node-1"


async def test_what_is_bound_directly_is_wanted_here(tmp_path: Path) -> None:
    context = ServedNode(tmp_path)
    bind = pb.BindRequest(allocation_id="a", node_id="node-1", directive=directive_message(RUN))
    async with insecure(context) as stub:
        assert (await stub.BindAllocation(bind)).success
        assert (await stub.BindAllocation(bind)).success, "repeats are harmless"
        older = pb.BindRequest(allocation_id="a", directive=directive_message(Run("a", 1, "ml", "train")))
        assert not (await stub.BindAllocation(older)).success
        context.machine.ended(RUN.place, 1.0, exit_code=0)
        assert (await stub.BindAllocation(bind)).failure_reason == "Ended"
        for wrong in (pb.BindRequest(allocation_id="a"), pb.BindRequest(allocation_id="b", directive=bind.directive)):
            assert (await stub.BindAllocation(wrong)).failure_reason == "Invalid"
    assert context.told[0] == RUN


async def test_what_is_evicted_directly_is_stopped(tmp_path: Path) -> None:
    context = ServedNode(tmp_path)
    context.tell(RUN)
    async with insecure(context) as stub:
        missing = await stub.EvictAllocation(pb.EvictRequest(allocation_id="a", epoch=1))
        assert (missing.success, missing.failure_reason) == (False, "NotFound")
        evict = pb.EvictRequest(allocation_id="a", grace_period_seconds=5, reason="Maintenance")
        assert (await stub.EvictAllocation(evict)).success
    assert context.told[-1] == Stop("a", 2, 5, "Maintenance")


async def test_what_is_meant_for_another_node_is_refused(tmp_path: Path) -> None:
    async with insecure(ServedNode(tmp_path)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetResourceSnapshot(pb.SnapshotRequest(node_id="node-2"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_output_is_read_from_any_place_to_its_end(tmp_path: Path) -> None:
    context = ServedNode(tmp_path, live=False)
    (tmp_path / "output.0").write_bytes(b"one\ntwo\nthree\n")
    async with insecure(context) as stub:

        async def read(**request: Any) -> tuple[bytes, bool]:
            pieces = [piece async for piece in stub.ReadLog(pb.ReadLogRequest(allocation_id="a", **request))]
            return b"".join(piece.data for piece in pieces), pieces[-1].end

        assert await read() == (b"one\ntwo\nthree\n", True)
        assert await read(offset=4) == (b"two\nthree\n", True)
        assert await read(tail_lines=1) == (b"three\n", True)
        assert await read(follow=True) == (b"one\ntwo\nthree\n", True)
        context.live = True
        assert await read() == (b"one\ntwo\nthree\n", False)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await stub.ReadLog(pb.ReadLogRequest(allocation_id="b")).read()
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_who_follows_hears_what_is_written_later(tmp_path: Path) -> None:
    context = ServedNode(tmp_path)
    (tmp_path / "output.0").write_bytes(b"one\n")
    async with insecure(context) as stub, asyncio.timeout(20):
        call = stub.ReadLog(pb.ReadLogRequest(allocation_id="a", follow=True))
        assert (await call.read()).data == b"one\n"
        with (tmp_path / "output.0").open("ab") as file:
            file.write(b"two\n")
        piece = await call.read()
        assert (piece.data, piece.offset) == (b"two\n", 4)
        context.live = False
        last = await call.read()
        assert (last.data, last.offset, last.end) == (b"", 8, True)


async def test_an_address_that_is_taken_is_said(tmp_path: Path) -> None:
    async with opened_app(ServedNode(tmp_path), "127.0.0.1:0", identity=None) as port:
        with pytest.raises(AgentServerError, match="--listen"):
            async with opened_app(ServedNode(tmp_path), f"127.0.0.1:{port}", identity=None):
                pass


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", "127.0.0.1:7"),
        ("[::1]:0", "", "[::1]:7"),
        ("0.0.0.0:7", "", "127.0.0.1:7"),
        ("0.0.0.0:7", "gpu-01.cluster", "gpu-01.cluster:7"),
        ("0.0.0.0:7", "gpu-01.cluster:99", "gpu-01.cluster:99"),
        ("0.0.0.0:7", "[fd00::1]", "[fd00::1]:7"),
        ("0.0.0.0:7", "[fd00::1]:99", "[fd00::1]:99"),
    ],
)
def test_the_address_that_is_told_can_be_called(listen: str, advertise: str, expected: str) -> None:
    assert advertised(listen, 7, advertise=advertise, server="127.0.0.1:50051") == expected
