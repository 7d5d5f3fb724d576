"""Answers that no Waldur gives: whatever they are, the reading ends, says why, keeps the token to itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from bursar.bridges import waldur
from bursar.bridges.budget import FAULT_CHARS_MAX, ReadPace, SourceAway, read_once
from bursar.bridges.waldur import Waldur
from bursar.core.usage.external_budget import Remaining
from bursar.ops.runtime.runtime import Runtime
from bursar.store.usage import budget as store
from support.process.waldurs import listening

PACE = ReadPace(600.0, again_seconds=0.0)
SECRET = "s3cret-w0rd"


class Answers:
    """What is answered next, always the same."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: dict[str, str] = {}
        self.body = b"[]"
        self.pieces_max = 1
        self.sent = 0


@contextmanager
def answering() -> Iterator[Answers]:
    kept = Answers()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in {"Transfer-Encoding": "chunked", **kept.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for _ in range(kept.pieces_max):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(kept.body), kept.body))
                kept.sent += 1
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as kept.url:
        yield kept


@pytest.fixture
def answers() -> Iterator[Answers]:
    with answering() as kept:
        yield kept


@pytest.fixture
def source(answers: Answers, tmp_path: Path) -> Waldur:
    token = tmp_path / "token"
    token.write_text(SECRET)
    return Waldur(answers.url, token, (uuid4(),))


def resource(backend_id: Any, limit: Any = 100) -> dict[str, Any]:
    return {
        "uuid": uuid4().hex, "backend_id": backend_id, "limits": {"gpu_hours": limit}, "limit_usage": {"gpu_hours": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"5", b"[null]", b'{"detail": "no"}', b"\xff\xfe", b"[" * 100_000, b"<html>",
        json.dumps([resource("physics", 10**400)]).encode(), json.dumps([resource("physics", {"a": 1})]).encode(),
        json.dumps([resource("physics", "z" * 100_000)]).encode(),
    ],
)  # fmt: skip
async def test_what_was_said_before_is_withdrawn_and_the_fault_is_short(
    runtime: Runtime, answers: Answers, source: Waldur, body: bytes
) -> None:
    answers.body = json.dumps([resource("physics")]).encode()
    assert await read_once(runtime.database, source, PACE)
    answers.body = body or b" "
    async with runtime.database.reader() as db:
        await db.execute("UPDATE budget_source SET due_at = now()")
    with capture_logs() as logged:
        assert not await read_once(runtime.database, source, PACE)
    async with runtime.database.reader() as db:
        assert await store.load_remaining(db) == {}
        ((_, answered, fault),) = await store.load_sources(db)
    assert not answered
    assert 0 < len(fault) <= FAULT_CHARS_MAX
    assert all(len(one["fault"]) <= FAULT_CHARS_MAX for one in logged)


@pytest.mark.parametrize("name", ["phy\0sics", "\ud800", "Physics", "a/b", "x" * 1000, " ", 5, None])
async def test_a_resource_that_can_be_no_tenant_does_not_spoil_the_others(
    runtime: Runtime, answers: Answers, source: Waldur, name: Any
) -> None:
    answers.body = json.dumps([resource(name), resource("physics")]).encode()
    assert await read_once(runtime.database, source, PACE)
    async with runtime.database.reader() as db:
        assert await store.load_remaining(db) == {"physics": Remaining(99.0, None, "waldur")}


@pytest.mark.parametrize("token", [f"{SECRET}\nmore", f"{SECRET}\0", f"\r\n{SECRET}: é", f"{SECRET} {SECRET}", " \n"])
async def test_a_token_that_cannot_be_sent_is_not_quoted(source: Waldur, token: str) -> None:
    source.token_file.write_text(token)
    with pytest.raises(SourceAway, match="has no valid token") as caught:
        await source.remaining_budgets()
    assert SECRET not in str(caught.value)


async def test_an_answer_that_does_not_end_is_not_read_to_the_end(
    answers: Answers, source: Waldur, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waldur, "READING_BYTES_MAX", 4 << 20)
    answers.body, answers.pieces_max = b" " * (1 << 20), 400
    with pytest.raises(SourceAway, match="larger than 4 MiB"):
        await source.remaining_budgets()
    assert answers.sent < answers.pieces_max


async def test_pages_that_do_not_end_are_not_read_to_the_end(
    answers: Answers, source: Waldur, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waldur, "READING_BYTES_MAX", 1 << 20)
    answers.headers["Link"] = f'<{answers.url}/?page=2>; rel="next"'
    answers.body = json.dumps([resource("physics")] * 500).encode()
    with pytest.raises(SourceAway, match="larger than 1 MiB"):
        await source.remaining_budgets()


async def test_what_is_compressed_is_not_unpacked(answers: Answers, source: Waldur) -> None:
    answers.headers["Content-Encoding"] = "gzip"
    with pytest.raises(SourceAway, match="compressed"):
        await source.remaining_budgets()
