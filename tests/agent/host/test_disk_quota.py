"""Disk quotas of XFS, in the kernel of a guest: this machine's kernel may be built without them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bursar.agent.host.disk_quota import DiskQuota, find_disk_quota
from support.nodes.guest_kernel import needs_guest, run_in_guest

pytestmark = pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="needs xfsprogs")

MOUNT = "mkdir /mnt/disk && mount -t xfs -o prjquota /dev/ubda /mnt/disk"
IN_GUEST = """
import ctypes, fcntl, os, struct, subprocess, sys
from pathlib import Path
from bursar.agent.host.disk_quota import project_of
from bursar.agent.host.scratch import find_scratches
from bursar.agent.shim import namespaces

def as_tenant(uid, path, restricted, act):
    sys.stdout.flush()
    if not (child := os.fork()):
        try:
            ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no new privileges
            os.chdir(path); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
            if restricted:
                namespaces.restrict()
            act()
            print("done")
        except OSError as error:
            print(type(error).__name__, os.strerror(error.errno))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)

def fill(size):
    with open("x", "wb") as file:
        for _ in range(size):
            file.write(bytes(1 << 20)); file.flush(); os.fsync(file.fileno())

def leave_project():
    for name in (".", "x"):
        opened = os.open(name, os.O_RDONLY)
        fcntl.ioctl(opened, 0x401C5820, struct.pack("=IIIII8x", 0, 0, 0, 0, 0))

def forget_project():
    opened = os.open(".", os.O_RDONLY)
    fcntl.ioctl(opened, 0x40086602, struct.pack("=l", 0))

def set_attributes():
    if ctypes.CDLL(None, use_errno=True).syscall(469, -100, b"x", b"", 0, 0):
        raise OSError(ctypes.get_errno(), "file_setattr")

scratches = find_scratches(Path("/mnt/disk/homes"))
print(type(scratches.quota).__name__)
one = scratches.make("one", 70_000, "one", 16 << 20)
two = scratches.make("two", 70_001, "two", 32 << 20)
free = scratches.make("free", 70_002, "free", None)
print(project_of(two.path) - project_of(one.path), project_of(free.path))
as_tenant(70_000, one.home, True, lambda: fill(40))
as_tenant(70_000, one.tmp, True, lambda: fill(1))
as_tenant(70_001, two.home, True, lambda: fill(20))
as_tenant(70_002, free.home, True, lambda: fill(40))
as_tenant(70_001, two.home, True, leave_project)
as_tenant(70_001, two.home, True, forget_project)
as_tenant(70_001, two.home, True, set_attributes)
as_tenant(70_001, two.home, False, leave_project)  # without the filter it would escape
project = project_of(one.path)
scratches.remove("one")
report = ["xfs_quota", "-x", "-D", "/dev/null", "-P", "/dev/null", "-c", f"quota -p -N -b {project}", "/mnt/disk"]
print("limit left:", subprocess.run(report, capture_output=True, text=True).stdout.split()[2:4])
scratches.remove_all_but()
print(list(scratches.folder.iterdir()))
"""


@needs_guest
def test_xfs_itself_keeps_each_placement_within_its_limit(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", str(disk)], check=True)
    script = tmp_path / "script.py"
    script.write_text(IN_GUEST)
    told = run_in_guest(tmp_path, disk, f"{MOUNT} && {sys.executable} {script}").splitlines()
    assert told == [
        "XfsQuota",
        "1 0",
        "OSError No space left on device",  # 40 of 16 MiB
        "OSError No space left on device",  # in all its directories together
        "done",  # the other has a limit of its own
        "done",  # and no limit is none
        "PermissionError Operation not permitted",
        "PermissionError Operation not permitted",
        "PermissionError Operation not permitted",
        "done",
        "limit left: []",
        "[]",
    ]


def test_without_quotas_of_the_filesystem_nothing_is_enforced(tmp_path: Path) -> None:
    assert type(find_disk_quota(tmp_path)) is DiskQuota
