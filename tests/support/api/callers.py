"""Callers of every role, with what each may see, for tests that ask the API as everybody at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.values.access import Role
from bursar.loops.informer import Informer
from bursar.loops.leader_query import run_answers
from bursar.ops.access.token import create_token
from bursar.ops.runtime.clock import now
from bursar.ops.scheduling.leader import resign, stand
from support.api.families import Family, Mark, Marks, absent
from support.api.site import Site

# Whose things a role sees, by how their tenant is related to its own. A node sees itself and the work on it.
RELATIONS = ("own", "sibling", "child", "parent", "nobody")
EXISTING = frozenset(RELATIONS) - {"nobody"}
SEES: dict[str, frozenset[str]] = {
    "system-admin": EXISTING,
    "service": EXISTING,
    "approver": frozenset({"own", "child"}),
    "billing-admin": EXISTING,
    "tenant-admin": frozenset({"own", "child"}),
    "user": frozenset({"own"}),
    "viewer": frozenset({"own"}),
    "node": frozenset({"own"}),
    "joining node": frozenset(),
    "": frozenset(),  # without a good token
}
SEES_EVERYTHING = frozenset(role for role, relations in SEES.items() if relations == EXISTING)
LETTERS = {
    "A": "system-admin", "S": "service", "P": "approver", "B": "billing-admin", "T": "tenant-admin", "U": "user",
    "V": "viewer", "N": "node", "J": "joining node",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody of a role; the role is empty without a good token."""

    name: str
    role: str
    token: str | None
    family: Family = field(repr=False)
    user: str = ""

    @property
    def tenants(self) -> frozenset[str]:
        return frozenset(self.family.targets[relation].tenant for relation in SEES[self.role])

    @property
    def sees_everything(self) -> bool:
        return self.role in SEES_EVERYTHING

    def may_be_told(self, mark: Mark) -> bool:
        """All that it reads, and the names of the tenants above."""
        is_above = mark.is_tenant and bool(self.tenants) and mark.tenant == self.family.parent.tenant
        return self.reads(mark) or is_above

    def reads(self, mark: Mark) -> bool:
        return mark.public or self.sees_everything or self.owns(mark)

    def owns(self, mark: Mark) -> bool:
        """A tenant's people own all that is their tenant's, but users and viewers not the accounts of others; a node
        owns the work that is bound to it."""
        if self.role == "node":
            return self.family.own.names["node"] in mark.nodes
        return mark.tenant in self.tenants and (
            mark.user is None or self.role == "tenant-admin" or mark.user in ("", self.user)
        )


@asynccontextmanager
async def answering(site: Site) -> AsyncIterator[None]:
    """A leader that knows everybody's work and answers questions, and places nothing."""
    informer = Informer(site.context.runtime)
    await informer.load()
    assert await stand(site.context.database, "matrix", 3600.0) is not None
    task = asyncio.create_task(run_answers(site.context.runtime, lambda: informer.cluster, SchedulingPolicy))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await resign(site.context.database, "matrix")


async def assembled(site: Site, families: dict[str, Family], fingerprints: Marks) -> list[Caller]:
    """Somebody of every role, and several without a good token."""
    shared = {"viewer": "user", "joining node": "user"}
    found = []
    for role in LETTERS.values():
        family = families[shared.get(role, role)]
        if role == "joining node":
            token, user = await site.token("node", node="joining", single_use=True), ""
        elif role in family.own.tokens:
            token = family.own.tokens[role]
            user = (await site.get("whoami", token=token)).body["user"]
        else:
            decides = {"tenants": [family.own.tenant], "gates": ["*"]} if role == "approver" else {}
            token, user = await site.token(role, user=f"the-{role}", **decides), f"the-{role}"
        found.append(Caller(role, role, token, family, user))
    without: dict[str, str | None] = {"nobody": None, "an unknown token": "bsr_0123456789ab_" + "x" * 43}
    without |= await tokens_of_the_gone(site, fingerprints)
    return found + [Caller(name, "", token, families["user"]) for name, token in without.items()]


async def tokens_of_the_gone(site: Site, fingerprints: Marks) -> dict[str, str]:
    """Tokens of a tenant that was deleted, and of one that never was."""
    gone = fingerprints.tenant()
    await site.post("tenants", {"metadata": {"name": gone}, "spec": {}})
    tokens = {f"{role} of a deleted tenant": await site.token(role, tenant=gone) for role in ("tenant-admin", "user")}
    assert (await site.delete(f"tenants/{gone}")).status == 200
    async with site.context.database.reader() as db:
        made = await create_token(db, role=Role.USER, tenant=absent(fingerprints).tenant, created_by="test", now=now())
    assert isinstance(made, tuple)
    return {**tokens, "user of no tenant": made[1]}
