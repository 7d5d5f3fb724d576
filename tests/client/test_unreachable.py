"""Servers that cannot be reached, with real sockets: both clients say why, and what to look at."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import pytest

from bursar.client import AsyncClient, Client, ConnectionFailed
from bursar.client.flow import ONCE


@contextmanager
def closed() -> Iterator[int]:
    """A port that is somebody's, who does not listen."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with socket.socket() as held:
        held.bind(("127.0.0.1", port))
        yield port


@contextmanager
def silent() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@contextmanager
def hanging_up() -> Iterator[int]:
    """Takes every connection, and ends it after the first words."""

    def take() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one:
                one.recv(16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taking = threading.Thread(target=take)
        taking.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            taking.join(10)


There: TypeAlias = Callable[[], AbstractContextManager[int]]

CASES: list[tuple[str, There, str, str]] = [
    ("http://127.0.0.1:{}", closed, "could not reach {}: the connection was refused", "check that the server runs"),
    ("http://nobody.invalid:{}", closed, "the name nobody.invalid cannot be looked up", "DNS"),
    ("https://127.0.0.1:{}", silent, "could not reach {}: it did not answer in time", "firewall"),
    ("https://127.0.0.1:{}", hanging_up, "could not reach {}: TLS failed", "serves https"),
    ("http://127.0.0.1:{}", hanging_up, "the connection to {} was lost", "https://"),
    ("http://127.0.0.1:{}", silent, "{} did not answer in time", "another program"),
]


@pytest.mark.parametrize(("url", "there", "why", "check"), CASES)
async def test_both_clients_say_why_and_what_to_look_at(url: str, there: There, why: str, check: str) -> None:
    with there() as port:
        where = url.format(port)
        client = Client(where, "bsr_a_b", timeout_seconds=0.5, retries=ONCE)
        with client, pytest.raises(ConnectionFailed) as one:
            client.tenants.get("physics")
        async with AsyncClient(where, "bsr_a_b", timeout_seconds=0.5, retries=ONCE) as other_client:
            with pytest.raises(ConnectionFailed) as other:
                await other_client.tenants.get("physics")
    for told in (one.value, other.value):
        assert why.format(where) in told.message
        assert check in told.hint
        # It is not the token.
        assert "login" not in told.hint
        assert "token" not in f"{told.message} {told.hint}"
        assert told.passing
