"""The user, HOME and sandbox of each placement, the uid of each tenant, and the disk guard."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from bursar.agent.executor.child import RunningPlacement
from bursar.agent.executor.journal import Assigned, Line, Wiped, bare_name
from bursar.agent.host.cgroup import disk_bytes_max
from bursar.agent.host.diskguard import LOOK_SECONDS, DiskGuard
from bursar.agent.host.environment import User, environment, open_to_all, user
from bursar.agent.host.sandbox import Sandbox
from bursar.agent.host.scratch import find_scratches
from bursar.agent.machine.types import Place, Run
from bursar.daemon_thread import apart

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PlacementHome:
    owner: User
    sandbox: tuple[str, ...] = ()  # arguments of bubblewrap; empty without a sandbox
    renumbered: bool = False  # it sees only its own GPUs, numbered from 0

    @property
    def umask(self) -> str:
        return "077" if self.sandbox else "022"

    def environment(self, run: Run, node: str) -> dict[str, str]:
        inherited = dict(os.environ)
        if self.sandbox and "PATH" in inherited:
            inherited["PATH"] = open_to_all(inherited["PATH"])
        return environment(run, node, self.owner, inherited, renumbered=self.renumbered)


class PlacementHomes:
    """`shared` is the user of all commands without a sandbox. With `groups`, sandboxed commands are in its groups,
    which all tenants then share. `users` are the uids that tenants have already."""

    def __init__(
        self,
        sandbox: Sandbox,
        shared: User,
        folder: Path,
        users: Mapping[str, int],
        append: Callable[[list[Line]], Awaitable[None]],
        *,
        groups: bool = False,
        disk_reserve_bytes: int | None = None,
    ) -> None:
        self.scratches = find_scratches(folder)
        self._disk_reserve_bytes = disk_reserve_bytes
        self._sandbox = sandbox
        self._shared = shared
        self._groups = shared.groups if groups and shared.changed else ()
        self._users = dict(users)
        self._kept = set(users)  # tenants whose uid is journaled
        self._append = append

    async def home_of(self, child: RunningPlacement) -> PlacementHome:
        run, sandbox = child.run, self._sandbox
        if run.wipe:
            return PlacementHome(user())
        if not sandbox.isolates:
            return PlacementHome(self._shared)
        uid = await self._user_of(run.owner)
        name, bytes_max = f"bursar-{uid}", disk_bytes_max(run.requests, run.limits)
        scratch = await asyncio.to_thread(self.scratches.make, child.mark, uid, name, bytes_max)
        owner = User(uid, uid, self._groups, name, str(scratch.home), changed=True)
        return PlacementHome(owner, tuple(sandbox.arguments(run, scratch)), bool(sandbox.device_files(run)))

    async def _user_of(self, tenant: str) -> int:
        """The uid of a tenant, by `Run.owner`. It is journaled before anything runs as it."""
        if tenant not in self._users:
            # An older server sent the tenant's name only: keep that uid, which owns files in shared directories.
            known = self._users.pop(bare_name(tenant), None)
            self._kept.discard(bare_name(tenant))
            self._users[tenant] = self._sandbox.users.choose(self._users) if known is None else known
        uid = self._users[tenant]
        if tenant not in self._kept:
            await self._append([Assigned(tenant, uid)])
            self._kept.add(tenant)
        return uid

    def give_back(self, children: Iterable[RunningPlacement]) -> Wiped:
        """Free the uids of all tenants without running placements."""
        live = {child.run.owner for child in children}
        self._users = {one: uid for one, uid in self._users.items() if not live.isdisjoint((one, bare_name(one)))}
        self._kept &= self._users.keys()
        return Wiped(tuple(self._users))

    async def guard_disk(self, children: Mapping[Place, RunningPlacement]) -> None:
        """Stop placements that fill the disk, until cancelled."""
        guard = DiskGuard(self.scratches, self._disk_reserve_bytes)
        while True:
            on_disk = _on_disk(children)
            try:
                culprits = await apart(lambda: guard.look(on_disk)) if on_disk else []  # noqa: B023
            except OSError:
                log.exception("disk_check_failed", message="the disk usage of placements cannot be measured")
                culprits = []
            for one in culprits:
                if (child := children.get(one.place)) is not None:
                    log.warning(
                        "disk_limit_exceeded", message="a placement is stopped because of its disk usage",
                        uid=child.run.uid, error=one.message,
                    )  # fmt: skip
                    child.folder.ask_to_fail(one.reason, one.message)
            await asyncio.sleep(LOOK_SECONDS)


def _on_disk(children: Mapping[Place, RunningPlacement]) -> dict[Place, tuple[str, int | None]]:
    return {
        place: (child.mark, disk_bytes_max(child.run.requests, child.run.limits))
        for place, child in children.items()
        if child.run.command and not child.run.wipe
    }
