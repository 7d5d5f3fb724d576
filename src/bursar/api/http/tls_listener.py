"""Accepting TLS connections: they are counted from the moment they are accepted, not from the end of the handshake.

asyncio's own server makes the protocol of a TLS connection when its handshake is complete, so clients that never begin
one would be counted nowhere, and could take all descriptors of the process.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from bursar.api.http import metrics
from bursar.api.http.connection import ConnectionGate, Handshake, HttpConnection, address_of

ACCEPTED_AT_ONCE = 100
# The pause after a failed accept, such as without free descriptors.
PAUSE_SECONDS = 1.0


class TlsListener:
    """Accepts connections of one socket until it is closed; `make` makes the protocol of each."""

    def __init__(
        self, listener: socket.socket, gate: ConnectionGate, make: Callable[[], HttpConnection], context: ssl.SSLContext
    ) -> None:
        self._listener = listener
        self._gate = gate
        self._make = make
        self._context = context
        self._seconds = gate.bounds.header_seconds
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._is_closed = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting, and give up the handshakes in progress. Open connections stay."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener.fileno())
        for one in self._handshakes:
            one.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, client = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            self._enter(accepted, address_of(client))

    def _enter(self, accepted: socket.socket, address: str) -> None:
        handshake = Handshake(address, self._loop.time())
        if bound := self._gate.begin(handshake):
            metrics.CONNECTIONS_REFUSED.labels(bound).inc()
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._shake_hands(accepted, handshake))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, handshake: Handshake) -> None:
        def made() -> HttpConnection:
            one = self._make()
            one.handshake = handshake
            return one

        try:
            with suppress(OSError):  # The client left, was too slow, or spoke no TLS.
                await self._loop.connect_accepted_socket(
                    made, accepted, ssl=self._context, ssl_handshake_timeout=self._seconds
                )
        finally:
            self._gate.end(handshake)
