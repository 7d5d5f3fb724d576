"""A door that agents are served at, on a database of its own."""

from collections.abc import AsyncIterator

import pytest

from support.nodes.agent_streams import Door, opened_app


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[Door]:
    async with opened_app(database_url) as one:
        yield one
