"""ColdFront's allocations on a real Bursar: pushed twice, late, out of order, while Bursar is away, and to the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from django.core.management import call_command

from bursar.client import Client, NotFound
from bursar_coldfront.models import Outbox
from bursar_coldfront.push import push, push_due, wanted_for
from support import Portal

READY_SECONDS = 60


class Served:
    """A real server, with a token that may only touch tenants below `portal`."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *_bursar(), "serve", "--data", str(self.data), "--http", f"127.0.0.1:{self.port}",
            "--admin-token-file", str(self.data.parent / "admin-token"),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            try:
                with self.admin() as client:
                    client.tenants.get("default")
                return
            except Exception:
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None

    def admin(self) -> Client:
        return Client(self.url, token=(self.data.parent / "admin-token").read_text().strip())


def _bursar() -> list[str]:
    return [os.environ.get("BURSAR_BIN", str(Path(sys.executable).parent / "bursar"))]


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="session")
def bursar() -> Iterator[Served]:
    with TemporaryDirectory() as folder:
        # The server's users must reach its data, if root runs the tests.
        Path(folder).chmod(0o755)
        served = Served(Path(folder) / "data")
        served.start()
        with served.admin() as client:
            client.tenants.create({"metadata": {"name": "portal"}, "spec": {}})
        yield served
        served.stop()


@pytest.fixture
def linked(bursar: Served, settings_of: Any, request: pytest.FixtureRequest) -> Served:
    """ColdFront's settings for this server. Each test has tenants of its own."""
    with bursar.admin() as client:
        body = {"role": "service", "user": "coldfront", "tenants": ["portal"]}
        token = client.request("POST", "/api/v1/tokens", body=body)["status"]["token"]
    settings_of.BURSAR_URL, settings_of.BURSAR_TOKEN = bursar.url, token
    settings_of.BURSAR_PARENT = "portal"
    settings_of.BURSAR_PREFIX = f"t{abs(hash(request.node.name)) % 10**8}"
    return bursar


def tenant_of(portal: Portal) -> str:
    from bursar_coldfront.wanted import tenant_name

    return tenant_name(portal.project.pk)


