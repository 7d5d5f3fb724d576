"""Where a shim keeps what its command writes. As in `shim.py`, only modules of C are imported."""

from __future__ import annotations

import os


class OutputFile:
    """What the command writes, in files of a bounded size. The command never waits for the disk to have room: what
    cannot be kept is dropped, and that it was is noted."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.files: list[str] = []
        self.fd, self.size = -1, 0
        self.end = self.lost = 0  # of all that was ever kept; and dropped, since that was last noted
        self._open()

    def write(self, data: bytes) -> None:
        if self.fd < 0:
            self._open()
        if self.lost:
            note = f"\n[bursar: {self.lost} bytes of output were lost: there was no room on the disk]\n".encode()
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
        """A line of our own, for whoever reads."""
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
