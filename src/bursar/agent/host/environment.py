"""The environment of a command: what it is told about where and as what it runs."""

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
MARK = "BURSAR_PLACEMENT"  # by which processes are found that nothing else leads to


@dataclass(frozen=True, slots=True)
class User:
    """As whom commands run; without `changed`, as the agent itself."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    changed: bool


def user(name: str | None = None) -> User:
    """KeyError where there is nobody of that name."""
    changed = name is not None and pwd.getpwnam(name).pw_uid != os.geteuid()
    try:
        entry = pwd.getpwnam(name) if name is not None else pwd.getpwuid(os.geteuid())
    except KeyError:
        if name is not None:
            raise
        return User(os.geteuid(), os.getegid(), (), str(os.geteuid()), "/", changed=False)
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    home = entry.pw_dir if Path(entry.pw_dir).is_dir() else "/"  # where commands run that do not say where
    return User(entry.pw_uid, entry.pw_gid, groups, entry.pw_name, home, changed)


def environment(
    run: Run, node: str, owner: User, inherited: Mapping[str, str], *, renumbered: bool = False
) -> dict[str, str]:
    """The allocation's own wishes go before ours, but not before what it was given. Its GPUs are `renumbered` where it
    sees no others: the driver then counts them from 0."""
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
    """What may be the name of a folder too, whatever the uid."""
    return f"{quote(place[0], safe='')}.{place[1]}"


def open_to_all(path: str) -> str:
    """Of the folders in which programs are looked for, those that everybody may enter: in root's own nothing is found,
    and that it may not be entered would be taken for the reason."""
    folders = [folder for folder in path.split(os.pathsep) if folder and _is_open(Path(folder))]
    return os.pathsep.join(folders) or PATH


def _is_open(folder: Path) -> bool:
    try:
        return all(one.stat().st_mode & 0o001 for one in (folder, *folder.parents))
    except OSError:
        return False


def _devices(run: Run, *, renumbered: bool) -> dict[str, str]:
    """Whoever was given no GPU sees none."""
    indices = sorted({one for name, given in run.devices.items() if name.startswith(GPU_VENDOR) for one in given})
    visible = ",".join(map(str, indices))
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(indices)))) if renumbered else visible,
        "NVIDIA_VISIBLE_DEVICES": visible or "void",
    }
