"""The quota service as a process: it decides by itself, beside a twin, and after it or the server was killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bursar.client import Client, Unauthorized
from support.process.server import BURSAR, OwnServer, migrated_directory, started

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quota-service.md"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def served() -> Iterator[OwnServer]:
    """A server with its own quota service."""
    with migrated_directory() as data, started(data) as running:
        yield running


@pytest.fixture(scope="module")
def bare() -> Iterator[OwnServer]:
    """A server without a quota service."""
    with migrated_directory() as data, started(data, options=["--no-quota-service"]) as running:
        yield running


def gated(client: Client, name: str, **limits: int) -> None:
    """A tenant with a namespace of its name, whose claims the quota service decides."""
    approval = {"gates": ["quota"], "kinds": ["ResourceClaim", "Allocation"]}
    named = {dimension.replace("baremetal_", "baremetal-"): value for dimension, value in limits.items()}
    client.tenants.create({"metadata": {"name": name}, "spec": {"approval": approval, "limits": named}})
    client.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})


def claim(client: Client, tenant: str, name: str, **resources: int) -> None:
    named = {dimension.replace("_", "-"): value for dimension, value in resources.items()}
    client.resourceclaims(tenant).create({"metadata": {"name": name}, "spec": {"resources": named}})


def approval(client: Client, tenant: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.resourceclaims(tenant).get(name)["status"]["approval"]
    return found


def states(client: Client, tenant: str) -> dict[str, str]:
    found = client.resourceclaims(tenant).list()
    return {one["metadata"]["name"]: one["status"]["approval"]["state"] for one in found}


def until(holds: Callable[[], bool], seconds: float = 30) -> float:
    """Wait until it holds; returns the seconds that it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


def service_token(client: Client) -> str:
    wanted = {"role": "approver", "user": "quota-service", "tenants": ["*"], "gates": ["quota"]}
    made = client.request("POST", "/api/v1/tokens", body=wanted)
    return str(made["status"]["token"])


