"""Where placements live on the node: whom each runs as, in which HOME and behind which walls."""

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
    sandbox: tuple[str, ...] = ()  # for bubblewrap; empty where nothing is isolated
    renumbered: bool = False  # it sees only its own GPUs

    @property
    def umask(self) -> str:
        return "077" if self.sandbox else "022"

    def environment(self, run: Run, node: str) -> dict[str, str]:
        inherited = dict(os.environ)
        if self.sandbox and "PATH" in inherited:
            inherited["PATH"] = open_to_all(inherited["PATH"])
        return environment(run, node, self.owner, inherited, renumbered=self.renumbered)


class PlacementHomes:
    """`shared` is whom all commands run as where nothing is isolated; with `groups` isolated ones are in its
    groups, which all tenants then share. `users` are those that tenants have already."""

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
        self._kept = set(users)  # those that are in the journal
        self._append = append

    async def room_of(self, child: RunningPlacement) -> PlacementHome:
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
        """A user of its own for each tenant, by `Run.owner`. It is in the journal before anything runs as it."""
        if tenant not in self._users:
            # An older server told the name alone: that user, and what it left in shared directories, is the tenant's.
            known = self._users.pop(bare_name(tenant), None)
            self._kept.discard(bare_name(tenant))
            self._users[tenant] = self._sandbox.users.choose(self._users) if known is None else known
        uid = self._users[tenant]
        if tenant not in self._kept:
            await self._append([Assigned(tenant, uid)])
            self._kept.add(tenant)
        return uid

    def give_back(self, children: Iterable[RunningPlacement]) -> Wiped:
        """The users of all tenants of which nothing runs."""
        live = {child.run.owner for child in children}
        self._users = {one: uid for one, uid in self._users.items() if not live.isdisjoint((one, bare_name(one)))}
        self._kept &= self._users.keys()
        return Wiped(tuple(self._users))

    async def guard_disk(self, children: Mapping[Place, RunningPlacement]) -> None:
        """Until it is cancelled: end what fills the disk."""
        guard = DiskGuard(self.scratches, self._disk_reserve_bytes)
        while True:
            on_disk = _on_disk(children)
            try:
                culprits = await apart(lambda: guard.look(on_disk)) if on_disk else []  # noqa: B023
            except OSError:
                log.exception("the disk could not be looked at")
                culprits = []
            for one in culprits:
                if (child := children.get(one.place)) is not None:
                    log.warning(
                        "a placement is ended for what it keeps on the disk", uid=child.run.uid, why=one.message
                    )
                    child.folder.ask_to_fail(one.reason, one.message)
            await asyncio.sleep(LOOK_SECONDS)


def _on_disk(children: Mapping[Place, RunningPlacement]) -> dict[Place, tuple[str, int | None]]:
    return {
        place: (child.mark, disk_bytes_max(child.run.requests, child.run.limits))
        for place, child in children.items()
        if child.run.command and not child.run.wipe
    }
