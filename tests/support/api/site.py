"""A complete API process inside this one: a real application on a database of its own, behind a real socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

import bursar
from bursar.api.http.app import App
from bursar.api.http.connection import ConnectionGate
from bursar.api.http.context import ApiContext
from bursar.api.http.route import Route
from bursar.api.serve import HttpServer, opened_context
from bursar.api.site.routes import build_routes
from bursar.core.values.access import Role
from bursar.ops.access.token import create_token
from bursar.ops.lifecycle.bootstrap import bootstrap
from bursar.ops.runtime.clock import now
from bursar.store.objects import object as object_store
from bursar.store.objects.change import load_position
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.registry import BY_PLURAL
from bursar.wire.shared.kind import Kind

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY = "application/apply-patch+yaml"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its body already read."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def message(self) -> str:
        return str(self.body["message"])

    @property
    def version(self) -> str:
        return str(self.body["metadata"]["resourceVersion"])

    @property
    def names(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.body["items"]]


@dataclass(slots=True)
class Site:
    """An API process, with short names for requests to it."""

    context: ApiContext
    url: str
    http: httpx2.AsyncClient
    admin: str
    _used: int = 0

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = None,
        media: str = "",
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Reply:
        """One request. A path without a leading slash is below /api/v1; bytes are sent as they are."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"authorization": f"Bearer {self.admin if token is None else token}", **(headers or {})}
        if raw or media:
            sent.setdefault("content-type", media or "application/json")
        where = path if path.startswith("/") else f"/api/v1/{path}"
        answer = await self.http.request(method, self.url + where, content=raw, headers=sent, params=query or None)
        is_json = answer.headers.get("content-type", "").startswith("application/json") and answer.content
        return Reply(answer.status_code, answer.json() if is_json else answer.text, answer.headers)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Reply:
        return await self.ask("POST", path, body, **options)

    async def put(self, path: str, body: Any, **options: Any) -> Reply:
        return await self.ask("PUT", path, body, **options)

    async def patch(self, path: str, body: Any, media: str = MERGE, **options: Any) -> Reply:
        return await self.ask("PATCH", path, body, media=media, **options)

    async def delete(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.ask("DELETE", path, body, **options)

    async def token(self, role: str, **whose: Any) -> str:
        every = {"tenants": ["*"], "gates": ["*"]} if role == "approver" else {}
        reply = await self.post("tokens", {"role": role, **every, **whose})
        assert reply.status == 201, reply
        return str(reply.body["status"]["token"])

    def name(self, stem: str = "team") -> str:
        """A name that no other test of this module uses."""
        self._used += 1
        return f"{stem}-{self._used}"

    async def namespace(self, tenant: str = "", name: str = "") -> str:
        """A new namespace, and a new tenant of the same name unless one is given."""
        name = name or self.name()
        if not tenant:
            reply = await self.post("tenants", {"metadata": {"name": name}, "spec": {}})
            assert reply.status == 201, reply
        labels = {"bursar.io/tenant": tenant or name}
        reply = await self.post("namespaces", {"metadata": {"name": name, "labels": labels}})
        assert reply.status == 201, reply
        return name

    async def state(self) -> tuple[Any, ...]:
        """Everything a refused request must leave as it was: the revision, all objects, all counters."""
        async with self.context.database.reader() as db, db.transaction(isolation="repeatable_read"):
            position = await load_position(db)
            counters = await quota_store.load_all(db)
            charges = await db.fetch(object_store.SQL.charges)
            objects = await db.fetch("SELECT kind, namespace, name, revision FROM object ORDER BY 1, 2, 3")
            tokens = await db.fetchval("SELECT count(*) FROM token")
        return position, counters, [tuple(row) for row in charges], [tuple(row) for row in objects], tokens


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    """Ask again and again until it holds, where there is nothing to be woken by."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def opened_site(database_url: str, **settings: Any) -> AsyncIterator[Site]:
    """An API process on this database, with the default objects and an administrator's token."""
    async with opened_context(database_url, **settings) as context:
        await bootstrap(context.runtime)
        async with context.database.reader() as db:
            made = await create_token(db, role=Role.SYSTEM_ADMIN, user="admin", created_by="test", now=now())
        assert isinstance(made, tuple)
        async with served(context) as url, httpx2.AsyncClient(timeout=30, trust_env=False, verify=False) as http:
            yield Site(context, url, http, made[1])


@asynccontextmanager
async def served(
    context: ApiContext,
    gate: ConnectionGate | None = None,
    *,
    tls: tuple[Path, Path] | None = None,
) -> AsyncIterator[str]:
    """The application behind a socket on loopback; with a certificate and its key, behind TLS."""
    app = App(context, _routes(tuple(BY_PLURAL)))
    gate = ConnectionGate() if gate is None else gate
    config = uvicorn.Config(
        app, http=gate.protocol(), ws="none", lifespan="off", log_level="warning", access_log=False, date_header=False,
        server_header=False, timeout_graceful_shutdown=1, ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )  # fmt: skip
    server = HttpServer(config, gate)
    # With its protocol named, asyncio sends each write at once: else every answer waits for a delayed acknowledgement.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        looking = asyncio.create_task(gate.keep_looking())
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            app.end_streams()
            await running
            looking.cancel()


def collection(kind: Kind, namespace: str = "") -> str:
    """The path of the objects of a kind."""
    return f"{kind.root}/namespaces/{namespace}/{kind.plural}" if kind.namespaced else f"{kind.root}/{kind.plural}"


@cache
def _routes(kinds: tuple[str, ...]) -> list[Route]:
    """The routes while these kinds are registered. To render their documents takes longer than most tests."""
    return build_routes(bursar.__version__)


def allocation(
    name: str, *, spec: Document | None = None, labels: Mapping[str, str] | None = None, **requests: Any
) -> Document:
    """A body; `gpu=4` is short for the request of four GPUs."""
    resources = {key.replace("gpu", "nvidia.com/gpu"): str(value) for key, value in requests.items()}
    metadata: Document = {"name": name, **({"labels": dict(labels)} if labels else {})}
    return {"metadata": metadata, "spec": {"resources": {"requests": resources}, **(spec or {})}}


async def made(site: Site, namespace: str, name: str, **options: Any) -> Document:
    reply = await site.post(f"namespaces/{namespace}/allocations", allocation(name, **options))
    assert reply.status == 201, reply
    body: Document = reply.body
    return body


async def node(site: Site, name: str = "", **options: Any) -> Document:
    reply = await site.post("nodes", node_body(name or site.name("worker")), **options)
    assert reply.status == 201, reply
    body: Document = reply.body
    return body


def node_body(name: str) -> Document:
    return {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}}}


@asynccontextmanager
async def nothing_stored(site: Site) -> AsyncIterator[str]:
    """A namespace with one allocation in it, and the assertion that the block changes nothing at all."""
    if (await site.get("namespaces/quiet")).status == 404:
        await site.namespace(name="quiet")
        assert (await site.post("namespaces/quiet/allocations", allocation("there", cpu=1))).status == 201
    before = await site.state()
    yield "quiet"
    assert await site.state() == before


async def refused(site: Site, body: Any, status: int = 400, **options: Any) -> Reply:
    """Creating this allocation is refused with this status, in Kubernetes' form, and stores nothing."""
    async with nothing_stored(site) as team:
        reply = await site.post(f"namespaces/{team}/allocations", body, **options)
        assert reply.status == status, reply
        assert reply.body["kind"] == "Status"
        assert reply.body["code"] == status
        assert reply.body["details"]["requestId"]
        assert len(json.dumps(reply.body)) < 40_000, "no answer grows with its cause"
    return reply
