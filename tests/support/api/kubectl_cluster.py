"""A real server with TLS and an unmodified kubectl: kubectl sends no token without TLS."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bursar.client import Client
from support.process.server import Server, migrated_directory, started


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Unmodified kubectl. BURSAR_KUBECTL names another version to test with."""

    program: str
    config: Path
    home: Path

    def run(self, *arguments: str, text: str = "", status: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.program, *arguments],
            input=text,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "KUBECONFIG": str(self.config)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert status is None or done.returncode == status, (arguments, done.stdout, done.stderr)
        return done

    def __call__(self, *arguments: str, text: str = "", status: int | None = 0) -> str:
        return self.run(*arguments, text=text, status=status).stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "-o", "json"))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "KUBECONFIG": str(self.config)}
        return subprocess.Popen([self.program, *arguments], env=environment, stdout=subprocess.PIPE, text=True)

    @property
    def minor(self) -> int:
        version = json.loads(self("version", "--client", "-o", "json"))["clientVersion"]
        return int(version["minor"].rstrip("+"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Server]:
    with migrated_directory() as data, started(data, tls=True) as running:
        _register_large_node(running)
        yield running


def _register_large_node(server: Server) -> None:
    """Cordoned, so nothing runs there; but whichever nodes tests leave, nothing is refused as too large."""
    spec = {"capacity": {"cpu": "1000", "memory": "1Ti", "nvidia.com/gpu": "64"}, "unschedulable": True}
    with Client(server.url, server.token, ca_file=str(server.data / "tls" / "ca.crt")) as client:
        client.nodes.create({"metadata": {"name": "large"}, "spec": spec})


@pytest.fixture(scope="session")
def kubectl(cluster: Server) -> Kubectl:
    program = os.environ.get("BURSAR_KUBECTL") or shutil.which("kubectl")
    if not program:
        pytest.skip("kubectl is not on this machine: install it, or name it in BURSAR_KUBECTL")
    home = cluster.data / "home"
    home.mkdir()
    config = home / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "bursar",
                "clusters": [
                    {
                        "name": "bursar",
                        "cluster": {
                            "server": cluster.url,
                            "certificate-authority": str(cluster.data / "tls" / "ca.crt"),
                        },
                    }
                ],
                "users": [{"name": "admin", "user": {"token": cluster.token}}],
                "contexts": [{"name": "bursar", "context": {"cluster": "bursar", "user": "admin"}}],
            }
        )
    )
    config.chmod(0o600)
    return Kubectl(program, config, home)


DEBIANS = Path(__file__).resolve().parents[3] / ".tools" / "kubectl-debian" / "usr" / "bin" / "kubectl"
REGISTRYS = Path(sys.executable).parent / "kubectl"


@pytest.fixture(params=["the machine's own", "Debian's", "the registry's"])
def any_kubectl(kubectl: Kubectl, request: pytest.FixtureRequest) -> Kubectl:
    """Each of the kubectls that there are: scripts/test-tools.sh unpacks Debian's, which is of 2021."""
    programs = {"the machine's own": Path(kubectl.program), "Debian's": DEBIANS, "the registry's": REGISTRYS}
    if not (program := programs[request.param]).exists():
        pytest.skip(f"{program} is not there")
    return replace(kubectl, program=str(program))


@pytest.fixture
def team(kubectl: Kubectl) -> str:
    """A namespace of its own for a test that uses kubectl."""
    name = f"team-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    return name
