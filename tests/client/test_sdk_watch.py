"""The watch, driven by hand through everything a network and a server can do to it."""

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from bursar.client import ConnectionFailed, Event, Forbidden
from bursar.client import watch as watching
from bursar.client.flow import Give, Open, Pause, Read, Response, SendRequest, resume
from support.client.driving import ALLOCATIONS, JSON, LOST

OPENED = Response(200, JSON)
END = None


def thing(name: str, revision: int, uid: str = "") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(revision)}}


def listed(revision: int, *things: dict[str, Any]) -> Response:
    body = {"metadata": {"resourceVersion": str(revision)}, "items": list(things)}
    return Response(200, JSON, json.dumps(body).encode())


def line(kind: str, one: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode() + b"\n"


class Script:
    """What comes of each step, in order; the watch ends when the script does."""

    def __init__(self, *outcomes: Any, **options: Any) -> None:
        self._outcomes = list(outcomes)
        self._flow = watching.watch(ALLOCATIONS, **options)
        self.opened_at: list[str] = []
        self.lists = 0
        self.pauses: list[float] = []

    def run(self) -> list[tuple[str, str]]:
        return [(event.type, event.object["metadata"]["name"]) for event in self._events()]

    def _events(self) -> Iterable[Event]:
        step = next(self._flow)
        while True:
            if isinstance(step, Give):
                yield step.value
                step = self._flow.send(None)
                continue
            if isinstance(step, Pause):
                self.pauses.append(step.seconds)
                step = self._flow.send(None)
                continue
            if not self._outcomes:
                return
            if isinstance(step, Open):
                self.opened_at.append(step.request.query["resourceVersion"])
            self.lists += isinstance(step, SendRequest)
            assert isinstance(step, Open | SendRequest | Read)
            step = resume(self._flow, self._outcomes.pop(0))


def test_what_there_is_and_then_what_changes() -> None:
    script = Script(
        listed(7, thing("a", 3)),
        OPENED,
        line("ADDED", thing("b", 8)),
        line("DELETED", thing("a", 9)),
        resource_version="",
    )
    assert script.run() == [("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a")]
    assert script.opened_at == ["7"]


def test_with_a_revision_only_changes_are_told() -> None:
    script = Script(OPENED, line("MODIFIED", thing("a", 12)), resource_version="11")
    assert script.run() == [("MODIFIED", "a")]
    assert (script.opened_at, script.lists) == (["11"], 0)


@pytest.mark.parametrize("loss", [END, LOST], ids=["ended", "cut"])
def test_a_lost_stream_goes_on_from_the_last_event(loss: Any) -> None:
    script = Script(listed(7), OPENED, line("ADDED", thing("a", 8)), loss, OPENED, line("MODIFIED", thing("a", 9)))
    assert script.run() == [("ADDED", "a"), ("MODIFIED", "a")]
    assert script.opened_at == ["7", "8"]
    assert script.lists == 1


def test_bookmarks_move_the_revision_and_are_not_told() -> None:
    bookmark = line("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
    script = Script(listed(7), OPENED, bookmark, LOST, OPENED, line("ADDED", thing("a", 100)))
    assert script.run() == [("ADDED", "a")]
    assert script.opened_at == ["7", "99"]


def test_a_server_that_is_away_is_waited_for() -> None:
    away = Response(503, JSON, b"{}")
    script = Script(listed(7), LOST, LOST, away, OPENED, line("ADDED", thing("a", 8)))
    assert script.run() == [("ADDED", "a")]
    assert script.opened_at == ["7", "7", "7", "7"]
    assert all(seconds > 0 for seconds in script.pauses)


def test_pauses_grow_while_streams_end_at_once() -> None:
    script = Script(listed(7), *[OPENED, END] * 6)
    script.run()
    assert script.pauses[-1] > 4 * script.pauses[0]


@pytest.mark.parametrize(
    "gone",
    [
        [Response(410, JSON, b'{"message": "compacted"}')],
        [OPENED, line("ERROR", {"kind": "Status", "code": 410, "message": "compacted"})],
    ],
    ids=["at once", "later"],
)
def test_after_a_compaction_the_difference_is_told(gone: list[Any]) -> None:
    before = [thing("same", 3), thing("changed", 4), thing("deleted", 5), thing("replaced", 6, "uid-old")]
    after = [thing("same", 3), thing("changed", 50), thing("replaced", 51, "uid-new"), thing("new", 52)]
    script = Script(listed(7, *before), *gone, listed(60, *after), OPENED, line("DELETED", thing("new", 61)))
    assert script.run()[4:] == [
        ("DELETED", "deleted"),
        ("MODIFIED", "changed"),
        ("DELETED", "replaced"),
        ("ADDED", "replaced"),
        ("ADDED", "new"),
        ("DELETED", "new"),
    ]
    assert script.opened_at[-1] == "60"


def test_what_a_later_page_already_showed_is_not_told_again() -> None:
    first = Response(200, JSON, b'{"metadata": {"resourceVersion": "7", "continue": "more"}, "items": []}')
    replayed = [line("MODIFIED", thing("a", 8)), line("DELETED", thing("b", 9, "old")), line("ADDED", thing("b", 10))]
    second = listed(7, thing("a", 8), thing("b", 10))
    script = Script(first, second, OPENED, *replayed, line("MODIFIED", thing("a", 11)), line("DELETED", thing("b", 12)))
    assert script.run() == [("ADDED", "a"), ("ADDED", "b"), ("MODIFIED", "a"), ("DELETED", "b")]


def test_a_no_ends_the_watch() -> None:
    with pytest.raises(Forbidden):
        Script(listed(7), Response(403, JSON, b'{"message": "no"}')).run()


def test_events_may_come_in_pieces_and_contain_any_line_separator() -> None:
    whole = line("ADDED", thing("a", 8)) + b"\n" + line("ADDED", thing("b\u2028c", 9))
    raw = whole.replace(b"\\u2028", "\u2028".encode())
    pieces = [raw[at : at + 7] for at in range(0, len(raw), 7)]
    assert Script(listed(7), OPENED, *pieces).run() == [("ADDED", "a"), ("ADDED", "b\u2028c")]


def test_half_an_event_at_the_end_of_a_stream_is_not_an_event() -> None:
    script = Script(listed(7), OPENED, line("ADDED", thing("a", 8))[:-9], END, OPENED, line("ADDED", thing("a", 8)))
    assert script.run() == [("ADDED", "a")]
    assert script.opened_at == ["7", "7"]


def test_something_else_than_bursar_is_said_to_be_so() -> None:
    with pytest.raises(ConnectionFailed, match="does not speak"):
        Script(listed(7), OPENED, b"<html>\n").run()


def test_a_watch_may_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, *[1.0] * 20, *[100.0] * 20])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    flow = watching.watch(ALLOCATIONS, resource_version="5", timeout_seconds=10.0)
    step = next(flow)
    assert isinstance(step, Open)
    assert step.request.query["timeoutSeconds"] == "9"
    assert step.request.silence_seconds_max == 10.0
