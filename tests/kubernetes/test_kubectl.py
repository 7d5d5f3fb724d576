"""Unmodified kubectl against a real server: what people type, and what they see."""

import json
import subprocess
import uuid
from typing import Any

import pytest
import yaml

from support.api.kubectl_cluster import Kubectl

# It waits: no node has the label that it selects, whichever nodes other tests have left.
JOB = """\
apiVersion: v1
kind: Allocation
metadata:
  name: {name}
  labels: {{app: training}}
spec:
  resources:
    requests: {{cpu: "2", memory: 4Gi, nvidia.com/gpu: "1"}}
  nodeSelector: {{place: nowhere}}
"""

# Why it does, without other nodes and with some.
REASONS = ("no_nodes_active", "no_matching_nodes")

TENANT = """\
apiVersion: v1
kind: Tenant
metadata:
  name: {name}
spec:
  weight: {weight}
  limits: {{cpu: "{cpu}"}}
"""


def needs_openapi_3(kubectl: Kubectl) -> None:
    if kubectl.minor < 27:
        pytest.skip("this kubectl asks OpenAPI 2 for it, of which we serve no schemas")


def unique(stem: str) -> str:
    return f"{stem}-{uuid.uuid4().hex[:8]}"


def create_jobs(kubectl: Kubectl, team: str, *names: str) -> None:
    text = "---\n".join(JOB.format(name=name) for name in names)
    assert kubectl("create", "-n", team, "-f", "-", text=text).count("created") == len(names)


def create_node(kubectl: Kubectl, name: str) -> None:
    node: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": {"capacity": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"}},
    }
    kubectl("create", "-f", "-", text=json.dumps(node))


# Reading.


