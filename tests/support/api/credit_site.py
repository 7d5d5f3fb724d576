"""A tenant with credit, and short words for what tests ask about it over HTTP."""

from __future__ import annotations

from typing import Any

from support.api.site import Reply, Site

GPU = "nvidia.com/gpu"
H100 = "h100"


class Bank:
    """A tenant with an account, and a user of it."""

    def __init__(self, site: Site, tenant: str, user: str) -> None:
        self.site, self.tenant, self.user = site, tenant, user
        self._requests = 0

    def id(self) -> str:
        self._requests += 1
        return f"{self.tenant}-{self._requests}"

    async def topup(self, amount: Any, account: str = "", **more: Any) -> Reply:
        body = {"amount": amount, "account": account or self.tenant, "request_id": self.id(), **more}
        return await self.site.post("topups", body)

    async def balance(self, account: str = "") -> dict[str, Any]:
        reply = await self.site.get("balance", account=account or self.tenant)
        assert reply.status == 200, reply
        return dict(reply.body)

    async def lease(self, job: str = "train", *, token: str = "", **more: Any) -> Reply:
        body = {"job_id": job, "gpu_type": H100, "gpu_count": 4, "window_seconds": 15, "request_id": self.id()}
        return await self.site.post("leases", {**body, **more}, token=token or self.user)

    async def leased(self, job: str = "train", **more: Any) -> str:
        reply = await self.lease(job, **more)
        assert reply.status == 201, reply
        return str(reply.body["lease_id"])

    async def act(self, lease: str, verb: str, *, token: str = "", **body: Any) -> Reply:
        body.setdefault("request_id", self.id())
        return await self.site.post(f"leases/{lease}/{verb}", body, token=token or self.user)

    async def limit(self, **limits: Any) -> None:
        reply = await self.site.put(f"limits/{self.tenant}", limits)
        assert reply.status == 200, reply


async def bank(site: Site, credit: str = "50") -> Bank:
    await priced(site)
    tenant = await site.namespace()
    one = Bank(site, tenant, await site.token("user", tenant=tenant, user="ada"))
    if credit:
        assert (await one.topup(credit)).status == 201
    return one


async def priced(site: Site) -> None:
    """An H100 costs a hundredth of a credit a second."""
    if not (await site.get("prices", resource=GPU)).body["items"]:
        body = {"resource": GPU, "class": H100, "per_second": "0.01"}
        assert (await site.post("prices", body)).status == 201


async def money(site: Site) -> list[Any]:
    """Everything that a refused request must leave as it was."""
    tables = ("account", "entry", "lease", "lease_ended", "price", "usage_event", "notice")
    async with site.context.database.reader() as db:
        rows = [await db.fetch(f"SELECT * FROM {table} ORDER BY 1") for table in tables]
    return [[tuple(row) for row in some] for some in rows]


def fields(reply: Reply) -> list[str]:
    return [one.get("field", "") for one in reply.body["details"].get("causes", ())]


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.body["details"]["code"]
