"""The two clients: the same calls, one for each kind, and nothing that should not show."""

import inspect
import pickle
import subprocess
import sys

import httpx2
import pytest

import bursar.client
from bursar.client import ApiError, AsyncClient, AsyncResource, Client, ConfigError, ConnectionFailed, Resource, Retries
from bursar.client.http import failure
from bursar.wire.kinds.registry import KINDS

URL = "http://127.0.0.1:9"


def _public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name not in ("close", "aclose", "resource")
    }


@pytest.mark.parametrize(("one", "other"), [(Resource, AsyncResource), (Client, AsyncClient)])
def test_both_clients_have_the_same_calls(one: type, other: type) -> None:
    assert _public(one) == _public(other)
    assert _public(one)


def test_every_call_says_what_it_does() -> None:
    for kind in (Resource, Client):
        for name in _public(kind):
            assert inspect.getdoc(getattr(kind, name)), name


def test_every_kind_is_an_attribute() -> None:
    with Client(URL) as client:
        for kind in KINDS:
            assert isinstance(getattr(client, kind.plural), Resource)
            assert kind.plural in dir(client)
        with pytest.raises(AttributeError, match="the kinds are allocations"):
            _ = client.alocations


def test_a_kind_that_only_the_server_knows_can_be_named() -> None:
    with Client(URL) as client:
        assert isinstance(client.resource("widgets", "ml-team", namespaced=True), Resource)
        with pytest.raises(ValueError, match="give namespaced="):
            client.resource("widgets")
        with pytest.raises(ValueError, match="are not namespaced"):
            client.tenants("ml-team")


def test_every_exported_name_is_there() -> None:
    for name in bursar.client.__all__:
        assert getattr(bursar.client, name).__name__ in (name, "dict")
    assert sorted(bursar.client.__all__) == bursar.client.__all__


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import bursar.client.errors, bursar.client.contexts, sys; print({'httpx2', 'yaml'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_the_token_does_not_show() -> None:
    with Client(URL, "secret") as client:
        assert "secret" not in repr(client) + repr(client.context) + repr(client.tenants)


def test_nobody_there_says_what_to_do() -> None:
    with Client(URL, retries=Retries(attempts_max=1)) as client, pytest.raises(ConnectionFailed) as caught:
        client.tenants.get("physics")
    assert URL in caught.value.message
    assert "bursar serve" in caught.value.hint


async def test_nobody_there_says_what_to_do_async() -> None:
    async with AsyncClient(URL, retries=Retries(attempts_max=1)) as client:
        with pytest.raises(ConnectionFailed):
            await client.tenants.get("physics")


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8080", "nonsense"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http or https URL"):
        Client(url)


@pytest.mark.parametrize(
    ("error", "words", "passing"),
    [
        (httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), "--ca-file", False),
        (httpx2.ConnectError("[SSL: WRONG_VERSION_NUMBER]"), "http://", False),
        (httpx2.ConnectError("refused"), "bursar serve", True),
        (httpx2.ConnectTimeout("slow"), "firewall", True),
        (httpx2.ReadTimeout("slow"), "in time", True),
        (httpx2.ReadError(""), "ReadError", True),
        (httpx2.InvalidURL("bad"), "check the URL", False),
    ],
)
def test_why_there_is_no_answer(error: Exception, words: str, passing: bool) -> None:
    told = failure(error, URL)
    assert words in f"{told.message} {told.hint}"
    assert told.passing == passing


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:3128")
    with Client(URL, retries=Retries(attempts_max=1)) as client, pytest.raises(ConnectionFailed, match="refused"):
        client.tenants.get("physics")


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ApiError("no", status=403, code="forbidden")))
    assert (error.message, error.status, error.code) == ("no", 403, "forbidden")
