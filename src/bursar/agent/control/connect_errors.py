"""What keeps an agent from its control plane, in words for whoever reads the log: why, and what to look at.

gRPC says it in one long line of its own; what it means is found by the words in it. That the agent goes on trying is
said as well: somebody who only sees an error would restart it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from bursar.agent.shim.clock import boot_seconds
from bursar.client.errors import ApiError, BursarError, ConnectionFailed

REPEAT_SECONDS = 60.0  # the same trouble is told again so often

REFUSED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
# How gRPC says that there was no connection to begin with.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_GRPC = "the server says where agents are served (--grpc, --grpc-advertise), unless --grpc of the agent does"
# By the first words that are found in what gRPC says.
_MEANINGS = (
    (
        ("Connection refused",),
        "the connection was refused",
        f"nothing listens there: see that the server runs, with --grpc; {_GRPC}",
    ),
    (
        ("errors resolving", "DNS resolution failed", "lookup failed"),
        "its name cannot be looked up",
        f"check the name, and this machine's DNS; {_GRPC}",
    ),
    (
        ("No route to host", "Network is unreachable"),
        "there is no way to it",
        f"check the address, and this machine's network; {_GRPC}",
    ),
    (
        ("certificate has expired", "certificate is not yet valid"),
        "the server's certificate is not good at this time",
        "check the clocks of this machine and of the server's",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED", "Hostname Verification"),
        "the server's certificate is not believed",
        "it is not for this address (see the server's --grpc-host), or of another authority: check --grpc and --data",
    ),
    (
        ("WRONG_VERSION_NUMBER",),
        "it does not speak TLS",
        f"it serves agents without certificates (--grpc-insecure), or something else listens there; {_GRPC}",
    ),
    (
        ("Socket closed", "handshake failed"),
        "it ended the connection",
        "it may not take this node's certificate, or ask for one where --insecure has none: the server's log says more",
    ),
    (
        ("Endpoint closing", "imeout", "imed out", "FD Shutdown"),
        "it did not answer in time",
        f"see that the server runs; a firewall may stand between; {_GRPC}",
    ),
)


class ConnectTrouble(NamedTuple):
    """`passing`: it may be over without anybody doing anything."""

    why: str
    check: str
    passing: bool = True

    def next(self, pause_seconds: float) -> str:
        """What the agent does, and what people can."""
        if not self.passing:
            return self.check
        again = f"the agent tries again in {pause_seconds:.1f} s, and goes on trying"
        return f"{again}; {self.check}" if self.check else again


def join_trouble(error: BursarError) -> ConnectTrouble:
    """Why the API cannot be asked for papers."""
    passing = not isinstance(error, ConnectionFailed | ApiError) or error.passing
    named = isinstance(error, ConnectionFailed) and error.hint and error.passing
    return ConnectTrouble(error.message, f"{error.hint}; --server names it" if named else error.hint, passing)


def stream_trouble(code: grpc.StatusCode, details: str, address: str, node: str) -> ConnectTrouble:
    """Why there is no stream to that address."""
    if code in REFUSED:
        check = (
            f"if node {node!r} should be here, make a token with `bursar node token --name {node}` and put it in the"
            " --token-file: the agent joins again by itself"
        )
        return ConnectTrouble(f"{address}: {details}", check, passing=False)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConnectTrouble(f"{address}: {details}", "that server does not serve agents: check --grpc, or update it")
    if not any(words in details for words in _NO_CONNECTION):
        return ConnectTrouble(f"{address}: {details}", "what runs here goes on")
    why, check = next(
        ((why, check) for words, why, check in _MEANINGS if any(one in details for one in words)), (details, _GRPC)
    )
    return ConnectTrouble(f"could not reach {address}: {why}", check)


@dataclass(slots=True)
class ConnectErrorLog:
    """The same trouble once, and again after a while: an agent without a control plane must not fill the disk."""

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