@contextmanager
def service(server: OwnServer, *words: str, token: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """`bursar quota-service` against this server."""
    with server.client() as client:
        environment = {**server.environment, "BURSAR_TOKEN": token or service_token(client)}
    if words:
        del environment["BURSAR_TOKEN"]
    with subprocess.Popen([str(BURSAR), "quota-service", *words], env=environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                assert process.wait(20) in (0, -signal.SIGTERM)  # killed by the signal while it was starting


def test_a_request_within_the_limits_is_approved_and_one_beyond_them_says_why(served: OwnServer) -> None:
    with served.client() as client:
        gated(client, "within", baremetal_hosts=20)
        claim(client, "within", "first", baremetal_hosts=18)
        until(lambda: approval(client, "within", "first")["state"] == "approved")
        assert approval(client, "within", "first")["by"] == "quota-service"
        claim(client, "within", "second", baremetal_hosts=5)
        claim(client, "within", "third", baremetal_hosts=2)
        until(lambda: states(client, "within")["third"] == "approved")
        said = "would exceed baremetal-hosts by 5: limit 20, used 20, requested 5"
        early = "would exceed baremetal-hosts by 3: limit 20, used 18, requested 5"
        until(lambda: approval(client, "within", "second").get("reason") in (said, early))
        assert states(client, "within")["second"] == "pending"


def test_a_higher_limit_or_a_deleted_claim_lets_the_next_in_by_itself(served: OwnServer) -> None:
    with served.client() as client:
        gated(client, "raised", clusters=1)
        for name in ("a", "b", "c", "d"):
            claim(client, "raised", name, clusters=1)
        until(lambda: "reason" in approval(client, "raised", "d"))
        assert states(client, "raised") == {"a": "approved", "b": "pending", "c": "pending", "d": "pending"}
        client.tenants.patch("raised", {"spec": {"limits": {"clusters": 2}}})
        assert until(lambda: states(client, "raised")["b"] == "approved") < 5
        client.resourceclaims("raised").delete("a")
        assert until(lambda: states(client, "raised")["c"] == "approved") < 5
        assert states(client, "raised")["d"] == "pending"


def test_a_resource_quota_of_the_namespace_is_waited_for_too(served: OwnServer) -> None:
    with served.client() as client:
        gated(client, "inner")
        client.resourcequotas("inner").create({"metadata": {"name": "rq"}, "spec": {"hard": {"clusters": "1"}}})
        claim(client, "inner", "c", clusters=2)
        until(lambda: "would exceed max_clusters by 1: limit 1" in approval(client, "inner", "c").get("reason", ""))
        client.resourcequotas("inner").patch("rq", {"spec": {"hard": {"clusters": "2"}}})
        assert until(lambda: states(client, "inner")["c"] == "approved") < 5


def test_a_parents_figures_are_counted_and_not_told(served: OwnServer) -> None:
    with served.client() as client:
        gated(client, "above", clusters=1)
        spec = {"parent": "above", "approval": {"gates": ["quota"]}}
        client.tenants.create({"metadata": {"name": "below"}, "spec": spec})
        client.namespaces.create({"metadata": {"name": "below", "labels": {"bursar.io/tenant": "below"}}})
        claim(client, "below", "c", clusters=2)
        until(lambda: "reason" in approval(client, "below", "c"))
        said = "a limit above this tenant has no headroom: max_clusters, requested 2"
        assert approval(client, "below", "c")["reason"] == said
        client.tenants.patch("above", {"spec": {"limits": {"clusters": 2}}})
        assert until(lambda: states(client, "below")["c"] == "approved") < 5


def test_approved_work_runs_and_pending_work_does_not(served: OwnServer) -> None:
    words = [str(BURSAR), "sim", "nodes", "--count", "1", "--prefix", "quota", "--run-seconds", "1"]
    with served.client() as client, subprocess.Popen(words, env=served.environment, stdout=subprocess.PIPE) as nodes:
        try:
            gated(client, "running", cpu=4)
            for name, cpu in (("fits", "4"), ("large", "5")):
                spec = {"resources": {"requests": {"cpu": cpu}}}
                client.allocations("running").create({"metadata": {"name": name}, "spec": spec})

            def phase(name: str) -> str:
                return str(client.allocations("running").get(name)["status"].get("phase"))

            until(lambda: phase("fits") in ("Running", "Succeeded"), 60)
            assert phase("large") == "Pending"
        finally:
            nodes.send_signal(signal.SIGINT)


def test_the_service_of_a_server_has_a_token_of_its_own_and_is_started_again(served: OwnServer) -> None:
    path = served.data / "quota-service.token"
    assert path.stat().st_mode & 0o777 == 0o600
    with served.client(path.read_text().strip()) as own:
        who = own.whoami()
        assert (who["role"], who["user"], who["gates"], who["tenants"]) == (
            "approver", "quota-service", ["quota"], ["*"],
        )  # fmt: skip
    before = service_process(served)
    before.kill()
    with served.client() as client:
        gated(client, "killed", clusters=1)
        claim(client, "killed", "c", clusters=1)
        until(lambda: states(client, "killed")["c"] == "approved")
    assert service_process(served).pid != before.pid


def service_process(server: OwnServer) -> psutil.Process:
    found: list[psutil.Process] = []

    def there() -> bool:
        children = psutil.Process(server.process.pid).children()
        found[:] = [one for one in children if "quota-service" in one.cmdline()]
        return bool(found)

    until(there)
    return found[0]


def test_a_replaced_token_is_read_and_the_old_one_is_revoked() -> None:
    with migrated_directory() as data:
        with started(data) as server:
            old = (data / "quota-service.token").read_text().strip()
        with started(data) as server, server.client() as client:
            path = data / "quota-service.token"
            new = path.read_text().strip()
            assert new != old
            with server.client(old) as left, pytest.raises(Unauthorized):
                left.whoami()
            path.write_text(service_token(client))
            client.request("DELETE", f"/api/v1/tokens/{new.split('_')[1]}")
            gated(client, "renewed", clusters=1)
            claim(client, "renewed", "c", clusters=1)
            until(lambda: states(client, "renewed")["c"] == "approved", 60)


def test_without_a_service_requests_wait_and_one_that_starts_later_decides_them(bare: OwnServer) -> None:
    with bare.client() as client:
        gated(client, "later", clusters=3)
        for number in range(5):
            claim(client, "later", f"c{number}", clusters=1)
        assert set(states(client, "later").values()) == {"pending"}
        with service(bare):
            until(lambda: list(states(client, "later").values()).count("approved") == 3)
            assert sorted(name for name, state in states(client, "later").items() if state == "approved") == [
                "c0", "c1", "c2",
            ]  # fmt: skip


def test_two_services_decide_nothing_twice(bare: OwnServer) -> None:
    with bare.client() as client:
        gated(client, "twins", clusters=60)
        with service(bare), service(bare):
            for number in range(100):
                claim(client, "twins", f"c{number:02}", clusters=1)
            until(lambda: list(states(client, "twins").values()).count("approved") == 60)
            until(lambda: all("reason" in one for one in pending(client, "twins")))
        assert client.tenant_quotas("twins")["quotas"]["clusters"]["accepted"] == "60"
        approved = [
            one
            for one in client.request("GET", "/api/v1/namespaces/twins/events")["items"]
            if "pprove" in one["reason"]
        ]
        names = [one["involvedObject"]["name"] for one in approved]
        assert len(names) == len(set(names))


def pending(client: Client, tenant: str) -> list[dict[str, Any]]:
    found = (one["status"]["approval"] for one in client.resourceclaims(tenant).list())
    return [one for one in found if one["state"] == "pending"]


def test_a_service_that_is_killed_between_decisions_loses_none(bare: OwnServer) -> None:
    with bare.client() as client:
        gated(client, "killed", clusters=650, pending_requests=1000)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: claim(client, "killed", f"c{number:03}", clusters=1), range(700)))
        with service(bare) as process:
            # One call decides 500: the rest is not decided when the first are seen.
            until(lambda: len(pending(client, "killed")) < 700)
            process.kill()
            process.wait(20)
        with service(bare):
            until(lambda: len(pending(client, "killed")) == 50)
            until(lambda: all("reason" in one for one in pending(client, "killed")))
        assert client.tenant_quotas("killed")["quotas"]["clusters"]["accepted"] == "650"


