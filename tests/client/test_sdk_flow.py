"""Flows, driven by hand: what they ask for next, given what came of the last step."""

import pytest

from bursar.client import ApiError, ConnectionFailed, QuotaExceeded, Retries, Unavailable
from bursar.client.calls import ResourcePath, create, list_, table
from bursar.client.flow import Give, HttpRequest, Outcome, Pause, Response, SendRequest, exchange
from support.client.driving import ALLOCATIONS, LOST, answer, drive, sent


@pytest.mark.parametrize("trouble", [LOST, answer(503), answer(429), answer(502)], ids=["lost", "503", "429", "502"])
@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
def test_passing_trouble_is_tried_again(method: str, trouble: Outcome) -> None:
    steps, result = drive(exchange(HttpRequest(method, "/x"), Retries()), trouble, answer(200))
    assert result.status == 200
    assert [type(step) for step in steps] == [SendRequest, Pause, SendRequest]


def test_a_repeated_write_carries_the_same_key_and_reading_carries_none() -> None:
    steps, _ = drive(exchange(HttpRequest("POST", "/x"), Retries()), LOST, answer(201))
    first, second = (request.headers["idempotency-key"] for request in sent(steps))
    assert first == second
    steps, _ = drive(exchange(HttpRequest("GET", "/x"), Retries()), answer(200))
    assert "idempotency-key" not in sent(steps)[0].headers


def test_two_writes_have_two_keys_unless_the_caller_gives_one() -> None:
    keys = [sent(drive(create(ALLOCATIONS, {}), answer(201))[0])[0].headers["idempotency-key"] for _ in range(2)]
    assert keys[0] != keys[1]
    steps, _ = drive(create(ALLOCATIONS, {}, request_id="mine"), answer(201))
    assert sent(steps)[0].headers["idempotency-key"] == "mine"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 500])
def test_a_no_is_not_asked_twice(status: int) -> None:
    with pytest.raises(ApiError) as caught:
        drive(exchange(HttpRequest("GET", "/x"), Retries()), answer(status))
    assert caught.value.status == status


def test_attempts_are_bounded() -> None:
    with pytest.raises(Unavailable):
        drive(exchange(HttpRequest("GET", "/x"), Retries(attempts_max=3)), answer(503), answer(503), answer(503))


def test_the_server_says_how_long_to_wait() -> None:
    busy = answer(429, headers={"retry-after": "7"})
    steps, _ = drive(exchange(HttpRequest("GET", "/x"), Retries()), busy, answer(200))
    assert steps[1] == Pause(7.0)


def test_a_wait_longer_than_the_patience_is_not_begun() -> None:
    busy = answer(429, headers={"retry-after": "3600"})
    with pytest.raises(ApiError) as caught:
        drive(exchange(HttpRequest("GET", "/x"), Retries(seconds_max=10)), busy)
    assert caught.value.retry_after == 3600


def test_what_will_not_pass_is_not_tried_again() -> None:
    with pytest.raises(ConnectionFailed):
        drive(exchange(HttpRequest("GET", "/x"), Retries()), ConnectionFailed("untrusted", passing=False))


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [Retries().pause_seconds(attempt) for attempt in range(1, 20)]
    assert pauses[0] < 0.3
    assert max(pauses) <= 10


def test_a_list_follows_its_pages() -> None:
    first = answer(200, b'{"metadata": {"continue": "more"}, "items": [{"n": 1}, {"n": 2}]}')
    last = answer(200, b'{"metadata": {}, "items": [{"n": 3}]}')
    steps, _ = drive(list_(ALLOCATIONS, label_selector="a=b", limit=2), first, last)
    assert [step.value for step in steps if isinstance(step, Give)] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert [dict(request.query) for request in sent(steps)] == [
        {"labelSelector": "a=b", "limit": "2"},
        {"labelSelector": "a=b", "limit": "2", "continue": "more"},
    ]


def test_a_table_is_whole_and_of_the_first_pages_revision() -> None:
    first = answer(200, b'{"kind": "Table", "metadata": {"resourceVersion": "5", "continue": "more"}, "rows": [{}]}')
    last = answer(200, b'{"kind": "Table", "metadata": {"resourceVersion": "5"}, "rows": [{}, {}]}')
    _, whole = drive(table(ALLOCATIONS), first, last)
    assert (whole["metadata"]["resourceVersion"], len(whole["rows"])) == ("5", 3)


def test_quota_is_told_from_other_nos_by_its_code() -> None:
    body = b'{"message": "no room", "details": {"code": "quota_exceeded", "causes": [{"dimension": "cpu", "new": 1}]}}'
    for status in (403, 409):
        with pytest.raises(QuotaExceeded) as caught:
            drive(exchange(HttpRequest("POST", "/x"), Retries()), answer(status, body))
        assert caught.value.causes[0].dimension == "cpu"


def test_a_page_from_a_proxy_is_told_in_its_first_line() -> None:
    page = Response(502, {"content-type": "text/html"}, b"<h1>Bad Gateway</h1>\n<p>nginx</p>")
    with pytest.raises(Unavailable, match=r"^502: <h1>Bad Gateway</h1>$"):
        drive(exchange(HttpRequest("GET", "/x"), Retries(attempts_max=1)), page)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_no_name_can_mean_the_whole_collection(name: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        ALLOCATIONS.path_of(name)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("train", "/api/v1/namespaces/ml-team/allocations/train"),
        ("a/b", "/api/v1/namespaces/ml-team/allocations/a%2Fb"),
        ("a?x=1#y", "/api/v1/namespaces/ml-team/allocations/a%3Fx%3D1%23y"),
    ],
)
def test_a_name_is_one_segment(name: str, path: str) -> None:
    assert ALLOCATIONS.path_of(name) == path


def test_an_object_may_name_its_own_namespace() -> None:
    anywhere = ResourcePath("allocations", True, Retries())
    assert anywhere.path_for({"metadata": {"namespace": "a"}}) == "/api/v1/namespaces/a/allocations"
    with pytest.raises(ValueError, match="are namespaced"):
        anywhere.path_for({"metadata": {}})
    with pytest.raises(ValueError, match="are namespaced"):
        anywhere.path_of("train")
