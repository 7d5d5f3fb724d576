"""The user and the environment variables of a command."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from bursar.agent.machine.types import Place, Run

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INHERITED = ("PATH", "LANG", "TZ")
GPU_VENDOR = "nvidia.com/"
MARK = "BURSAR_PLACEMENT"  # identifies orphaned processes of a placement


@dataclass(frozen=True, slots=True)
class User:
    """The user of a command; without `changed` it is the agent's own."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    changed: bool


def user(name: str | None = None) -> User:
    """The named user, or the agent's own. Raises KeyError for an unknown name."""
    changed = name is not None and pwd.getpwnam(name).pw_uid != os.geteuid()
    try:
        entry = pwd.getpwnam(name) if name is not None else pwd.getpwuid(os.geteuid())
    except KeyError:
        if name is not None:
            raise
        return User(os.geteuid(), os.getegid(), (), str(os.geteuid()), "/", changed=False)
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    home = entry.pw_dir if Path(entry.pw_dir).is_dir() else "/"  # the default working directory
    return User(entry.pw_uid, entry.pw_gid, groups, entry.pw_name, home, changed)


def environment(
    run: Run, node: str, owner: User, inherited: Mapping[str, str], *, renumbered: bool = False
) -> dict[str, str]:
    """Variables by precedence, lowest first: defaults, the allocation's own, facts about the placement. GPUs are
    `renumbered` from 0 if it sees only its own, because the driver numbers them so."""
    env = {"PATH": PATH} | {name: inherited[name] for name in INHERITED if name in inherited}
    env |= {"HOME": owner.home, "USER": owner.name, "LOGNAME": owner.name}
    env |= run.env
    env |= {
        MARK: mark(run.place),
        "BURSAR_ALLOCATION": run.name,
        "BURSAR_ALLOCATION_UID": run.uid,
        "BURSAR_EPOCH": str(run.epoch),
        "BURSAR_NAMESPACE": run.namespace,
        "BURSAR_TENANT": run.tenant,
        "BURSAR_NODE": node,
        "BURSAR_NODES": ",".join(run.nodes or (node,)),
        "BURSAR_NODE_COUNT": str(len(run.nodes or (node,))),
        "BURSAR_NODE_RANK": str(run.nodes.index(node) if node in run.nodes else 0),
    }
    if run.job:
        index = "" if run.job_index is None else str(run.job_index)
        env |= {"BURSAR_JOB": run.job, "BURSAR_JOB_INDEX": index, "JOB_COMPLETION_INDEX": index}
    if run.wipe:
        env |= {"BURSAR_CLAIM": run.uid}
    return env | _devices(run, renumbered=renumbered)


def mark(place: Place) -> str:
    """The placement's name as a directory name, whatever characters the uid has."""
    return f"{quote(place[0], safe='')}.{place[1]}"


def open_to_all(path: str) -> str:
    """The directories of PATH that every user may enter. A closed one would turn "not found" into "not permitted"."""
    folders = [folder for folder in path.split(os.pathsep) if folder and _is_open(Path(folder))]
    return os.pathsep.join(folders) or PATH


def _is_open(folder: Path) -> bool:
    try:
        return all(one.stat().st_mode & 0o001 for one in (folder, *folder.parents))
    except OSError:
        return False


def _devices(run: Run, *, renumbered: bool) -> dict[str, str]:
    """The GPU variables; a placement without GPUs sees none."""
    indices = sorted({one for name, given in run.devices.items() if name.startswith(GPU_VENDOR) for one in given})
    visible = ",".join(map(str, indices))
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(indices)))) if renumbered else visible,
        "NVIDIA_VISIBLE_DEVICES": visible or "void",
    }
