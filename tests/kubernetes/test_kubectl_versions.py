"""What old and new kubectls do in different ways: trying without effect, diffs, and waiting for a deletion."""

import json
import uuid

from support.api.kubectl_cluster import Kubectl

TENANT = """\
apiVersion: v1
kind: Tenant
metadata:
  name: {name}
spec:
  weight: {weight}
"""

JOB = """\
apiVersion: v1
kind: Job
metadata:
  name: train
spec:
  template:
    spec:
      resources:
        requests: {{nvidia.com/gpu: "{gpus}"}}
      nodeSelector: {{place: nowhere}}
"""


def unique(stem: str) -> str:
    return f"{stem}-{uuid.uuid4().hex[:8]}"


def test_dry_runs_of_the_server_create_and_change_nothing(any_kubectl: Kubectl, team: str) -> None:
    job = JOB.format(gpus=1)
    assert "created" in any_kubectl("create", "-n", team, "--dry-run=server", "-f", "-", text=job)
    assert "created" in any_kubectl("apply", "-n", team, "--dry-run=server", "-f", "-", text=job)
    assert any_kubectl("get", "jobs", "-n", team, "-o", "name") == ""
    name = unique("tenant")
    any_kubectl("apply", "-f", "-", text=TENANT.format(name=name, weight=2))
    assert "configured" in any_kubectl("apply", "--dry-run=server", "-f", "-", text=TENANT.format(name=name, weight=7))
    assert any_kubectl.json("get", "tenant", name)["spec"]["weight"] == 2


def test_a_diff_shows_what_apply_would_change(any_kubectl: Kubectl) -> None:
    name = unique("tenant")
    new = any_kubectl.run("diff", "-f", "-", text=TENANT.format(name=name, weight=2), status=1)
    assert "+  weight: 2" in new.stdout
    any_kubectl("apply", "-f", "-", text=TENANT.format(name=name, weight=2))
    assert any_kubectl.run("diff", "-f", "-", text=TENANT.format(name=name, weight=2)).stdout == ""
    different = any_kubectl.run("diff", "-f", "-", text=TENANT.format(name=name, weight=7), status=1)
    assert "-  weight: 2" in different.stdout
    assert "+  weight: 7" in different.stdout
    assert any_kubectl.json("get", "tenant", name)["spec"]["weight"] == 2


def test_what_is_invalid_is_named(any_kubectl: Kubectl, team: str) -> None:
    refused = any_kubectl.run("create", "-n", team, "-f", "-", text=JOB.format(gpus=10_000), status=1)
    assert 'The Job "train" is invalid' in refused.stderr


def test_a_deletion_waits_for_finalizers(any_kubectl: Kubectl, team: str) -> None:
    any_kubectl("create", "-n", team, "-f", "-", text=JOB.format(gpus=1))
    patch = {"metadata": {"finalizers": ["example.com/cleanup"]}}
    any_kubectl("patch", "allocation", "train-0", "-n", team, "--type=merge", "-p", json.dumps(patch))
    any_kubectl("delete", "allocation", "train-0", "-n", team, "--wait=false")
    assert "deletionTimestamp" in any_kubectl.json("get", "allocation", "train-0", "-n", team)["metadata"]
    with any_kubectl.start("delete", "allocation", "train-0", "-n", team) as waiting:
        assert waiting.stdout is not None
        assert "deleted" in waiting.stdout.readline(), "it was heard, and waits"
        assert waiting.poll() is None
        removal = [{"op": "remove", "path": "/metadata/finalizers"}]
        any_kubectl("patch", "allocation", "train-0", "-n", team, "--type=json", "-p", json.dumps(removal))
        assert waiting.wait(60) == 0
    assert any_kubectl.run("get", "allocation", "train-0", "-n", team, status=1).stderr.count("not found") == 1
