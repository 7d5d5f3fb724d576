"""Processes in /proc and small durable files, for the shim. As in `shim.py`, only C modules are imported."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38


def start_ticks(pid: int) -> int:
    """The start time of a process in ticks since boot, which guards against a reused pid."""
    return int(stat(pid)[19])


def stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; the name before it may contain anything."""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def descendants() -> list[int]:
    """All descendants of this process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children.setdefault(int(stat(int(name))[1]), []).append(int(name))
            except (OSError, IndexError):
                continue  # it has ended
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
    """Write a file atomically and durably, into a preallocated `.new` file if there is one."""
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
