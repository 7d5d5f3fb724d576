"""One API process per module of tests; the objects of a test have names of their own."""

from collections.abc import AsyncIterator

import pytest_asyncio

from support.api.site import Site, opened_site
from support.api.two_tenants import TwoTenants, assembled
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Site]:
    name = await clone_database(embedded_postgres, database_template)
    async with opened_site(_url(embedded_postgres, name)) as one:
        yield one
    await drop_database(embedded_postgres, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cast(site: Site) -> TwoTenants:
    return await assembled(site)