def test_get_prints_the_servers_table(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one", "two")
    header, *rows = kubectl("get", "allocations", "-n", team).splitlines()
    assert header.split() == ["NAME", "STATUS", "REASON", "GPU", "CPU", "MEMORY", "NODE", "QUEUE", "AGE"]
    assert [row.split()[0] for row in rows] == ["one", "two"]
    # There is a reason as soon as the scheduler has looked at it.
    cells = [cell for cell in rows[0].split() if cell not in REASONS]
    assert cells[1:5] == ["Pending", "1", "2", "4Gi"]
    assert "PRIORITY-CLASS" in kubectl("get", "alloc", "-n", team, "-o", "wide").splitlines()[0]
    assert kubectl("get", "al", "one", "-n", team, "--no-headers").split()[0] == "one"


def test_get_in_other_forms(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    whole = kubectl.json("get", "allocation", "one", "-n", team)
    assert (whole["kind"], whole["status"]["phase"]) == ("Allocation", "Pending")
    assert yaml.safe_load(kubectl("get", "allocation/one", "-n", team, "-o", "yaml"))["metadata"]["name"] == "one"
    assert kubectl("get", "allocations", "-n", team, "-o", "name") == "allocation/one\n"
    path = "jsonpath={.items[*].status.phase}"
    assert kubectl("get", "allocations", "-n", team, "-o", path) == "Pending"
    listed = kubectl.json("get", "allocations", "-n", team)
    assert (listed["kind"], len(listed["items"])) == ("List", 1)


def test_get_across_namespaces_with_selectors(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one", "two")
    kubectl("label", "allocation", "one", "-n", team, f"mark={team}")
    everywhere = kubectl("get", "allocations", "-A", "-l", f"mark={team}").splitlines()
    assert everywhere[0].split()[:2] == ["NAMESPACE", "NAME"]
    assert [line.split()[:2] for line in everywhere[1:]] == [[team, "one"]]
    assert kubectl("get", "al", "-n", team, "-l", f"mark notin ({team})", "-o", "name") == "allocation/two\n"
    pending = kubectl("get", "al", "-n", team, "--field-selector", "status.phase=Pending", "-o", "name")
    assert pending.splitlines() == ["allocation/one", "allocation/two"]
    assert kubectl("get", "al", "-n", team, "--field-selector", "status.phase=Running", "-o", "name") == ""
    refused = kubectl.run("get", "al", "-n", team, "--field-selector", "spec.colour=red", status=1)
    assert "spec.colour" in refused.stderr


def test_what_is_absent_is_not_found(kubectl: Kubectl, team: str) -> None:
    missing = kubectl.run("get", "allocation", "nothing", "-n", team, status=1)
    assert missing.stderr.strip() == 'Error from server (NotFound): allocations "nothing" not found'
    assert kubectl("get", "allocation", "nothing", "-n", team, "--ignore-not-found") == ""


def test_large_lists_come_in_pages(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, *(f"job-{index}" for index in range(7)))
    lines = kubectl("get", "al", "-n", team, "--chunk-size=3", "--no-headers").splitlines()
    assert [line.split()[0] for line in lines] == [f"job-{index}" for index in range(7)]


def test_api_resources_and_explain_know_our_kinds(kubectl: Kubectl) -> None:
    listed = kubectl("api-resources")
    for name, short in (("allocations", "alloc"), ("tenants", "tn"), ("resourcequotas", "quota"), ("nodes", "no")):
        (line,) = [line for line in listed.splitlines() if line.split()[0] == name]
        assert short in line
    assert "allocations" in kubectl("api-resources", "--namespaced=true", "-o", "name").split()
    assert "allocations" not in kubectl("api-resources", "--namespaced=false", "-o", "name").split()
    needs_openapi_3(kubectl)
    assert "preemptionPolicy" in kubectl("explain", "allocation.spec")
    assert "maxSkew" in kubectl("explain", "allocation.spec.scheduling.topologySpreadConstraints")


def test_versions_are_told(kubectl: Kubectl) -> None:
    done = json.loads(kubectl("version", "-o", "json"))
    assert done["serverVersion"]["gitVersion"].startswith("v")


# Describing.


def test_describe_quota_shows_used_and_hard(kubectl: Kubectl, team: str) -> None:
    kubectl("create", "quota", "limits", "-n", team, "--hard=cpu=10,memory=64Gi,pods=5")
    create_jobs(kubectl, team, "one")
    text = kubectl("describe", "quota", "limits", "-n", team)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if len(line.split()) == 3}
    assert rows["cpu"] == ["2", "10"]
    assert rows["memory"] == ["4Gi", "64Gi"]
    assert rows["pods"] == ["1", "5"]
    refused = kubectl.run("create", "-n", team, "-f", "-", text=JOB.format(name="big").replace('"2"', '"20"'), status=1)
    assert "exceeded quota: cpu limit 10, requested 20, used 2" in refused.stderr


def test_describe_an_allocation_shows_its_spec_and_its_events(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    kubectl("label", "allocation", "one", "-n", team, "seen=yes")
    text = kubectl("describe", "allocation", "one", "-n", team)
    assert "Phase:" in text
    assert "nvidia.com/gpu" in text
    assert "Created" in text
    assert "Changed" in text


def test_claims_are_applied_listed_described_and_approved(kubectl: Kubectl, team: str) -> None:
    tenant, space = f"{team}-t", f"{team}-c"
    policy = {"gates": ["manual"], "selfApproval": True}
    wanted = {"type": "cluster", "resources": {"clusters": 1}}
    objects: list[dict[str, Any]] = [
        {"kind": "Tenant", "metadata": {"name": tenant}, "spec": {"approval": policy}},
        {"kind": "Namespace", "metadata": {"name": space, "labels": {"bursar.io/tenant": tenant}}},
        {"kind": "ResourceClaim", "metadata": {"name": "prod", "namespace": space}, "spec": wanted},
    ]
    for one in objects:
        kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", **one}))
    header, row = kubectl("get", "rc", "-n", space).splitlines()
    assert header.split() == ["NAME", "TYPE", "RESOURCES", "APPROVAL", "STATE", "AGE"]
    assert row.split()[:6] == ["prod", "cluster", "clusters:", "1", "pending", "<none>"]
    assert "awaiting approval at gate manual" in kubectl("describe", "resourceclaim", "prod", "-n", space)
    path = f"/api/v1/namespaces/{space}/resourceclaims/prod/approve"
    kubectl("create", "--raw", path, "-f", "-", text="{}")
    approved = ("--field-selector", "status.approval.state=approved", "-o", "name")
    assert kubectl("get", "rc", "-n", space, *approved) == "resourceclaim/prod\n"
    assert "resourceclaim/prod" in kubectl("get", "all", "-n", space, "-o", "name")
    kubectl("delete", "namespace", space)


def test_describe_a_node(kubectl: Kubectl) -> None:
    name = unique("node")
    create_node(kubectl, name)
    text = kubectl("describe", "node", name)
    assert f"Name:               {name}" in text
    assert "nvidia.com/gpu:  4" in text
    assert "Ready" in text


def test_events_tell_what_happened(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    assert "allocation/one" in kubectl("get", "events", "-n", team)
    if kubectl.minor >= 26:
        assert "allocation/one" in kubectl("events", "-n", team, "--for", "allocation/one").lower()


# Writing.


def test_create_namespace_and_quota_by_command(kubectl: Kubectl, team: str) -> None:
    assert kubectl.json("get", "namespace", team)["status"]["phase"] == "Active"
    kubectl("create", "quota", "small", "-n", team, "--hard=cpu=8192m,memory=8192Mi", "--scopes=NotTerminating")
    quota = kubectl.json("get", "quota", "small", "-n", team)
    assert quota["spec"]["scopes"] == ["NotTerminating"]
    assert quota["spec"]["hard"]["memory"] == "8Gi", "quantities come back canonical"
    again = kubectl.run("create", "namespace", team, status=1)
    assert "AlreadyExists" in again.stderr


def test_create_with_an_unknown_field_is_refused(kubectl: Kubectl, team: str) -> None:
    text = JOB.format(name="odd") + "  colour: red\n"
    if kubectl.minor < 25:
        refused = kubectl.run("create", "-n", team, "-f", "-", text=text, status=1)
    else:
        refused = kubectl.run("create", "-n", team, "--validate=strict", "-f", "-", text=text, status=1)
        warned = kubectl.run("create", "-n", team, "--validate=warn", "-f", "-", text=text)
        assert "spec.colour" in warned.stderr
    assert "spec.colour" in refused.stderr


def test_dry_runs_create_nothing(kubectl: Kubectl, team: str) -> None:
    kubectl("create", "-n", team, "--dry-run=server", "-f", "-", text=JOB.format(name="one"))
    assert kubectl("get", "al", "-n", team, "-o", "name") == ""


def test_apply_creates_changes_and_leaves_alone(kubectl: Kubectl) -> None:
    name = unique("tenant")
    first = TENANT.format(name=name, weight=2, cpu=10)
    assert "created" in kubectl("apply", "-f", "-", text=first)
    assert "unchanged" in kubectl("apply", "-f", "-", text=first)
    assert "configured" in kubectl("apply", "-f", "-", text=TENANT.format(name=name, weight=2, cpu=20))
    assert kubectl.json("get", "tenant", name)["spec"]["limits"] == {"cpu": "20"}
    without_weight = TENANT.format(name=name, weight=2, cpu=20).replace("  weight: 2\n", "")
    assert "configured" in kubectl("apply", "-f", "-", text=without_weight)
    assert "weight" not in kubectl.json("get", "tenant", name)["spec"], "what is no longer said is taken out"


def test_apply_of_many_documents_at_once(kubectl: Kubectl, team: str) -> None:
    tenant = unique("tenant")
    documents = [TENANT.format(name=tenant, weight=1, cpu=1), JOB.format(name="a"), JOB.format(name="b")]
    text = "---\n".join(documents)
    assert kubectl("apply", "-n", team, "-f", "-", text=text).count("created") == 3
    assert kubectl("apply", "-n", team, "-f", "-", text=text).count("unchanged") == 3


def test_apply_on_the_server_side(kubectl: Kubectl) -> None:
    name = unique("tenant")
    text = TENANT.format(name=name, weight=2, cpu=10)
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", "-", text=text)
    changed = text.replace("weight: 2", "weight: 3")
    assert "serverside-applied" in kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=changed)
    assert kubectl.json("get", "tenant", name)["spec"]["weight"] == 3


def test_diff_shows_what_apply_would_change_and_changes_nothing(kubectl: Kubectl) -> None:
    name = unique("tenant")
    kubectl("apply", "-f", "-", text=TENANT.format(name=name, weight=2, cpu=10))
    same = kubectl.run("diff", "-f", "-", text=TENANT.format(name=name, weight=2, cpu=10))
    assert same.stdout == ""
    different = kubectl.run("diff", "-f", "-", text=TENANT.format(name=name, weight=7, cpu=10), status=1)
    assert "-  weight: 2" in different.stdout
    assert "+  weight: 7" in different.stdout
    assert kubectl.json("get", "tenant", name)["spec"]["weight"] == 2


@pytest.mark.parametrize(
    ("kind", "patch"),
    [
        ("merge", {"spec": {"weight": 5}}),
        ("strategic", {"spec": {"weight": 5}}),
        ("json", [{"op": "replace", "path": "/spec/weight", "value": 5}]),
    ],
)
def test_patch_in_three_ways(kubectl: Kubectl, kind: str, patch: Any) -> None:
    name = unique("tenant")
    kubectl("create", "-f", "-", text=TENANT.format(name=name, weight=2, cpu=10))
    kubectl("patch", "tenant", name, "--type", kind, "-p", json.dumps(patch))
    spec = kubectl.json("get", "tenant", name)["spec"]
    assert spec == {"weight": 5, "limits": {"cpu": "10"}}


def test_label_and_annotate_set_change_and_remove(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    for verb, field in (("label", "labels"), ("annotate", "annotations")):
        kubectl(verb, "allocation", "one", "-n", team, "colour=red")
        assert kubectl.json("get", "al", "one", "-n", team)["metadata"][field]["colour"] == "red"
        refused = kubectl.run(verb, "allocation", "one", "-n", team, "colour=blue", status=1)
        assert "--overwrite" in refused.stderr
        kubectl(verb, "allocation", "one", "-n", team, "--overwrite", "colour=blue")
        assert kubectl.json("get", "al", "one", "-n", team)["metadata"][field]["colour"] == "blue"
        kubectl(verb, "allocation", "one", "-n", team, "colour-")
        assert "colour" not in kubectl.json("get", "al", "one", "-n", team)["metadata"].get(field, {})


def test_replace_edits_with_a_version_and_conflicts(kubectl: Kubectl) -> None:
    name = unique("tenant")
    kubectl("create", "-f", "-", text=TENANT.format(name=name, weight=2, cpu=10))
    whole = kubectl.json("get", "tenant", name)
    whole["spec"]["weight"] = 3
    kubectl("replace", "-f", "-", text=json.dumps(whole))
    stale = kubectl.run("replace", "-f", "-", text=json.dumps(whole | {"spec": {"weight": 4}}), status=1)
    assert "Conflict" in stale.stderr


def test_watching_prints_what_happens(kubectl: Kubectl, team: str) -> None:
    """Quotas, because nobody else writes to them."""
    kubectl("create", "quota", "one", "-n", team, "--hard=cpu=1")
    watching = kubectl.start("get", "quota", "-n", team, "-w", "--no-headers", "--output-watch-events")
    try:
        assert watching.stdout is not None
        assert watching.stdout.readline().split()[:2] == ["ADDED", "one"]
        kubectl("create", "quota", "two", "-n", team, "--hard=cpu=1")
        assert watching.stdout.readline().split()[:2] == ["ADDED", "two"]
        kubectl("label", "quota", "two", "-n", team, "seen=yes")
        assert watching.stdout.readline().split()[:2] == ["MODIFIED", "two"]
        kubectl("delete", "quota", "two", "-n", team)
        assert watching.stdout.readline().split()[:2] == ["DELETED", "two"]
    finally:
        watching.terminate()
        watching.communicate(timeout=20)


def test_watching_prints_why_something_waits_and_that_it_is_gone(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    watching = kubectl.start("get", "allocations", "-n", team, "-w", "--no-headers", "--output-watch-events")
    try:
        assert watching.stdout is not None
        noted = next(line for line in watching.stdout if any(reason in line for reason in REASONS))
        assert noted.split()[1:3] == ["one", "Pending"]
        kubectl("delete", "allocation", "one", "-n", team)
        assert watching.stdout.readline().split()[:2] == ["DELETED", "one"]
    finally:
        watching.terminate()
        watching.communicate(timeout=20)


def test_wait_for_a_condition_and_for_deletion(kubectl: Kubectl, team: str) -> None:
    name = unique("node")
    create_node(kubectl, name)
    assert "condition met" in kubectl("wait", "node", name, "--for=condition=Ready", "--timeout=20s")
    create_jobs(kubectl, team, "one")
    never = kubectl.run("wait", "allocation/one", "-n", team, "--for=condition=Ready", "--timeout=1s", status=1)
    assert "timed out" in never.stderr
    waiting = kubectl.start("wait", "allocation/one", "-n", team, "--for=delete", "--timeout=30s")
    kubectl("delete", "allocation", "one", "-n", team)
    assert waiting.wait(30) == 0
    assert waiting.stdout is not None
    waiting.stdout.close()
    if kubectl.minor >= 23:
        create_jobs(kubectl, team, "two")
        phase = "--for=jsonpath={.status.phase}=Pending"
        assert "condition met" in kubectl("wait", "allocation/two", "-n", team, phase, "--timeout=20s")


def test_delete_one_several_and_by_label(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one", "two", "three", "four")
    assert kubectl("delete", "allocation", "one", "-n", team).strip().startswith('allocation "one" deleted')
    kubectl("label", "allocation", "two", "-n", team, "group=x")
    assert 'allocation "two" deleted' in kubectl("delete", "allocation", "-n", team, "-l", "group=x")
    assert kubectl("get", "al", "-n", team, "-o", "name").split() == ["allocation/four", "allocation/three"]
    kubectl("delete", "allocation", "--all", "-n", team)
    assert kubectl("get", "al", "-n", team, "-o", "name") == ""
    missing = kubectl.run("delete", "allocation", "one", "-n", team, status=1)
    assert "NotFound" in missing.stderr


def test_deleting_a_namespace_waits_until_it_is_empty_and_gone(kubectl: Kubectl, team: str) -> None:
    create_jobs(kubectl, team, "one")
    assert "deleted" in kubectl("delete", "namespace", team, "--timeout=30s")
    assert kubectl("get", "namespace", team, "--ignore-not-found") == ""


def test_cordon_uncordon_and_taint(kubectl: Kubectl) -> None:
    name = unique("node")
    create_node(kubectl, name)
    assert "cordoned" in kubectl("cordon", name)
    assert "SchedulingDisabled" in kubectl("get", "node", name)
    assert "already cordoned" in kubectl("cordon", name)
    assert "uncordoned" in kubectl("uncordon", name)
    assert "SchedulingDisabled" not in kubectl("get", "node", name)
    kubectl("taint", "node", name, "gpu=only:NoSchedule")
    kubectl("taint", "node", name, "other=x:NoExecute")
    taints = {one["key"]: one["effect"] for one in kubectl.json("get", "node", name)["spec"]["taints"]}
    assert taints == {"gpu": "NoSchedule", "other": "NoExecute"}
    kubectl("taint", "node", name, "gpu-")
    assert [one["key"] for one in kubectl.json("get", "node", name)["spec"]["taints"]] == ["other"]


def test_auth_can_i(kubectl: Kubectl, team: str) -> None:
    assert kubectl("auth", "can-i", "create", "allocations", "-n", team).strip() == "yes"
    assert "*" in kubectl("auth", "can-i", "--list", "-n", team)
    token = _token(kubectl, team, "viewer")
    assert kubectl("--token", token, "auth", "can-i", "get", "allocations", "-n", team).strip() == "yes"
    denied = kubectl.run("--token", token, "auth", "can-i", "create", "allocations", "-n", team, status=1)
    assert denied.stdout.startswith("no")
    assert "allocations" in kubectl("--token", token, "auth", "can-i", "--list", "-n", team)
    if kubectl.minor >= 28:
        assert "role:viewer" in kubectl("--token", token, "auth", "whoami")


def test_a_role_without_the_right_is_forbidden_and_a_stranger_is_told_to_log_in(kubectl: Kubectl, team: str) -> None:
    viewer = _token(kubectl, team, "viewer")
    refused = kubectl.run("--token", viewer, "create", "namespace", unique("x"), status=1)
    assert "Forbidden" in refused.stderr
    stranger = kubectl.run("--token", "nonsense", "get", "nodes", status=1)
    assert "Unauthorized" in stranger.stderr or "logged in" in stranger.stderr


def _token(kubectl: Kubectl, team: str, role: str) -> str:
    """Made with kubectl's own raw request, so that no other client is needed."""
    body = json.dumps({"role": role, "tenant": "default"})
    made = kubectl("create", "--raw", "/api/v1/tokens", "-f", "-", text=body)
    return str(json.loads(made)["status"]["token"])


def test_raw_requests_reach_what_has_no_kind(kubectl: Kubectl) -> None:
    assert kubectl("get", "--raw", "/readyz") == "ok"
    assert "bursar" in kubectl("get", "--raw", "/metrics")


def test_a_watch_that_is_interrupted_ends_kubectl_cleanly(kubectl: Kubectl, team: str) -> None:
    watching = kubectl.start("get", "al", "-n", team, "--watch-only", "--request-timeout=2s")
    try:
        assert watching.wait(30) in (0, 1)
    except subprocess.TimeoutExpired:  # older versions do not time out a watch
        watching.terminate()
    finally:
        watching.communicate(timeout=20)


def test_projects_and_role_bindings_by_command(kubectl: Kubectl) -> None:
    project = unique("project")
    assert {"projects", "users", "rolebindings"} <= {
        one.partition(".")[0] for one in kubectl("api-resources", "-o", "name").split()
    }
    body = {"apiVersion": "project.openshift.io/v1", "kind": "Project", "metadata": {"name": project}}
    kubectl("create", "-f", "-", text=json.dumps(body))
    assert kubectl.json("get", "project", project)["status"]["phase"] == "Active"
    assert project in kubectl("get", "projects")
    subjects = json.dumps({"subjects": [{"kind": "User", "name": "ann"}]})
    kubectl("patch", "rolebinding", "edit", "-n", project, "--type=merge", "-p", subjects)
    assert [one["name"] for one in kubectl.json("get", "rolebinding", "edit", "-n", project)["subjects"]] == ["ann"]
    user = {"apiVersion": "user.openshift.io/v1", "kind": "User", "metadata": {"name": unique("ann")}}
    kubectl("apply", "-f", "-", text=json.dumps(user))
    assert "unchanged" in kubectl("apply", "-f", "-", text=json.dumps(user))
    assert "deleted" in kubectl("delete", "project", project, "--wait=false")
