"""Connection errors of an agent in plain words: the cause, and what to check.

The cause is found by matching gRPC's long error text. The log also says that the agent keeps retrying, so that nobody
restarts it because of an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from bursar.agent.shim.clock import boot_seconds
from bursar.client.errors import ApiError, BursarError, ConnectionFailed

REPEAT_SECONDS = 60.0  # until the same error is logged again

REFUSED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
# gRPC's texts for a connection that could not be established.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_GRPC = "the server announces this address (--grpc, --grpc-advertise), unless the agent's --grpc replaces it"
# The first entry with a text that occurs in gRPC's error applies.
_MEANINGS = (
    (
        ("Connection refused",),
        "the connection was refused",
        f"nothing listens there: check that the server runs with --grpc; {_GRPC}",
    ),
    (
        ("errors resolving", "DNS resolution failed", "lookup failed"),
        "its host name cannot be resolved",
        f"check the name, and this machine's DNS; {_GRPC}",
    ),
    (
        ("No route to host", "Network is unreachable"),
        "there is no route to it",
        f"check the address, and this machine's network; {_GRPC}",
    ),
    (
        ("certificate has expired", "certificate is not yet valid"),
        "the server's certificate is expired or not yet valid",
        "check the clocks of this machine and of the server",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification"),
        "the server's certificate is not trusted",
        "it is for another address (see the server's --grpc-host), or of another CA: check --grpc and --data",
    ),
    (
        ("WRONG_VERSION_NUMBER",),
        "it does not speak TLS",
        f"the server runs with --grpc-insecure, or something else listens there; {_GRPC}",
    ),
    (
        ("Socket closed", "handshake failed"),
        "the server closed the connection",
        "it may reject this node's certificate, or require one that --insecure does not send: see the server's log",
    ),
    (
        ("Endpoint closing", "imeout", "imed out", "FD Shutdown"),
        "it did not answer in time",
        f"check that the server runs and that no firewall blocks it; {_GRPC}",
    ),
)


class ConnectTrouble(NamedTuple):
    """A failed connection: its cause and what to check. `passing` means that it may resolve by itself."""

    why: str
    check: str
    passing: bool = True

    def next(self, pause_seconds: float) -> str:
        """The agent's next step, and the operator's."""
        if not self.passing:
            return self.check
        again = f"the agent tries again in {pause_seconds:.1f} s and keeps retrying"
        return f"{again}; {self.check}" if self.check else again


def join_trouble(error: BursarError) -> ConnectTrouble:
    """A failed enrolment."""
    passing = not isinstance(error, ConnectionFailed | ApiError) or error.passing
    named = isinstance(error, ConnectionFailed) and error.hint and error.passing
    return ConnectTrouble(error.message, f"{error.hint}; --server sets its URL" if named else error.hint, passing)


def stream_trouble(code: grpc.StatusCode, details: str, address: str, node: str) -> ConnectTrouble:
    """A stream that failed or could not be opened."""
    if code in REFUSED:
        check = (
            f"if node {node!r} belongs to this cluster, make a token with `bursar node token --name {node}` and put it"
            " in the --token-file: the agent joins again by itself"
        )
        return ConnectTrouble(f"{address}: {details}", check, passing=False)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConnectTrouble(
            f"{address}: {details}", "that address does not serve agents: check --grpc, or update the server"
        )
    if not any(words in details for words in _NO_CONNECTION):
        return ConnectTrouble(f"{address}: {details}", "running work continues")
    why, check = next(
        ((why, check) for words, why, check in _MEANINGS if any(one in details for one in words)), (details, _GRPC)
    )
    return ConnectTrouble(f"could not reach {address}: {why}", check)


@dataclass(slots=True)
class ConnectErrorLog:
    """Rate limit for connection errors: the same error is logged once a minute, and never fills the disk."""

    clock: Callable[[], float] = boot_seconds
    _what: str = ""
    _at: float = 0.0

    def is_news(self, what: str) -> bool:
        if what == self._what and self.clock() - self._at < REPEAT_SECONDS:
            return False
        self._what, self._at = what, self.clock()
        return True

    def over(self) -> None:
        self._what = ""
