"""A real server for all tests of the commands, and a team of its own for each."""

import uuid

import pytest

from bursar.client import Client
from support.process.server import admin, empty_server, server

__all__ = ["admin", "empty_server", "server"]


@pytest.fixture
def team(admin: Client) -> str:
    """A tenant with a namespace of the same name."""
    name = f"t-{uuid.uuid4().hex[:12]}"
    admin.tenants.create({"metadata": {"name": name}, "spec": {}})
    admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    return name
