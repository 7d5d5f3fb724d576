"""Reading what an allocation has written: every byte once, through lost connections.

An answer says which placement it is of and with which byte it begins. What breaks is taken up at the byte where it
stopped, and of the same placement, even if the allocation waits again or is gone by then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from bursar.client.calls import ResourcePath
from bursar.client.errors import ApiError, ConnectionFailed, Gone, NotFound
from bursar.client.flow import Feed, Give, HttpRequest, Open, Pause, Read, Response, error_of

# Work may be silent for hours, and so is its log: then it is asked for anew.
SILENCE_SECONDS_MAX = 60.0
# How long a node or the server may be away before the reader is told.
AWAY_SECONDS_MAX = 300.0


class LogPiece(NamedTuple):
    """Bytes that were written one after the other, on one node, by one placement."""

    data: bytes
    offset: int
    node: str
    epoch: int


class _Position:
    """How far a reader has come, and of what it reads."""

    def __init__(self, node: str, epoch: int, offset: int, tail_lines: int | None) -> None:
        self.node = node
        self.epoch = epoch
        self.offset = offset
        self.tail_lines = tail_lines
        self.found = False
        self.over = False
        self.heard_at = time.monotonic()

    def query(self, *, follow: bool) -> dict[str, str]:
        asked = {"offset": str(self.offset), "follow": "true" if follow else "false"}
        if self.tail_lines is not None:
            asked["tailLines"] = str(self.tail_lines)
        if self.node:
            asked["node"] = self.node
        if self.epoch:
            asked["epoch"] = str(self.epoch)
        return asked

    def began(self, headers: Mapping[str, str]) -> None:
        self.node = headers.get("x-log-node", self.node)
        self.epoch = int(headers.get("x-log-epoch") or self.epoch)
        self.offset = int(headers.get("x-log-offset") or self.offset)
        self.over = headers.get("x-log-end") == "true"
        self.tail_lines = None
        self.found = True
        self.heard_at = time.monotonic()

    def take(self, data: bytes) -> LogPiece:
        piece = LogPiece(data, self.offset, self.node, self.epoch)
        self.offset += len(data)
        self.heard_at = time.monotonic()
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
    """What an allocation has written; with `follow` also what it goes on to write, until it has ended.

    Of one of its nodes, the first where none is named, and of its last placement. An allocation that waits has written
    nothing: that is a Conflict, and its message says why it waits.
    """
    where = place.path_of(name, "log")
    position = _Position(node, epoch, offset, tail_lines)
    rounds = 0  # that came one after the other without a byte
    while True:
        before, asked_seconds = position.offset, 0.0
        try:
            yield from _answer(where, position, follow=follow)
            if position.over or not follow:
                return
        except (Gone, NotFound):
            # What was being read has ended, and is not kept any more.
            if not position.found:
                raise
            return
        except (ConnectionFailed, ApiError) as trouble:
            away = time.monotonic() - position.heard_at > AWAY_SECONDS_MAX
            unfound = not position.found and rounds + 1 >= place.retries.attempts_max
            if not trouble.passing or away or unfound:
                raise
            asked_seconds = getattr(trouble, "retry_after", 0.0)
        # The first time it is asked again at once: mostly to hear that it was the end.
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
    position.began(response.headers)
    while (data := (yield Read())) is not None:
        if data:
            yield Give(position.take(data))
