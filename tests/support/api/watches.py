"""The events of watches, as tests read them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.api.site import Document, Site

Event = Document


@asynccontextmanager
async def watching(
    site: Site, path: str, token: str = "", *, headers: Any = None, url: str = "", **query: Any
) -> AsyncIterator[AsyncIterator[Event]]:
    """The events of a watch, as they come. Server-Sent Events are unwrapped, their ids kept under `id`."""
    sent = {"authorization": f"Bearer {token or site.admin}", **(headers or {})}
    where = f"{url or site.url}/api/v1/{path}"
    params = {"watch": "true", "timeoutSeconds": "60", **query}
    async with site.http.stream("GET", where, params=params, headers=sent) as answer:
        assert answer.status_code == 200, await answer.aread()
        yield _events(answer.aiter_lines())


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    event_id = ""
    async for line in lines:
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield {**json.loads(line.removeprefix("data: ")), "id": event_id}
        elif line.startswith("{"):
            yield json.loads(line)


async def take(events: AsyncIterator[Event], count: int, seconds: float = 20) -> list[Event]:
    async with asyncio.timeout(seconds):
        return [await anext(events) for _ in range(count)]


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(one["type"], one["object"]["metadata"]["name"]) for one in events]


def revision(event: Event) -> int:
    return int(event["object"]["metadata"]["resourceVersion"])


async def newest(site: Site) -> str:
    return (await site.get("allocations", limit=1)).version
