"""A door that agents are served at, on a database of its own."""

from collections.abc import AsyncIterator

import pytest

from support.nodes.agent_streams import Door, opened_door


@pytest.fixture
async def door(database_url: str) -> AsyncIterator[Door]:
    async with opened_door(database_url) as one:
        yield one
