"""A cable between a client and a server that can be cut, or lose an answer on the way."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Cable:
    """Carries TCP from a port of its own to another. `lose_answers` is how many of the next answers are lost."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._live: list[socket.socket] = []
        self.lose_answers = 0
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Ends every connection there is; new ones are carried."""
        for one in self._live:
            _close(one)
        self._live.clear()

    def close(self) -> None:
        _close(self._listener)
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection(self._to)
                self._live += [near, far]
                threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                if is_answer and self.lose_answers:
                    self.lose_answers -= 1
                    break
                sink.sendall(piece)
        _close(source)
        _close(sink)


def _close(one: socket.socket) -> None:
    # Wakes threads in accept or recv, which closing alone does not.
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextmanager
def cable_to(url: str) -> Iterator[Cable]:
    cable = Cable(int(url.rpartition(":")[2]))
    try:
        yield cable
    finally:
        cable.close()
