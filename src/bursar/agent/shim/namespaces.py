"""The shim's side of the sandbox: bubblewrap creates and holds the namespaces, the command enters them by setns; plus
the seccomp filter.

The command stays a child of the shim, so exit code, signals and start failures are known exactly. `sandbox.py` decides
on the mounts. Inside bubblewrap runs only `cat`: it answers once all mounts are made, and ends when the shim closes its
pipe or dies. With it the pid namespace's init ends, and the kernel kills every process left inside.

As in `shim.py`, only C modules are imported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from bursar.agent.shim.proc import descendants, read

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_CAPBSET_DROP = 22, 2, 24
CAPABILITIES = 64  # more than the kernel has
INFO_FD = 200  # above all open descriptors
CHILD_PID = b'"child-pid":'


class NamespacesError(OSError):
    """bubblewrap could not create the sandbox; its message is in the shim's errors."""


class Namespaces:
    """The namespaces of one command, held open by bubblewrap."""

    def __init__(self, arguments: list[bytes]) -> None:
        """Create the namespaces; all mounts are made when this returns."""
        inward, self._hold = os.pipe()
        answer, outward = os.pipe()
        info, info_end = os.pipe()
        try:
            self.informer = os.posix_spawn(
                arguments[0],
                [arguments[0], b"--info-fd", b"%d" % INFO_FD, *arguments[1:], b"--", b"cat"],
                {"PATH": "/usr/bin:/bin"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, inward, 0),
                    (os.POSIX_SPAWN_DUP2, outward, 1),
                    (os.POSIX_SPAWN_DUP2, info_end, INFO_FD),
                ],
            )
        finally:
            for fd in (inward, outward, info_end):
                os.close(fd)
        os.write(self._hold, b"\n")
        there = os.read(answer, 1)
        data = b""
        while b"}" not in data and (more := os.read(info, 4096)):
            data += more
        os.close(answer)
        os.close(info)
        if not there or CHILD_PID not in data:
            self.drop()
            os.waitpid(self.informer, 0)
            raise NamespacesError(errno.EPERM, "bubblewrap failed")
        first = int(data.partition(CHILD_PID)[2].replace(b",", b" ").replace(b"}", b" ").split()[0])
        self.own = {self.informer, first, *_children(first)}  # processes that do not belong to the command
        self._spaces = [(_open(first, name), kind) for name, kind in _SPACES]
        pids = _open(first, "pid")
        _setns(pids, CLONE_NEWPID)  # applies to children created from now on, not to this process
        os.close(pids)

    def enter(self) -> None:
        """In the child: enter the namespaces. The working directory is `/` afterwards."""
        for fd, kind in self._spaces:
            _setns(fd, kind)

    def drop(self) -> None:
        """End the namespaces; the kernel kills every process inside."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1


_SPACES = (("ipc", CLONE_NEWIPC), ("uts", CLONE_NEWUTS), ("mnt", CLONE_NEWNS))


def _open(pid: int, name: str) -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)


def _setns(fd: int, kind: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, kind):
        raise OSError(ctypes.get_errno(), "setns")


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in read(f"/proc/{pid}/task/{pid}/children").split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return descendants()


# The seccomp filter.

# struct sock_filter: code, jump if true, jump if false, operand.
_LOAD, _EQUAL, _MASK, _RETURN = 0x20, 0x15, 0x54, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _REQUEST = 0, 4, 24  # offsets in struct seccomp_data; _REQUEST: second argument of ioctl
_X32 = 0x40000000

# By architecture: add_key, request_key and keyctl, and ioctl. file_setattr has one number on all of them.
_FILE_SETATTR = 469
_CALLS = {
    0xC000003E: ((248, 249, 250, _FILE_SETATTR), 16),  # x86_64
    0x40000003: ((286, 287, 288, _FILE_SETATTR), 54),  # i386
    0xC00000B7: ((217, 218, 219, _FILE_SETATTR), 29),  # aarch64
    0x40000028: ((309, 310, 311, _FILE_SETATTR), 54),  # arm
}
# ioctls by which a file would escape the limit of the scratch space: btrfs subvolumes and snapshots are outside its
# qgroup, and FS_IOC_SETFLAGS (of 64 and 32 bits) and FS_IOC_FSSETXATTR take files out of their XFS project.
_REQUESTS = (0x5000940E, 0x50009418, 0x50009401, 0x50009417, 0x40086602, 0x40046602, 0x401C5820)


def seccomp_filter() -> bytes:
    """Refuses keyring calls, because keyrings belong to a uid and outlive a placement, and calls that escape disk
    quotas. On an unknown architecture it refuses every call."""
    program = [(_LOAD, 0, 0, _ARCHITECTURE)]
    for architecture, (keys, ioctl) in _CALLS.items():
        block = [(_LOAD, 0, 0, _NUMBER), (_MASK, 0, 0, ~_X32 & 0xFFFFFFFF)]
        tests = [(_EQUAL, number) for number in keys]
        requests = len(_REQUESTS)
        # keys…, ioctl?, allow, load request, requests…, allow, refuse
        refuse_at = len(tests) + 3 + requests + 1
        for place, (code, number) in enumerate(tests):
            block.append((code, refuse_at - place - 1, 0, number))
        block += [(_EQUAL, 1, 0, ioctl), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _REQUEST)]
        for place, number in enumerate(_REQUESTS, len(tests) + 3):
            block.append((_EQUAL, refuse_at - place - 1, 0, number))
        block += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
        program += [(_EQUAL, 0, len(block), architecture), *block]
    program.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def restrict() -> None:
    """Install the filter for this process and all its descendants. Needs `no_new_privs`, or root."""
    program = seccomp_filter()
    lines = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(described)), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def drop_capabilities() -> None:
    """Empty the capability bounding set, so that not even a setuid program regains a capability."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) and ctypes.get_errno() == errno.EINVAL:
            return
