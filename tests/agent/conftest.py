"""Real processes in every test that asks for them, and none of them left after it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bursar.agent.executor.executor import group_name
from bursar.agent.host.cgroup import Cgroups, find
from support.nodes import executors as shells
from support.nodes.executors import NO_CGROUPS, Bench


@pytest.fixture
def uid(tmp_path: Path) -> Iterator[str]:
    """An allocation's name that no other test has; of all that carry it, nothing may be alive afterwards."""
    name = f"alloc-{uuid.uuid4().hex}"
    yield name
    left = shells.processes_of(name, str(tmp_path))
    shells.kill(left)
    shells.bury()
    assert not left


@pytest.fixture(params=["cgroups", "none"])
def cgroups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cgroups]:
    if request.param == "none":
        yield NO_CGROUPS
        return
    found = find(group_name(tmp_path))
    if not found.parents:
        pytest.skip(found.message)
    yield found
    found.remove()
    assert not any(parent.exists() for parent in found.parents.values())


@pytest.fixture
def bench(tmp_path: Path, cgroups: Cgroups, uid: str) -> Bench:
    return Bench(tmp_path, cgroups=cgroups)