def eventually(holds: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to be so in time"
        time.sleep(0.1)


def test_an_allocation_becomes_a_tenant_with_quota_and_members(coldfront: Portal, linked: Served) -> None:
    ann = coldfront.member("ann")
    one = coldfront.allocation(gpus=4, memory=16)
    coldfront.user_of(one, ann)
    coldfront.activate(one)
    assert push_due() == (1, 0)
    tenant = tenant_of(coldfront)
    with linked.admin() as client:
        assert client.tenants.get(tenant)["spec"]["limits"] == {
            "clusters": "0",
            "memory": "16Gi",
            "nvidia.com/gpu": "4",
        }
        quota = client.resourcequotas(f"{tenant}-{one.pk}").get("coldfront")["spec"]["hard"]
        assert quota == {"memory": "16Gi", "nvidia.com/gpu": "4"}
        members = {
            each["spec"]["user"]: each["spec"]["role"]
            for each in client.members.list(field_selector=f"spec.tenant={tenant}")
        }
        assert members == {"ann": "user", "pi": "tenant-admin"}
    assert coldfront.due() == {one.pk: (coldfront.due()[one.pk][0],) * 2}
    one.allocationuser_set.all().delete()
    assert push_due() == (1, 0)
    with linked.admin() as client:
        users = [each["spec"]["user"] for each in client.members.list(field_selector=f"spec.tenant={tenant}")]
        assert users == ["pi"]


def test_from_activation_to_expiry_requests_follow_the_portal(coldfront: Portal, linked: Served) -> None:
    """Activate, request within and beyond the limits, raise the limit by a change request, expire."""
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    push_due()
    tenant = tenant_of(coldfront)
    namespace = f"{tenant}-{one.pk}"
    with linked.admin() as client:
        client.tenants.patch(tenant, {"spec": {"approval": {"gates": ["quota"]}}})
        claims = client.resourceclaims(namespace)
        for name, clusters in (("within", 1), ("beyond", 3)):
            claims.create(
                {"metadata": {"name": name}, "spec": {"type": "cluster", "resources": {"clusters": clusters}}}
            )

        def state(name: str) -> str:
            return str(claims.get(name)["status"]["approval"]["state"])

        eventually(lambda: state("within") == "approved")
        eventually(lambda: "would exceed max_clusters by 2" in claims.get("beyond")["status"]["message"])
        assert state("beyond") == "pending"
        coldfront.change(one, clusters=4)
        push_due()
        eventually(lambda: state("beyond") == "approved")
        coldfront.expire(one)
        push_due()
        assert client.resourcequotas(namespace).get("coldfront")["spec"]["hard"] == {"clusters": "4"}


@pytest.mark.parametrize("choice", ["freeze", "release"])
def test_expiry_freezes_or_releases(coldfront: Portal, linked: Served, settings_of: Any, choice: str) -> None:
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    push_due()
    settings_of.BURSAR_ON_END = choice
    coldfront.expire(one)
    push_due()
    namespace = f"{tenant_of(coldfront)}-{one.pk}"
    with linked.admin() as client:
        assert client.tenants.get(tenant_of(coldfront))["spec"]["limits"]["clusters"] == "0"
        if choice == "freeze":
            hard = client.resourcequotas(namespace).get("coldfront")["spec"]["hard"]
            assert hard == {"clusters": "0", "memory": "0", "nvidia.com/gpu": "0"}
        else:

            def is_gone() -> bool:
                try:
                    client.namespaces.get(namespace)
                except NotFound:
                    return True
                return False

            eventually(is_gone)


def test_an_older_state_is_ignored(coldfront: Portal, linked: Served) -> None:
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    row = Outbox.objects.get(allocation_pk=one.pk)
    old = wanted_for(row)
    coldfront.change(one, clusters=5)
    new = wanted_for(Outbox.objects.get(allocation_pk=one.pk))
    with linked.admin() as client:
        for wanted in (new, old, new, old):
            push(client, wanted)
        assert client.resourcequotas(new.namespace).get("coldfront")["spec"]["hard"] == {"clusters": "5"}
        assert client.tenants.get(new.tenant)["spec"]["limits"]["clusters"] == "5"


def test_while_bursar_is_away_no_page_fails_and_nothing_is_lost(
    coldfront: Portal, linked: Served, settings_of: Any
) -> None:
    url = settings_of.BURSAR_URL
    settings_of.BURSAR_URL = f"http://127.0.0.1:{_free_port()}"
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    assert push_due() == (0, 1)
    row = Outbox.objects.get(allocation_pk=one.pk)
    assert row.error
    assert row.next_try is not None
    settings_of.BURSAR_URL = url
    Outbox.objects.update(next_try=None)
    assert push_due() == (1, 0)
    with linked.admin() as client:
        assert client.tenants.get(tenant_of(coldfront))["spec"]["limits"]["clusters"] == "2"


def test_a_value_below_zero_is_not_sent(coldfront: Portal, linked: Served) -> None:
    one = coldfront.allocation(clusters=-2)
    coldfront.activate(one)
    assert push_due() == (0, 1)
    assert "must be 0 or more" in Outbox.objects.get(allocation_pk=one.pk).error
    with linked.admin() as client, pytest.raises(NotFound):
        client.tenants.get(tenant_of(coldfront))


def test_sync_finds_and_corrects_what_somebody_changed(
    coldfront: Portal, linked: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    push_due()
    tenant = tenant_of(coldfront)
    call_command("bursar_sync")
    assert "Bursar has what ColdFront says." in capsys.readouterr().out
    with linked.admin() as client:
        client.tenants.patch(tenant, {"spec": {"limits": {"clusters": "9"}}})
    call_command("bursar_sync")
    assert f"tenant {tenant} has limits" in capsys.readouterr().out
    call_command("bursar_sync", apply=True)
    with linked.admin() as client:
        assert client.tenants.get(tenant)["spec"]["limits"]["clusters"] == "2"


def test_a_deleted_allocation_takes_its_namespace_with_it(coldfront: Portal, linked: Served) -> None:
    one = coldfront.allocation(clusters=2)
    coldfront.activate(one)
    push_due()
    namespace = f"{tenant_of(coldfront)}-{one.pk}"
    one.delete()
    assert push_due() == (1, 0)
    with linked.admin() as client:
        assert client.tenants.get(tenant_of(coldfront))["spec"]["limits"]["clusters"] == "0"

        def is_gone() -> bool:
            return namespace not in [each["metadata"]["name"] for each in client.namespaces.list()]

        eventually(is_gone)
