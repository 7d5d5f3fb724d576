"""What an agent says while it cannot reach its control plane: where, why, what it does next, and what to look at."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from bursar.agent.control.certificates import NoCredentials, NodeCertificates, NodeCredentials
from bursar.agent.control.codec import HeartbeatAnswer, OutgoingHeartbeat
from bursar.agent.control.connect_errors import REPEAT_SECONDS, ConnectErrorLog, stream_trouble
from bursar.agent.control.stream import ControlStream
from bursar.client import ConnectionFailed
from support.nodes.played_control_plane import Control, authority, joined, server_credentials, serving
from support.process.server import free_port


class Quiet:
    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        return OutgoingHeartbeat(inventory=first)

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        del answer, sent_at


async def told_of(credentials: NodeCredentials) -> Any:
    """The first thing that an agent with these papers has to say."""
    with capture_logs() as lines:
        running = asyncio.create_task(ControlStream("node-1", credentials, Quiet()).run())
        try:
            async with asyncio.timeout(30):
                while not (told := [one for one in lines if one["event"] == "stream_unavailable"]):  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return told[0]


def papers_for(directory: Path, address: str) -> NodeCertificates:
    joined(directory, authority(), "node-1", [address])
    return NodeCertificates(directory, "node-1", urls=[], token_file=None, document=dict)


def assert_told(told: Any, why: str, check: str) -> None:
    assert told["log_level"] == "warning"
    assert why in told["error"]
    assert "the agent tries again in " in told["next"]
    assert check in told["next"]
    # No token and no login would help.
    assert "token" not in told["next"]
    assert "login" not in told["next"]


async def test_nobody_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    told = await told_of(NoCredentials([address]))
    assert_told(told, f"could not reach {address}: the connection was refused", "--grpc")


async def test_a_name_that_nobody_knows() -> None:
    told = await told_of(NoCredentials(["nobody.invalid:50051"]))
    assert_told(told, "could not reach nobody.invalid:50051: its host name cannot be resolved", "DNS")


async def test_a_server_of_another_authority(tmp_path: Path) -> None:
    async with serving(Control(authority=authority())) as control:
        told = await told_of(papers_for(tmp_path, control.address))
    assert_told(told, f"could not reach {control.address}: the server's certificate is not trusted", "CA")


async def test_a_server_without_certificates(tmp_path: Path) -> None:
    async with serving(Control()) as control:
        told = await told_of(papers_for(tmp_path, control.address))
    assert_told(told, f"could not reach {control.address}: it does not speak TLS", "--grpc-insecure")


async def test_a_server_that_asks_for_certificates() -> None:
    async with serving(Control(authority=authority())) as control:
        told = await told_of(NoCredentials([control.address]))
    assert_told(told, f"could not reach {control.address}: the server closed the connection", "certificate")


async def test_a_server_that_calls_itself_otherwise(tmp_path: Path) -> None:
    ours = authority()
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(ours, ["elsewhere.example"]))
    await server.start()
    try:
        joined(tmp_path, ours, "node-1", [f"127.0.0.1:{port}"])
        told = await told_of(NodeCertificates(tmp_path, "node-1", urls=[], token_file=None, document=dict))
    finally:
        await server.stop(None)
    assert_told(told, "the server's certificate is not trusted", "--grpc-host")


def test_what_grpc_says_in_words_of_its_own_is_told_as_it_is() -> None:
    trouble = stream_trouble(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; a moth", "a:1", "n")
    assert trouble.why == "could not reach a:1: failed to connect to all addresses; a moth"
    lost = stream_trouble(grpc.StatusCode.UNAVAILABLE, "this server is stopping", "a:1", "n")
    assert lost.why == "a:1: this server is stopping"


async def test_who_joins_is_told_of_every_server_that_it_asked(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("bsr_a_b")
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    credentials = NodeCertificates(tmp_path, "node-1", urls=urls, token_file=tmp_path / "token", document=dict)
    with pytest.raises(ConnectionFailed) as failed:
        await credentials.ensure()
    for url in urls:
        assert f"could not reach {url}: the connection was refused" in failed.value.message
    assert failed.value.passing


def test_the_same_is_told_once_a_minute_and_something_else_at_once() -> None:
    now = 0.0
    telling = ConnectErrorLog(lambda: now)
    assert [telling.is_news(what) for what in ("a", "a", "b", "b", "a")] == [True, False, True, False, True]
    now += REPEAT_SECONDS
    assert telling.is_news("a")
    telling.over()
    assert telling.is_news("a")
