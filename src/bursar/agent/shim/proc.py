"""Processes and small files, as a shim needs them. As in `shim.py`, only modules of C are imported."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38


def start_ticks(pid: int) -> int:
    """When it started, in ticks since the machine did: with it, a pid means one process and no other."""
    return int(stat(pid)[19])


def stat(pid: int) -> list[bytes]:
    """From its state on; the name before it may contain anything."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def descendants() -> list[int]:
    """Of this process, children and children's children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat(int(name))[1]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it is gone
    found = []
    next_ones = [os.getpid()]
    while next_ones:
        below = children.get(next_ones.pop(), [])
        found += below
        next_ones += below
    return found


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def read(path: str | bytes) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def write(path: bytes, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)


def save(name: str, data: bytes) -> None:
    """Whole or not at all. What was set aside for it is written over."""
    fd = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(f"{name}.new", name)


def sync_folder() -> None:
    fd = os.open(".", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
