"""`--metrics HOST:PORT`: /metrics alone, on a socket of its own, for a scraper without a token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from bursar.api.http.context import ApiContext
from bursar.api.site.system import read_metrics

PLAIN = "text/plain; charset=utf-8"


class MetricsApp:
    """An ASGI application with one path. There is no authentication: the address of its socket limits its readers."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        _: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] != "/metrics":
            status, media, body = 404, PLAIN, b"only /metrics is served here\n"
        elif scope["method"] not in ("GET", "HEAD"):
            status, media, body = 405, PLAIN, b"only GET is supported here\n"
        else:
            status, media, body = 200, CONTENT_TYPE_LATEST, await read_metrics(self._context)
        headers = [(b"content-type", media.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
