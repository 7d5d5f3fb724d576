"""Logs of an allocation: every byte once, across lost connections.

An answer has its placement and the offset of its first byte. After a break the reader resumes at its offset in the
same placement, even if the allocation is pending again or deleted by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from bursar.client.calls import ResourcePath
from bursar.client.errors import ApiError, ConnectionFailed, Gone, NotFound
from bursar.client.flow import Feed, Give, HttpRequest, Open, Pause, Read, Response, error_of

# Work may write nothing for hours; after this time the request is sent again.
SILENCE_SECONDS_MAX = 60.0
# How long a node or the server may be unreachable before the error is raised.
AWAY_SECONDS_MAX = 300.0


class LogPiece(NamedTuple):
    """Consecutive bytes of one placement's log on one node."""

    data: bytes
    offset: int
    node: str
    epoch: int


class _Position:
    """The position of a reader in the log of a placement."""

    def __init__(self, node: str, epoch: int, offset: int, tail_lines: int | None) -> None:
        self.node = node
        self.epoch = epoch
        self.offset = offset
        self.tail_lines = tail_lines
        self.found = False
        self.finished = False
        self.received_at = time.monotonic()

    def query(self, *, follow: bool) -> dict[str, str]:
        asked = {"offset": str(self.offset), "follow": "true" if follow else "false"}
        if self.tail_lines is not None:
            asked["tailLines"] = str(self.tail_lines)
        if self.node:
            asked["node"] = self.node
        if self.epoch:
            asked["epoch"] = str(self.epoch)
        return asked

    def start(self, headers: Mapping[str, str]) -> None:
        self.node = headers.get("x-log-node", self.node)
        self.epoch = int(headers.get("x-log-epoch") or self.epoch)
        self.offset = int(headers.get("x-log-offset") or self.offset)
        self.finished = headers.get("x-log-end") == "true"
        self.tail_lines = None
        self.found = True
        self.received_at = time.monotonic()

    def take(self, data: bytes) -> LogPiece:
        piece = LogPiece(data, self.offset, self.node, self.epoch)
        self.offset += len(data)
        self.received_at = time.monotonic()
        return piece


def log(
    place: ResourcePath,
    name: str,
    *,
    follow: bool = False,
    tail_lines: int | None = None,
    node: str = "",
    epoch: int = 0,
    offset: int = 0,
) -> Feed[LogPiece]:
    """Read the log of an allocation; with `follow` until it has ended.

    The defaults are its first node and its last placement. A pending allocation has no log: that raises Conflict, whose
    message has the reason why it is pending.
    """
    where = place.path_of(name, "log")
    position = _Position(node, epoch, offset, tail_lines)
    rounds = 0  # consecutive ones without a byte
    while True:
        before, asked_seconds = position.offset, 0.0
        try:
            yield from _answer(where, position, follow=follow)
            if position.finished or not follow:
                return
        except (Gone, NotFound):
            # The log that was being read is no longer stored.
            if not position.found:
                raise
            return
        except (ConnectionFailed, ApiError) as trouble:
            away = time.monotonic() - position.received_at > AWAY_SECONDS_MAX
            unfound = not position.found and rounds + 1 >= place.retries.attempts_max
            if not trouble.passing or away or unfound:
                raise
            asked_seconds = getattr(trouble, "retry_after", 0.0)
        # The first retry is immediate: mostly it learns that the log has ended.
        if rounds or asked_seconds:
            yield Pause(place.retries.pause_seconds(rounds, asked_seconds))
        rounds = rounds + 1 if position.offset == before else 0


def _answer(where: str, position: _Position, *, follow: bool) -> Feed[LogPiece]:
    request = HttpRequest(
        "GET", where, position.query(follow=follow), {"accept": "text/plain, application/json"},
        silence_seconds_max=SILENCE_SECONDS_MAX if follow else None,
    )  # fmt: skip
    response = yield Open(request)
    assert isinstance(response, Response)
    if response.status >= 300:
        raise error_of(response)
    position.start(response.headers)
    while (data := (yield Read())) is not None:
        if data:
            yield Give(position.take(data))
