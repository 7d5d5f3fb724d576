"""An approver of one tenant reads everything that it may read, and learns nothing of other tenants."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from support.api.callers import answering
from support.api.families import Family, Marks, founded, prepare
from support.api.operations import Filled, Filler, Unfilled, operations
from support.api.raw_http import Wire, ask_all
from support.api.site import Site, opened_site
from support.api.table_dumps import none
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True, slots=True)
class Approver:
    """An approver of the first tenant of one family, beside another family."""

    site: Site
    token: str
    family: Family
    fingerprints: Marks

    def hidden(self, *texts: bytes) -> set[str]:
        """Marks of tenants that it does not decide for. The names of the tenants above are no secret."""
        seen = {self.family.own.tenant, self.family.child.tenant}
        known = self.fingerprints.known
        return {
            text
            for text in self.fingerprints.in_(*texts)
            if not known[text].public and known[text].tenant not in seen and text != self.family.parent.tenant
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def approver(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Approver]:
    name = await clone_database(embedded_postgres, database_template)
    async with opened_site(_url(embedded_postgres, name), requests_per_minute=10**9) as site:
        fingerprints = Marks()
        await prepare(site)
        family = await founded(site, fingerprints)
        await founded(site, fingerprints)
        token = await site.token("approver", user="ann", tenants=[family.own.tenant], gates=["manual"])
        async with answering(site):
            yield Approver(site, token, family, fingerprints)
    await drop_database(embedded_postgres, name)


async def test_no_answer_tells_of_tenants_that_it_does_not_decide_for(approver: Approver) -> None:
    document = (await approver.site.get("/openapi.json")).body
    filler, asked = Filler(document), list[Filled]()
    for operation in operations(document):
        if operation.method == "GET":
            for target in approver.family.targets.values():
                try:
                    asked += filler.fill(operation, target)
                except Unfilled:
                    continue

    async def told(wire: Wire, one: Filled) -> tuple[Filled, int, set[str]]:
        answer = await wire.ask(one.raw(approver.token))
        return one, answer.status, approver.hidden(answer.head, answer.body) - approver.fingerprints.in_(one.asked)

    answers = await ask_all(approver.site.url, asked, told)
    telling = ((one, status, hidden) for one, status, hidden in answers if hidden)
    none(f"{one.operation.id} ({one.where}) answers {status} and tells {hidden}" for one, status, hidden in telling)
    assert sum(status == 200 for _, status, _ in answers) > 100
