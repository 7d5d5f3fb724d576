"""The system users of commands: one per tenant, and another one for a later tenant of the same name."""

from __future__ import annotations

from pathlib import Path

from bursar.agent.executor.child import RunningPlacement
from bursar.agent.executor.housing import PlacementHomes
from bursar.agent.executor.journal import Known, Line
from bursar.agent.executor.placement_dir import PlacementDir
from bursar.agent.host.environment import user
from bursar.agent.host.sandbox import Sandbox, Users
from bursar.agent.machine.types import Run


class Node:
    """One life of an agent, with the journal of those before it."""

    def __init__(self, folder: Path, known: Known | None = None) -> None:
        self.known = known or Known()
        self.folder = folder
        sandbox = Sandbox("/bin/true", users=Users(70_100, 70_109))
        self.housing = PlacementHomes(sandbox, user(), folder, self.known.users, self._append)

    async def _append(self, lines: list[Line]) -> None:
        for line in lines:
            self.known.take(line)

    def child(self, tenant: str, uid: str) -> RunningPlacement:
        run = Run("alloc", 1, "lab", "train", tenant=tenant, tenant_uid=uid)
        return RunningPlacement(run, PlacementDir(self.folder / "alloc"), self.housing.scratches)

    async def user(self, tenant: str, uid: str = "") -> int:
        return await self.housing._user_of(self.child(tenant, uid).run.owner)


async def test_a_namesake_has_another_user_in_this_life_and_the_next(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert [await node.user("acme", "tenant-1"), await node.user("acme", "tenant-2")] == [70_100, 70_101]
    node = Node(tmp_path, node.known)
    assert [await node.user("acme", "tenant-2"), await node.user("acme", "tenant-1")] == [70_101, 70_100]


async def test_older_servers_name_the_tenant_alone(tmp_path: Path) -> None:
    """Its user is taken over once, by the first that says which tenant it is, and by no namesake of that."""
    node = Node(tmp_path)
    assert [await node.user("acme"), await node.user("rival"), await node.user("acme")] == [70_100, 70_101, 70_100]
    assert [await node.user("acme", "tenant-1"), await node.user("acme", "tenant-2")] == [70_100, 70_102]
    assert await node.user("acme") == 70_103, "the server is an older one again"
    assert node.known.users == {
        "rival": 70_101, "acme@tenant-1": 70_100, "acme@tenant-2": 70_102, "acme": 70_103,
    }  # fmt: skip
    node = Node(tmp_path, node.known)
    assert await node.user("acme", "tenant-1") == 70_100


async def test_a_wipe_gives_no_user_back_of_whom_something_runs(tmp_path: Path) -> None:
    """Nor what was started under the bare name, and runs as a user that has since been told apart."""
    node = Node(tmp_path)
    for tenant, uid in (("acme", ""), ("acme", "tenant-1"), ("rival", "tenant-2"), ("gone", "tenant-3")):
        await node.user(tenant, uid)
    wiped = node.housing.give_back([node.child("acme", ""), node.child("rival", "tenant-2")])
    node.known.take(wiped)
    assert node.known.users == {"acme@tenant-1": 70_100, "rival@tenant-2": 70_101}
    assert await node.user("next", "tenant-4") == 70_102
    assert await node.user("acme", "tenant-1") == 70_100
