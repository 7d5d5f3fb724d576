"""A guest kernel for tests of filesystems that this machine's kernel may lack: User-Mode Linux, from Debian's package.

The guest sees the files of this machine as its root, and a disk of its own as /dev/ubda. It has no network.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UML = shutil.which("linux.uml")
SECONDS_MAX = 120
needs_guest = pytest.mark.skipif(
    UML is None or os.geteuid() != 0, reason="needs root, and linux.uml of Debian's package user-mode-linux"
)

# No kernel of a guest ends by itself when its first process does.
_FIRST_PROCESS = """#!/bin/sh
export PATH={path} PYTHONPATH={modules}
for kind in proc sysfs devtmpfs; do mount -t $kind $kind /$(echo $kind | sed 's/fs$//; s/tmp$//'); done
mount -t tmpfs run /run && mount -t tmpfs mnt /mnt
{{ {command}; }} > {output} 2>&1
sync
poweroff -f
"""


def run_in_guest(home: Path, disk: Path, command: str) -> str:
    """Run a shell command as root of a guest with this disk; its output."""
    assert UML is not None
    first, output = home / "first-process", home / "output"
    modules = ":".join(one for one in sys.path if one)
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    first.write_text(
        _FIRST_PROCESS.format(
            path=shlex.quote(path), modules=shlex.quote(modules), command=command, output=shlex.quote(str(output))
        )
    )
    first.chmod(0o755)
    output.touch()
    options = ["mem=256M", "root=none", "rootfstype=hostfs", "rootflags=/", "rw", f"ubda={disk}", f"init={first}"]
    subprocess.run(
        [UML, *options, "con=null", "con0=null,fd:1", "quiet"], stdin=subprocess.DEVNULL, capture_output=True,
        timeout=SECONDS_MAX, check=False, env={**os.environ, "TMPDIR": str(home)},
    )  # fmt: skip
    return output.read_text()
