"""`bursar job`, and jobs in the commands for every object, against a real server."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from bursar.client import Client, Conflict, Forbidden
from support.process.server import Server


class Shell:
    def __init__(self, server: Server, config: Path, namespace: str) -> None:
        self.namespace = namespace
        self.environment = {
            "BURSAR_URL": server.url,
            "BURSAR_TOKEN": server.token,
            "BURSAR_CONFIG": str(config),
        }

    def __call__(self, *words: str, given: str | None = None, code: int = 0, token: str = "") -> Result:
        environment = {**self.environment, **({"BURSAR_TOKEN": token} if token else {})}
        result = CliRunner(env=environment).invoke(cli, [*words, "-n", self.namespace], input=given)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result


@pytest.fixture
def admin(empty_server: Server) -> Iterator[Client]:
    with empty_server.client() as client:
        yield client


@pytest.fixture
def shell(empty_server: Server, admin: Client, tmp_path: Path) -> Shell:
    name = f"j-{uuid.uuid4().hex[:12]}"
    admin.tenants.create({"metadata": {"name": name}, "spec": {"limits": {"nvidia.com/gpu": 8}}})
    admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    return Shell(empty_server, tmp_path / "config.yaml", name)


def manifest(name: str, **spec: Any) -> str:
    template = {"spec": {"resources": {"requests": {"nvidia.com/gpu": "1"}}}}
    return yaml.safe_dump({"kind": "Job", "metadata": {"name": name}, "spec": {"template": template, **spec}})


def test_a_job_is_made_from_a_file_shown_and_cancelled(shell: Shell) -> None:
    shell("create", "-f", "-", given=manifest("train", parallelism=2, completions=8, queue="gpu-training"))
    head, row = shell("get", "jobs").stdout.splitlines()
    assert head.split() == ["NAME", "STATUS", "COMPLETIONS", "ACTIVE", "FAILED", "QUEUE", "AGE"]
    assert row.split()[:6] == ["train", "Queued", "0/8", "2", "0", "gpu-training"]
    assert "train-1" in shell("get", "allocations").stdout
    told = shell("job", "cancel", "train", "--reason", "newer model", "--grace-period", "60").stdout
    assert told == "job/train cancelled: Graceful cancellation initiated, 60s grace period (newer model)\n"
    assert "Cancelled" in shell("get", "jobs").stdout
    shell("job", "cancel", "nothing", code=3)


def test_a_job_without_capacity_ends_with_the_code_for_quotas(shell: Shell) -> None:
    refused = shell("create", "-f", "-", given=manifest("big", parallelism=9), code=6)
    assert "would exceed nvidia.com/gpu quota (current: 0, requested: 9, limit: 8)" in refused.stderr


def test_a_boost(shell: Shell, admin: Client) -> None:
    shell("create", "-f", "-", given=manifest("train", priority=200))
    words = ("--priority", "500", "--for", "1h", "--reason", "incident", "--approved-by", "admin@example.com")
    told = shell("job", "boost", "train", *words).stdout
    assert told.startswith("job/train boosted: priority 200 → 500 until ")
    shown = json.loads(shell("get", "job", "train", "-o", "json").stdout)
    assert shown["status"]["boost"]["approvedBy"] == "admin@example.com"
    token = admin.resource("tokens", namespaced=False).create(
        {"role": "user", "tenant": shell.namespace, "user": "ann"}
    )["status"]["token"]
    shell("job", "boost", "train", *words, code=4, token=token)


def test_the_sdk_has_the_same_verbs(shell: Shell, empty_server: Server, admin: Client) -> None:
    jobs = admin.jobs(shell.namespace)
    template = {"spec": {"resources": {"requests": {"nvidia.com/gpu": "1"}}}}
    jobs.create({"metadata": {"name": "train"}, "spec": {"parallelism": 2, "template": template}})
    assert len(jobs.get("train", subresource="status")["status"]["allocations"]) == 2
    boosted = jobs.boost("train", priority=5, reason="why", duration=60, approved_by="me")
    assert (boosted["previousPriority"], boosted["newPriority"]) == (0, 5)
    token = admin.resource("tokens", namespaced=False).create(
        {"role": "user", "tenant": shell.namespace, "user": "ann"}
    )["status"]["token"]
    with empty_server.client(token) as ann, pytest.raises(Forbidden):
        ann.jobs(shell.namespace).boost("train", priority=5, reason="why", duration=60, approved_by="me")
    assert jobs.cancel("train", reason="enough", grace_period_seconds=1)["status"]["phase"] == "Cancelled"
    with pytest.raises(Conflict):
        jobs.boost("train", priority=5, reason="why", duration=60, approved_by="me")
