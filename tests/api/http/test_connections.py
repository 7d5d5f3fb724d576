"""Who connects and does not ask, asks without end, or does not read the answer, costs little and is let go."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
import pytest_asyncio
import uvicorn

from bursar.api.http import connection, metrics, spool
from bursar.api.http.connection import Bounds, ConnectionGate, Handshake, address_of
from bursar.api.http.tls import ensure_server_certificate
from support.api.site import Site, allocation, eventually, served

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Never by itself in a test: the tests that wait for it look at the clock they give.
PATIENT = Bounds(header_seconds=3600, unread_seconds=3600, look_seconds=3600)


class Edge:
    """A server with a gate of its own, and raw connections to it."""

    def __init__(self, site: Site, gate: ConnectionGate, url: str) -> None:
        self.site, self.gate = site, gate
        parts = urlsplit(url)
        self._where = parts.hostname or "", parts.port or 0

    async def open(self, *, receive_bytes: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = socket.socket()
        if receive_bytes:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, self._where)
        limit = receive_bytes or 1 << 20
        return await asyncio.open_connection(sock=raw, limit=limit)

    def get(self, path: str, *, token: str | None = None, more: str = "") -> bytes:
        who = self.site.admin if token is None else token
        return f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {who}\r\n{more}\r\n".encode()


@asynccontextmanager
async def edge_of(site: Site, bounds: Bounds = PATIENT) -> AsyncIterator[Edge]:
    gate = ConnectionGate(bounds)
    async with served(site.context, gate) as url:
        yield Edge(site, gate, url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(site: Site) -> AsyncIterator[Edge]:
    async with edge_of(site) as one:
        yield one


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(30):
        line = await reader.readline()
    return int(line.split()[1]) if line else 0


async def asked(edge: Edge, raw: bytes) -> tuple[int, bytes]:
    """The status of an answer, and everything until the server closes the connection."""
    reader, writer = await edge.open()
    writer.write(raw)
    try:
        status = await status_of(reader)
        async with asyncio.timeout(30):
            rest = await reader.read()
    except ConnectionResetError:
        return 0, b""
    finally:
        writer.close()
    return status, rest


def refused(bound: str) -> float:
    return float(metrics.CONNECTIONS_REFUSED.labels(bound)._value.get())


# The head of a request.


async def test_many_headers_and_long_ones_are_refused(edge: Edge) -> None:
    close = "Connection: close\r\n"
    status, _ = await asked(edge, edge.get("/healthz", more="X-A: y\r\n" * 97 + close))
    assert status == 200
    before = refused("headers")
    status, body = await asked(edge, edge.get("/healthz", more="X-A: y\r\n" * 98 + close))
    assert (status, b'"code":"headers_too_large"' in body) == (431, True)
    status, body = await asked(edge, edge.get("/healthz", more=f"X-A: {'y' * 60_000}\r\n{close}"))
    assert status == 200
    status, body = await asked(edge, edge.get("/healthz", more=f"X-A: {'y' * 66_000}\r\n{close}"))
    assert (status, b'"code":431' in body) == (431, True)
    assert refused("headers") == before + 2


async def test_headers_without_end_are_not_kept(edge: Edge) -> None:
    for line in (b"X-A: " + b"y" * 1000 + b"\r\n", b"a:b\r\n", b"y" * 1000):
        reader, writer = await edge.open()
        writer.write(b"GET /hello HTTP/1.1\r\nHost: a\r\n")
        try:
            for _ in range(4_000_000 // len(line) // 100):
                writer.write(line * 100)
                await writer.drain()
        except ConnectionError:
            pass
        one = await read_or_reset(reader)
        assert one == b"" or b" 431 " in one or b" 400 " in one
        writer.close()
    await eventually(lambda: settled(edge.gate))


@pytest.mark.timeout(60)  # it would go on for ever
async def test_bytes_that_are_no_request_are_heard_once(edge: Edge) -> None:
    """However many come at once."""
    reader, writer = await edge.open()
    writer.write(b"\x00" * (4 * connection.HEADER_BYTES_MAX))
    one = await read_or_reset(reader)
    assert one == b"" or b" 400 " in one
    writer.close()
    await eventually(lambda: settled(edge.gate))


async def read_or_reset(reader: asyncio.StreamReader) -> bytes:
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""


async def settled(gate: ConnectionGate) -> bool:
    return len(gate) == 0


async def test_a_long_url_is_refused(edge: Edge) -> None:
    status, _ = await asked(edge, edge.get("/hello?a=" + "b" * 16_000, more="Connection: close\r\n"))
    assert status == 200
    status, body = await asked(edge, edge.get("/hello?a=" + "b" * 17_000))
    assert (status, b'"code":"url_too_long"' in body) == (414, True)


async def test_a_body_may_begin_in_the_piece_that_ends_the_headers(edge: Edge) -> None:
    body = b'{"metadata":{"name":"%s"},"spec":{},"x":"%s"}' % (b"q", b"y" * 200_000)
    head = edge.get("/api/v1/queues").replace(b"GET", b"POST")[:-2]
    raw = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    status, answer = await asked(edge, raw)
    assert (status, b"unknown field" in answer) == (400, True)


async def test_what_comes_after_a_body_is_no_header(edge: Edge) -> None:
    head = b"POST /api/v1/queues HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    tail = f"0\r\nAuthorization: Bearer {edge.site.admin}\r\n\r\n".encode()
    status, _ = await asked(edge, head + b"2\r\n{}\r\n" + tail)
    assert status == 401


async def test_requests_one_after_another_have_their_own_bounds(edge: Edge) -> None:
    reader, writer = await edge.open()
    one = edge.get("/hello", more=f"X-A: {'y' * 30_000}\r\n")
    writer.write(one * 5)
    for _ in range(5):
        assert await status_of(reader) == 200
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
    writer.close()


@pytest.mark.parametrize("path", ["/hello", "/api/v1/tenants"])
async def test_bytes_that_are_no_request_do_not_cost_the_one_before_its_answer(edge: Edge, path: str) -> None:
    before = refused("malformed")
    status, rest = await asked(edge, edge.get(path) + b"\x00\x01 garbage\r\n\r\n")
    assert (status, refused("malformed")) == (200, before + 1)
    assert rest.count(b"HTTP/1.1") == 0, "the garbage has no answer of its own"


async def test_a_body_that_is_no_http_is_refused(edge: Edge) -> None:
    head = f"POST /api/v1/tenants HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {edge.site.admin}\r\n"
    status, rest = await asked(edge, f"{head}Transfer-Encoding: chunked\r\n\r\nzzz\r\n".encode())
    assert (status, b'"code":400' in rest) == (400, True)


async def test_a_refused_connection_reads_only_so_much(edge: Edge) -> None:
    """While the request before garbage is answered, the garbage is thrown away, and there is a bound on it."""
    reader, writer = await edge.open()
    writer.write(edge.get("/api/v1/allocations?watch=true") + b"\x00\r\n\r\n")
    assert await status_of(reader) == 200
    with pytest.raises(ConnectionError):
        await flood(writer, 4 * connection.UNREAD_BYTES_MAX)
    writer.close()
    await eventually(lambda: settled(edge.gate))


async def flood(writer: asyncio.StreamWriter, size_bytes: int) -> None:
    for _ in range(size_bytes >> 16):
        writer.write(bytes(1 << 16))
        await writer.drain()


# Time.


async def test_headers_that_do_not_come_are_not_waited_for(edge: Edge) -> None:
    silent, half, idle = [await edge.open() for _ in range(3)]
    half[1].write(b"GET /hello HTTP/1.1\r\nHost: a\r\n")
    idle[1].write(edge.get("/hello"))
    assert await status_of(idle[0]) == 200
    await eventually(lambda: has(edge.gate, 3))
    now = asyncio.get_running_loop().time()
    edge.gate.look(now + PATIENT.header_seconds - 60)
    assert len(edge.gate) == 3, "there is time left"
    edge.gate.look(now + PATIENT.header_seconds + 60)
    assert [await status_of(silent[0]), await status_of(half[0])] == [408, 408]
    await eventually(lambda: has(edge.gate, 1))
    idle[1].write(edge.get("/hello"))
    await idle[0].readuntil(b"}")
    assert await status_of(idle[0]) == 200, "who has asked may pause before the next request"
    idle[1].write(b"GET /hel")
    for _, writer in (silent, half, idle):
        writer.close()
    await eventually(lambda: settled(edge.gate))


async def has(gate: ConnectionGate, count: int) -> bool:
    return len(gate) == count


async def is_unknown(gate: ConnectionGate, count: int) -> bool:
    return gate.unknown("127.0.0.1") == count


async def test_time_is_looked_at_by_itself(site: Site) -> None:
    async with edge_of(site, Bounds(header_seconds=0.2, look_seconds=0.05)) as edge:
        reader, writer = await edge.open()
        assert await status_of(reader) == 408
        writer.close()


async def test_over_tls_handshakes_have_their_time_and_answers_ask_for_tls(site: Site, tmp_path: Path) -> None:
    certificate, key, ca = ensure_server_certificate(tmp_path / "tls", ["127.0.0.1"])
    hasty = ConnectionGate(Bounds(header_seconds=0.2, look_seconds=3600))
    async with served(site.context, hasty, tls=(certificate, key)) as url:
        reader, writer = await Edge(site, hasty, url).open()
        assert await read_or_reset(reader) == b"", "nothing was said, and nobody waits for it"
        writer.close()
        await eventually(lambda: is_unknown(hasty, 0))
    async with served(site.context, ConnectionGate(PATIENT), tls=(certificate, key)) as url:
        trusted = ssl.create_default_context(cafile=str(ca))
        async with httpx2.AsyncClient(verify=trusted, trust_env=False, timeout=30) as http:
            answer = await http.get(f"{url}/hello")
    assert answer.headers["strict-transport-security"] == "max-age=31536000"


async def test_over_tls_connections_count_before_their_handshake(site: Site, tmp_path: Path) -> None:
    """Else a client that never begins one could take all descriptors of the process."""
    certificate, key, ca = ensure_server_certificate(tmp_path / "tls", ["127.0.0.1"])
    trusted = ssl.create_default_context(cafile=str(ca))
    gate = ConnectionGate(Bounds(connections=9, connections_per_address=3, header_seconds=3600, look_seconds=3600))
    async with served(site.context, gate, tls=(certificate, key)) as url:
        edge = Edge(site, gate, url)
        before = refused("address")
        silent = [await edge.open() for _ in range(3)]
        reader, writer = await edge.open()
        assert await read_or_reset(reader) == b""
        writer.close()
        assert (gate.unknown("127.0.0.1"), len(gate), refused("address")) == (3, 0, before + 1)
        silent[2][1].write(b"GET / HTTP/1.1\r\n\r\n")  # no TLS: its handshake fails, and its place is free
        await eventually(lambda: is_unknown(gate, 2))
        headers = {"authorization": f"Bearer {site.admin}"}
        async with httpx2.AsyncClient(verify=trusted, trust_env=False, timeout=30, headers=headers) as http:
            assert (await http.get(f"{url}/api/v1/whoami")).status_code == 200, "the third, which counts once"
            assert (gate.unknown("127.0.0.1"), len(gate)) == (2, 1)
        for _, one in silent:
            one.close()
        await eventually(lambda: is_unknown(gate, 0))


async def test_over_tls_headers_are_waited_for_from_the_beginning_of_the_handshake(site: Site) -> None:
    gate = ConnectionGate(PATIENT)
    begun = Handshake("127.0.0.1", since=7.0)
    assert gate.begin(begun) == ""
    config = uvicorn.Config(lambda: None, http=gate.protocol(), lifespan="off", log_level="error")
    config.load()
    one = gate.protocol()(config=config, server_state=uvicorn.server.ServerState(), app_state={})
    one.handshake = begun
    near, far = socket.socketpair()
    with far:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda: one, near)
        assert one._head_since == 7.0
        transport.abort()


# How many.


async def test_an_address_has_so_many_connections_until_it_shows_a_token(site: Site) -> None:
    bounds = Bounds(connections=6, connections_per_address=3, header_seconds=3600, look_seconds=3600)
    async with edge_of(site, bounds) as edge:
        known = [await edge.open() for _ in range(3)]
        for reader, writer in known:
            writer.write(edge.get("/api/v1/whoami"))
            assert await status_of(reader) == 200
        assert (len(edge.gate), edge.gate.unknown("127.0.0.1")) == (3, 0)
        before = refused("address"), refused("all")
        strangers = [await edge.open() for _ in range(2)]
        strangers.append(await edge.open())
        strangers[-1][1].write(edge.get("/api/v1/whoami", token="wrong"))
        assert await status_of(strangers[-1][0]) == 401
        await eventually(lambda: has(edge.gate, 6))
        assert edge.gate.unknown("127.0.0.1") == 3
        reader, writer = await edge.open()
        assert await read_or_reset(reader) == b""
        writer.close()
        assert refused("all") == before[1] + 1
        for _, one in known:
            one.close()
        await eventually(lambda: has(edge.gate, 3))
        reader, writer = await edge.open()
        assert await read_or_reset(reader) == b""
        writer.close()
        assert refused("address") == before[0] + 1
        for _, one in strangers:
            one.close()
        await eventually(lambda: settled(edge.gate))
        assert edge.gate.unknown("127.0.0.1") == 0


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5), "2001:db8:1:2::/64"),
        (("::ffff:10.0.0.1", 5), "10.0.0.1"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (None, ""),
    ],
)
async def test_addresses_of_one_network_are_one(client: tuple[str, int] | None, address: str) -> None:
    assert address_of(client) == address


# Answers that nobody reads.


async def filled(site: Site, count: int = 30) -> str:
    """A namespace whose list is larger than the buffers of a socket."""
    team = await site.namespace()
    for index in range(count):
        one = allocation(f"job-{index:03}", cpu=1)
        one["metadata"]["annotations"] = {"text": "x" * 200_000}
        assert (await site.post(f"namespaces/{team}/allocations", one)).status == 201
    return team


async def test_lists_and_watches_that_nobody_reads_hold_little_and_are_let_go(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = await filled(site)
    viewer = await site.token("viewer", tenant=team)
    path = f"/api/v1/namespaces/{team}/allocations"
    monkeypatch.setattr(site.context.spools, "memory_each", 1 << 20)
    whole = await site.get(path.removeprefix("/api/v1/"), token=viewer)
    assert len(whole.body["items"]) == 30
    async with edge_of(site) as edge:
        readers = []
        for query in ("", "", "?limit=100", "?watch=true", "?watch=true", "?watch=true", "?watch=true", "?watch=true"):
            reader, writer = await edge.open(receive_bytes=4096)
            writer.write(edge.get(path + query, token=viewer))
            readers.append((reader, writer))

        async def all_wait() -> bool:
            stuck = [one for one in edge.gate._open if one.flow.write_paused]
            return len(stuck) == len(readers)

        await eventually(all_wait, 60)
        assert len(site.context.states) == len(site.context.lists) == 0, "nobody holds a seat while it is not read"
        assert site.context.spools.memory_bytes < 4 << 20
        assert site.context.spools.file_bytes[f"tenant:{team}"] > 20 << 20
        assert all(one.transport.get_write_buffer_size() < 1 << 20 for one in edge.gate._open)
        again = await site.get(path.removeprefix("/api/v1/"), limit="1")
        assert again.status == 200
        edge.gate.look(1.0)
        before = refused("unread")
        edge.gate.look(2.0 + PATIENT.unread_seconds + 1)
        await eventually(lambda: settled(edge.gate))
        assert refused("unread") == before + len(readers)
        for _, writer in readers:
            writer.close()
    await eventually(lambda: nothing_spooled(site))


async def nothing_spooled(site: Site) -> bool:
    return not site.context.spools.file_bytes and not site.context.spools.memory_bytes


async def test_who_reads_slowly_is_let_read(site: Site) -> None:
    team = await filled(site, 4)
    async with edge_of(site) as edge:
        reader, writer = await edge.open(receive_bytes=4096)
        writer.write(edge.get(f"/api/v1/namespaces/{team}/allocations", more="Connection: close\r\n"))
        clock, size = 1.0, 0
        while piece := await reader.read(100_000):
            size += len(piece)
            edge.gate.look(clock := clock + PATIENT.unread_seconds / 2)
        assert size > 800_000
        writer.close()


async def test_one_tenant_may_not_fill_the_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    team = await filled(site, 4)
    monkeypatch.setattr(site.context.spools, "memory_each", 1000)
    monkeypatch.setattr(site.context.spools, "_file_each", 500_000)
    for query in ({}, {"limit": "10"}):
        reply = await site.get(f"namespaces/{team}/allocations", **query)
        assert (reply.status, reply.body["details"]["code"]) == (503, "overloaded")
    assert not site.context.spools.file_bytes
    assert (await site.get(f"namespaces/{team}/allocations", limit="1")).status == 200


# Lists in pages.


@pytest.mark.parametrize("accept", ["application/json", "application/json;as=Table;v=v1;g=meta.k8s.io"])
async def test_long_lists_are_the_same_in_pages_as_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    from bursar.api.objects import object as object_module
    from bursar.store.objects import listing

    team = await site.namespace()
    path, headers = f"namespaces/{team}/allocations", {"accept": accept}
    for index in range(12):
        assert (await site.post(path, allocation(f"job-{index:02}", cpu=1))).status == 201
    whole = (await site.get(path, headers=headers)).body
    part = (await site.get(path, headers=headers, limit="7")).body
    monkeypatch.setattr(object_module, "PAGE_MAX", 2)
    monkeypatch.setattr(object_module, "WHOLE_BYTES_MAX", 1000)
    monkeypatch.setattr(listing, "PAGE_BYTES", 1000)
    monkeypatch.setattr(site.context.spools, "memory_each", 2000)

    def ageless(body: dict[str, object]) -> dict[str, object]:
        return {name: value for name, value in body.items() if name != "rows"}

    for wanted, query in ((whole, {}), (part, {"limit": "7"})):
        reply = await site.get(path, headers=headers, **query)
        rows = "rows" if "rows" in wanted else "items"
        assert ageless(reply.body) == ageless(wanted)
        assert len(reply.body[rows]) == len(wanted[rows])
        assert reply.headers["x-content-type-options"] == "nosniff"
    rest = (await site.get(path, headers=headers, limit="7", **{"continue": part["metadata"]["continue"]})).body
    assert len(rest.get("rows") or rest["items"]) == 5
    assert "continue" not in rest["metadata"]
    await eventually(lambda: nothing_spooled(site))


async def test_pieces_of_a_spool_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "PIECE_BYTES", 7)
    for memory in (0, 20, 1000):
        spools = spool.Spools(memory_each=memory)
        one = spools.open("a")
        for index in range(10):
            await one.write(b"%010d" % index)
        pieces = [piece async for piece in one.read()]
        assert b"".join(pieces) == b"".join(b"%010d" % index for index in range(10))
        assert max(map(len, pieces)) <= 7
        assert (one.size, bool(spools.file_bytes)) == (100, memory < 100)
        one.close()
        one.close()
        assert (spools.memory_bytes, spools.file_bytes.total()) == (0, 0)


async def test_bounds_are_what_the_documents_say() -> None:
    assert (connection.HEADER_BYTES_MAX, connection.HEADERS_MAX, connection.URL_BYTES_MAX) == (65_536, 100, 16_384)
