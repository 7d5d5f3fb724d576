"""The output files of a command, rotated by size. As in `shim.py`, only C modules are imported."""

from __future__ import annotations

import os


class OutputFile:
    """The command's output in files of bounded size. A full disk never blocks the command: output that cannot be
    written is dropped, and a note counts the lost bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.files: list[str] = []
        self.fd, self.size = -1, 0
        self.end = self.lost = 0  # bytes ever kept; bytes dropped since the last note
        self._open()

    def write(self, data: bytes) -> None:
        if self.fd < 0:
            self._open()
        if self.lost:
            note = f"\n[bursar: {self.lost} bytes of output were lost: the node's disk was full]\n".encode()
            if not self._put(note):
                self.lost += len(data)
                return
            self.lost = 0
        while data:
            if self.size >= self.bytes_max:
                self._open()
            kept = self._put(data[: max(1, self.bytes_max - self.size)])
            if not kept:
                self.lost += len(data)
                return
            data = data[kept:]

    def note(self, text: str) -> None:
        """Write a line of Bursar's own into the log."""
        self.write(f"\n[bursar: {text}]\n".encode())

    def _put(self, data: bytes) -> int:
        try:
            kept = os.write(self.fd, data)
        except OSError:
            return 0
        self.size += kept
        self.end += kept
        return kept

    def _open(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        name = f"output.{self.end}"
        try:
            self.fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        self.size = 0
        self.files.append(name)
        while len(self.files) > 2:
            try:
                os.unlink(self.files.pop(0))
            except OSError:
                continue