def test_a_server_that_is_away_is_waited_for() -> None:
    options = ["--no-quota-service"]
    with ExitStack() as opened:
        data = opened.enter_context(migrated_directory())
        server = opened.enter_context(started(data, options=options))
        client = opened.enter_context(server.client())
        gated(client, "away", clusters=2)
        process = opened.enter_context(service(server))
        claim(client, "away", "first", clusters=1)
        until(lambda: states(client, "away")["first"] == "approved")
        server.process.terminate()
        server.process.wait(30)
        opened.enter_context(started(data, int(server.url.rpartition(":")[2]), options=options))
        claim(client, "away", "second", clusters=1)
        until(lambda: states(client, "away")["second"] == "approved", 60)
        assert process.poll() is None


def test_the_replacement_on_the_page_decides_as_it_says(bare: OwnServer, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = tmp_path / "service.py"
    program.write_text(text)
    assert len(text.splitlines()) <= 40
    with bare.client() as client:
        gated(client, "replaced", clusters=2)
        claim(client, "replaced", "before", clusters=1)
        environment = {**bare.environment, "BURSAR_TOKEN": service_token(client)}
        with subprocess.Popen([sys.executable, str(program)], env=environment) as process:
            try:
                until(lambda: states(client, "replaced")["before"] == "approved")
                claim(client, "replaced", "large", clusters=2)
                claim(client, "replaced", "after", clusters=1)
                until(lambda: states(client, "replaced")["after"] == "approved")
                until(lambda: approval(client, "replaced", "large").get("reason", "").startswith("clusters: limit 2"))
                client.tenants.patch("replaced", {"spec": {"limits": {"clusters": 4}}})
                assert until(lambda: states(client, "replaced")["large"] == "approved") < 5
            finally:
                process.terminate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the token with --token-file"),
        (["--token-file", "/nonexistent/token"], "cannot read the token in /nonexistent/token: No such file"),
        (["--token", "bsr_000000000000_" + "x" * 43], "the token is unknown"),
    ],
)
def test_a_service_that_cannot_start_says_why(bare: OwnServer, words: Sequence[str], said: str) -> None:
    done = quota_service(bare, words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_token_that_does_not_decide_the_gate_is_refused_at_the_start(bare: OwnServer) -> None:
    with bare.client() as client:
        made = client.request("POST", "/api/v1/tokens", body={"role": "viewer", "user": "eve", "tenant": "default"})
    done = quota_service(bare, ["--token", made["status"]["token"]])
    assert done.returncode == 1
    assert "the role viewer, which does not decide gate quota" in done.stderr


def quota_service(server: OwnServer, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    environment["BURSAR_URL"] = server.url
    command = [str(BURSAR), "quota-service", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_with_a_certificate_of_its_own_has_its_service(tmp_path: Path) -> None:
    with migrated_directory() as data:
        ca = str(data / "tls" / "ca.crt")
        with started(data, tls=True) as server, Client(server.url, server.token, ca_file=ca) as client:
            gated(client, "secure", clusters=1)
            claim(client, "secure", "c", clusters=1)
            until(lambda: states(client, "secure")["c"] == "approved")
        # The same certificate as somebody's own, which the service knows by itself and not by its name.
        for name in ("server.crt", "server.key"):
            (tmp_path / name).write_bytes((data / "tls" / name).read_bytes())
        files = ["--tls-cert", str(tmp_path / "server.crt"), "--tls-key", str(tmp_path / "server.key")]
        with started(data, options=files) as plain:
            url = plain.url.replace("http:", "https:")
            with Client(url, plain.token, ca_file=ca) as client:
                claim(client, "secure", "more", clusters=1)
                until(lambda: "reason" in approval(client, "secure", "more"))
