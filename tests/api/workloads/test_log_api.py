"""Logs through the API, from real log servers of agents with real certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bursar.api.objects import watch
from bursar.client import AsyncClient, Conflict, Gone, NotFound, Retries, Unavailable
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Refusal
from bursar.rpc.agent_client import Agents, Resolve
from support.api.site import Site, allocation, eventually
from support.nodes.log_nodes import Logbook, advertise, kept
from support.process.server import free_port
from support.runtime.runtime import bind, end, node

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENT = Retries(attempts_max=5, seconds_max=10)


@pytest.fixture(autouse=True)
def agents(site: Site) -> Agents:
    """One that calls agents as the server does."""
    if site.context.log_source is None:
        site.context.log_source = Agents(site.context.database)
    assert isinstance(site.context.log_source, Agents)
    return site.context.log_source


class Placed:
    """An allocation on nodes that keep its log."""

    def __init__(self, site: Site, namespace: str, name: str, uid: str, books: list[Logbook]) -> None:
        self.site = site
        self.namespace = namespace
        self.name = name
        self.uid = uid
        self.ledger, *self.others = books

    @property
    def path(self) -> str:
        return f"namespaces/{self.namespace}/allocations/{self.name}/log"

    def write(self, data: bytes, *, epoch: int = 1, at: int = 0) -> None:
        self.ledger.write(self.uid, epoch, data, at)

    async def end(self) -> None:
        self.ledger.end(self.uid, 1)
        await end(self.site.context.runtime, self.namespace, self.name, Phase.SUCCEEDED)

    async def read(self, **query: Any) -> str:
        reply = await self.site.get(self.path, **query)
        assert reply.status == 200, reply
        return str(reply.body)


@asynccontextmanager
async def placed(site: Site, home: Path, nodes: int = 1, **spec: Any) -> AsyncIterator[Placed]:
    namespace, name = await site.namespace(), "train"
    names = [site.name("node") for _ in range(nodes)]
    for one in names:
        await node(site.context.runtime, one, cpu=8)
    made = await site.post(
        f"namespaces/{namespace}/allocations",
        allocation(name, spec={"command": ["sleep", "1"], "nodes": nodes, **spec}, cpu=1),
    )
    assert made.status == 201, made
    async with AsyncExitStack() as stack:
        books = []
        for one in names:
            (home / one).mkdir()
            books.append(await stack.enter_async_context(kept(site.context.runtime, one, home / one)))
        await bind(site.context.runtime, namespace, name, *names)
        yield Placed(site, namespace, name, made.body["metadata"]["uid"], books)


# Reading.


async def test_what_was_written_is_read(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"one\ntwo\nthree\n")
        reply = await site.get(one.path)
        assert (reply.status, reply.body) == (200, "one\ntwo\nthree\n")
        assert reply.headers["content-type"].startswith("text/plain")
        assert reply.headers["x-log-node"] == one.ledger.name
        assert (reply.headers["x-log-epoch"], reply.headers["x-log-offset"]) == ("1", "0")
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert await one.read(tailLines=1) == "three\n"
        assert await one.read(tailLines=0) == ""
        assert await one.read(offset=4) == "two\nthree\n"
        assert await one.read(offset=4, limitBytes=5) == "two\nt"
        assert await one.read(epoch=1, node=one.ledger.name) == "one\ntwo\nthree\n"


async def test_ended_work_is_read_for_as_long_as_its_node_keeps_it(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"done\n")
        await one.end()
        assert await one.read(follow="true") == "done\n"
        reply = await site.get(one.path, offset=5, follow="true")
        assert (reply.body, reply.headers["x-log-end"]) == ("", "true")
        (one.ledger.home / f"{one.uid}.1" / "output.0").unlink()
        (one.ledger.home / f"{one.uid}.1").rmdir()
        gone = await site.get(one.path)
        assert gone.status == 410
        assert "keeps no log of train any more" in gone.message


async def test_who_follows_hears_what_is_written_later_until_the_end(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"one\n")
        headers = {"authorization": f"Bearer {site.admin}"}
        where = f"{site.url}/api/v1/{one.path}"
        async with site.http.stream("GET", where, params={"follow": "true"}, headers=headers) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == b"one\n"
            one.write(b"two\n")
            assert await anext(pieces) == b"two\n"
            one.write(b"three\n")
            await one.end()
            assert b"".join([piece async for piece in pieces]) == b"three\n"
        await eventually(lambda: _is(site.context.watches.total() == 0))


async def test_silent_work_is_answered_at_once_and_its_seat_is_given_back(
    site: Site, agents: Agents, tmp_path: Path
) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"")
        headers, where = {"authorization": f"Bearer {site.admin}"}, f"{site.url}/api/v1/{one.path}"
        async with site.http.stream("GET", where, params={"follow": "true"}, headers=headers, timeout=10) as answer:
            assert (answer.status_code, answer.headers["x-log-offset"]) == (200, "0")
            assert site.context.watches.total() == 1
            assert agents._in_use == 1
        await eventually(lambda: _is(site.context.watches.total() == 0 and agents._in_use == 0))


async def test_the_last_no_lines_are_what_comes_after_them(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"old\nhalf")
        headers, where = {"authorization": f"Bearer {site.admin}"}, f"{site.url}/api/v1/{one.path}"
        query = {"follow": "true", "tailLines": "0"}
        async with site.http.stream("GET", where, params=query, headers=headers, timeout=10) as answer:
            assert answer.headers["x-log-offset"] == "8"
            one.write(b" a line\n")
            assert await anext(answer.aiter_bytes()) == b" a line\n"


async def test_each_node_of_several_has_its_own(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path, nodes=2) as one:
        (other,) = one.others
        one.write(b"first\n")
        other.write(one.uid, 1, b"second\n")
        assert await one.read() == "first\n"
        assert await one.read(node=other.name) == "second\n"
        refused = await site.get(one.path, node="elsewhere")
        assert refused.status == 400
        assert f"it is on {one.ledger.name}, {other.name}" in refused.message


async def test_kubernetes_clients_read_the_pods_log(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"one\ntwo\n")
        where = f"namespaces/{one.namespace}/pods/{one.name}/log"
        assert (await site.get(where, container="allocation", tailLines="1")).body == "two\n"
        assert (await site.get(where, container="sidecar")).status == 400
        refused = await site.get(where, sinceSeconds="60")
        assert refused.status == 400
        assert "sinceSeconds is not offered" in refused.message
        assert (await site.get(where, timestamps="false")).status == 200
        missing = await site.get(f"namespaces/{one.namespace}/pods/nothing/log")
        assert (missing.status, missing.message) == (404, 'pods "nothing" not found')


# Who may.


async def test_another_tenants_log_does_not_exist(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"secret\n")
        mine = await site.token("viewer", tenant=one.namespace)
        assert await one.read(token=mine) == "secret\n"
        other = await site.token("tenant-admin", tenant=await site.namespace())
        for path in (one.path, one.path.replace("allocations", "pods")):
            reply = await site.get(path, token=other)
            assert reply.status == 404
            assert "secret" not in str(reply.body)


@pytest.mark.parametrize("role", ["node", "billing-admin"])
async def test_who_need_not_know_what_work_writes_may_not_read_it(site: Site, tmp_path: Path, role: str) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"secret\n")
        token = await site.token(role, **({"node": one.ledger.name} if role == "node" else {}))
        for path in (one.path, one.path.replace("allocations", "pods")):
            assert (await site.get(path, token=token)).status == 403


async def test_a_revoked_token_ends_what_it_follows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "KEEPALIVE_SECONDS", 0.0)
    monkeypatch.setattr("bursar.api.workloads.log.CHECK_SECONDS", 0.05)
    async with placed(site, tmp_path) as one:
        one.write(b"one\n")
        made = await site.post("tokens", {"role": "viewer", "tenant": one.namespace})
        headers = {"authorization": f"Bearer {made.body['status']['token']}"}
        where = f"{site.url}/api/v1/{one.path}"
        async with site.http.stream("GET", where, params={"follow": "true"}, headers=headers) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == b"one\n"
            await site.delete(f"tokens/{made.body['metadata']['name']}")
            with pytest.raises(httpx2.RemoteProtocolError):
                await _rest(pieces)


# What cannot be read.


async def test_what_waits_says_why(site: Site) -> None:
    namespace = await site.namespace()
    where = f"namespaces/{namespace}/allocations"
    await site.post(where, allocation("late", spec={"command": ["true"]}, cpu=1))
    await site.post(where, allocation("room", cpu=1))
    reply = await site.get(f"{where}/late/log")
    assert reply.status == 409
    assert "late waits, and has written nothing yet" in reply.message
    assert reply.body["details"]["causes"][0]["reason"] == "not_yet_tried"
    assert "bursar explain late" in reply.body["details"]["hint"]
    silent = await site.get(f"{where}/room/log")
    assert (silent.status, "has no command" in silent.message) == (409, True)


async def test_what_has_not_begun_is_asked_for_again(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        reply = await site.get(one.path)
        assert reply.status == 409
        assert "has not begun yet" in reply.message
        assert reply.headers["retry-after"] == "1"


async def test_a_node_without_an_agent_is_said(site: Site) -> None:
    namespace, name = await site.namespace(), site.name("node")
    await node(site.context.runtime, name, cpu=8)
    where = f"namespaces/{namespace}/allocations"
    await site.post(where, allocation("train", spec={"command": ["true"]}, cpu=1))
    await bind(site.context.runtime, namespace, "train", name)
    reply = await site.get(f"{where}/train/log")
    assert (reply.status, reply.message) == (503, f"node {name} runs no agent, so logs are unavailable")


async def test_a_node_that_is_away_is_said_and_found_again(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"here\n")
        await advertise(site.context.runtime, one.ledger.name, f"127.0.0.1:{free_port()}")
        reply = await site.get(one.path)
        assert reply.status == 503
        assert f"the agent of node {one.ledger.name} does not answer" in reply.message
        assert reply.body["details"]["retryAfterSeconds"] == 2
        await advertise(site.context.runtime, one.ledger.name, one.ledger.address)
        assert await one.read() == "here\n"


async def test_another_node_at_its_address_is_not_believed(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"mine\n")
        imposter = site.name("node")
        await node(site.context.runtime, imposter, cpu=8)
        async with kept(site.context.runtime, imposter, one.ledger.home) as other:
            await advertise(site.context.runtime, one.ledger.name, other.address)
            assert (await site.get(one.path)).status == 503


@pytest.mark.parametrize("address", ["169.254.7.7:9", "[fe80::7%lo]:9", "0.0.0.0:9"])
async def test_no_address_that_is_no_nodes_is_called(site: Site, agents: Agents, tmp_path: Path, address: str) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"here\n")
        await advertise(site.context.runtime, one.ledger.name, address)
        assert isinstance(await agents._take(one.ledger.name), Refusal), "before anything is sent"
        reply = await site.get(one.path)
        assert reply.status == 503
        assert "link-local" in reply.message
        assert address not in str(reply.body)
        assert one.ledger.name not in agents._lines, "no channel was made"


@pytest.mark.parametrize(
    ("numbers", "called"),
    [
        (["127.0.0.1"], ""),
        (["127.0.1.1", "::1"], ""),
        (["169.254.169.254"], ""),
        (["::ffff:169.254.169.254", "fe80::1%lo", "0.0.0.0", "::", "224.0.0.1"], ""),
        ([], ""),
        (["169.254.169.254", "10.0.0.9"], "10.0.0.9:7"),
        (["fd00::9"], "[fd00::9]:7"),
    ],
)
async def test_a_name_is_held_to_the_rule_for_numbers_where_it_resolves_to(
    site: Site, agents: Agents, tmp_path: Path, numbers: list[str], called: str
) -> None:
    """A channel connects when it is first used: none of these is."""
    async with placed(site, tmp_path) as one:
        await advertise(site.context.runtime, one.ledger.name, "gpu-7.example:7")
        names = Agents(site.context.database, resolve=hosts({"gpu-7.example": numbers}))
        line = await names._take(one.ledger.name)
        assert ("" if isinstance(line, Refusal) else line.address) == called
        await names.close()


async def test_a_name_is_called_at_the_number_that_was_checked(site: Site, agents: Agents, tmp_path: Path) -> None:
    """The address is resolved once per reading, and the server there must still be the node, by its certificate."""
    async with placed(site, tmp_path) as one:
        one.write(b"by name\n")
        port = one.ledger.address.rpartition(":")[2]
        await advertise(site.context.runtime, one.ledger.name, f"Agent.localhost:{port}")
        known = {"Agent.localhost": ["169.254.169.254", "127.0.0.1"]}
        site.context.log_source = Agents(site.context.database, credentials=agents._credentials, resolve=hosts(known))
        try:
            assert await one.read() == "by name\n"
            known["Agent.localhost"] = ["169.254.169.254"]
            assert "link-local" in (await site.get(one.path)).message
        finally:
            await site.context.log_source.close()
            site.context.log_source = agents


def hosts(known: dict[str, list[str]]) -> Resolve:
    async def resolve(host: str) -> list[str]:
        return known[host]

    return resolve


async def test_a_log_is_read_only_from_nodes_that_the_allocation_was_on(site: Site, tmp_path: Path) -> None:
    """For another node's name, the server calls nobody, however that node's agent would answer."""
    async with placed(site, tmp_path) as one, placed(site, tmp_path) as other:
        one.write(b"here\n")
        other.ledger.write(one.uid, 7, b"of nobody\n")
        other.ledger.write(one.uid, 1, b"of nobody\n")
        for node_name, epoch in ((other.ledger.name, 7), (one.ledger.name, 7), (site.name("absent"), 7)):
            reply = await site.get(one.path, node=node_name, epoch=epoch)
            assert reply.status == 410, reply
            assert "was not on node" in reply.message
        assert (await site.get(one.path, node=other.ledger.name, epoch=1)).status == 400
        assert (await site.get(one.path, node=other.ledger.name)).status == 400


async def test_without_certificates_only_this_machine_is_called(site: Site, tmp_path: Path) -> None:
    secure, insecure = site.context.log_source, Agents(site.context.database, insecure=True)
    site.context.log_source = insecure
    try:
        async with placed(site, tmp_path) as one:
            (tmp_path / "plain").mkdir()
            async with kept(site.context.runtime, one.ledger.name, tmp_path / "plain", insecure=True) as plain:
                plain.write(one.uid, 1, b"plain\n")
                assert await one.read() == "plain\n"
                await advertise(site.context.runtime, one.ledger.name, "192.0.2.1:50051")
                assert isinstance(await site.context.log_source._take(one.ledger.name), Refusal), (
                    "before anything is sent"
                )
                reply = await site.get(one.path)
                assert reply.status == 503
                assert "only agents on this machine are called" in reply.message
    finally:
        await site.context.log_source.close()
        site.context.log_source = secure


@pytest.mark.parametrize(
    "query", [{"tailLines": "-1"}, {"offset": "x"}, {"epoch": "1" * 19}, {"limitBytes": "1.5"}, {"previous": "true"}]
)
async def test_what_cannot_be_meant_is_refused(site: Site, tmp_path: Path, query: dict[str, str]) -> None:
    async with placed(site, tmp_path) as one:
        one.write(b"one\n")
        assert (await site.get(one.path, **query)).status == 400


# Channels.


async def test_channels_are_kept_and_bounded(
    site: Site, agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bursar.rpc.agent_client.IDLE_MAX", 1)
    async with placed(site, tmp_path, nodes=3) as one:
        for ledger in (one.ledger, *one.others):
            ledger.write(one.uid, 1, b"x")
        first, second, third = (ledger.name for ledger in (one.ledger, *one.others))
        await one.read(node=first)
        line = agents._lines[first]
        await one.read(node=first)
        assert agents._lines[first] is line
        await one.read(node=second)
        await one.read(node=third)
        await eventually(lambda: _is(list(agents._lines) == [third]))


async def test_more_than_can_be_read_at_once_is_refused(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bursar.rpc.agent_client.IN_USE_MAX", 0)
    async with placed(site, tmp_path) as one:
        one.write(b"x")
        reply = await site.get(one.path)
        assert (reply.status, reply.body["details"]["code"]) == (503, "overloaded")


# Through the SDK.


async def read_all(client: AsyncClient, one: Placed, **query: Any) -> bytes:
    async with asyncio.timeout(30):
        return b"".join([piece.data async for piece in client.allocations(one.namespace).log(one.name, **query)])


async def test_the_sdk_reads_and_follows(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one, AsyncClient(site.url, site.admin, retries=PATIENT) as client:
        with pytest.raises(Conflict, match="has not begun"):
            await read_all(client, one)
        one.write(b"one\ntwo\n")
        assert await read_all(client, one, tail_lines=1) == b"two\n"
        following = asyncio.create_task(read_all(client, one, follow=True, tail_lines=1))
        await eventually(lambda: _is(site.context.watches.total() == 1))
        one.write(b"three\n")
        await one.end()
        assert await following == b"two\nthree\n"
        with pytest.raises(NotFound):
            await read_all(client, Placed(site, one.namespace, "nothing", "", [one.ledger]), follow=True)
        with pytest.raises(Gone):
            await read_all(client, one, node=one.ledger.name, epoch=7)


async def _is(holds: bool) -> bool:
    return holds


async def test_the_sdk_takes_up_where_it_was_cut_off(site: Site, tmp_path: Path) -> None:
    """Every byte once, though the node goes away, comes back, and has dropped a part of what it kept."""
    async with placed(site, tmp_path) as one, AsyncClient(site.url, site.admin, retries=PATIENT) as client:
        pieces = client.allocations(one.namespace).log(one.name, follow=True)
        name, home = one.ledger.name, one.ledger.home
        async with kept(site.context.runtime, name, home) as first:
            first.write(one.uid, 1, b"one\n")
            assert (await anext(pieces)).data == b"one\n"
        # Its server has closed; the next one listens at another address.
        async with kept(site.context.runtime, name, home) as second:
            second.write(one.uid, 1, b"two\n")
            piece = await anext(pieces)
            assert (piece.data, piece.offset, piece.node, piece.epoch) == (b"two\n", 4, name, 1)
        (home / f"{one.uid}.1" / "output.0").unlink()
        async with kept(site.context.runtime, name, home) as third:
            third.write(one.uid, 1, b"much later\n", at=1000)
            third.end(one.uid, 1)
            left = [(piece.offset, piece.data) async for piece in pieces]
        assert left == [(1000, b"much later\n")]


async def test_what_is_cut_off_is_not_taken_for_the_end(site: Site, tmp_path: Path) -> None:
    async with placed(site, tmp_path) as one:
        headers, where = {"authorization": f"Bearer {site.admin}"}, f"{site.url}/api/v1/{one.path}"
        app = kept(site.context.runtime, one.ledger.name, one.ledger.home)
        ledger = await app.__aenter__()
        ledger.write(one.uid, 1, b"one\n")
        async with site.http.stream("GET", where, params={"follow": "true"}, headers=headers) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == b"one\n"
            await app.__aexit__(None, None, None)
            with pytest.raises(httpx2.RemoteProtocolError):
                await _rest(pieces)


async def _rest(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def test_the_sdk_gives_up_on_a_node_that_has_no_agent(site: Site) -> None:
    namespace, name = await site.namespace(), site.name("node")
    await node(site.context.runtime, name, cpu=8)
    await site.post(f"namespaces/{namespace}/allocations", allocation("train", spec={"command": ["true"]}, cpu=1))
    await bind(site.context.runtime, namespace, "train", name)
    once = Retries(attempts_max=1)
    async with AsyncClient(site.url, site.admin, retries=once) as client:
        with pytest.raises(Unavailable, match="runs no agent"):
            [piece async for piece in client.allocations(namespace).log("train")]
