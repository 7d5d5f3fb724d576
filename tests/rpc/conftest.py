"""A gRPC server for agents, on a database of its own."""

from collections.abc import AsyncIterator

import pytest

from support.nodes.agent_streams import Served, opened_app


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[Served]:
    async with opened_app(database_url) as one:
        yield one
