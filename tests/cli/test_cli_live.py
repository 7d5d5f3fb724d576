"""The command line against a real server, as a user would type it."""

import json
import os
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from support.process.server import Server, migrated_directory, started

# Without these, a command takes the server from the configuration file.
FROM_FILE = {"BURSAR_URL": "", "BURSAR_TOKEN": ""}


class Shell:
    """Runs commands for one server, in one namespace, with a configuration file of its own."""

    def __init__(self, server: Server, directory: Path, namespace: str) -> None:
        self.namespace = namespace
        self.config = directory / "config.yaml"
        self.environment = {
            "BURSAR_URL": server.url,
            "BURSAR_TOKEN": server.token,
            "BURSAR_CONFIG": str(self.config),
            "EDITOR": "",
        }

    def __call__(
        self, line: str, *more: str, given: str | None = None, code: int = 0, env: Mapping[str, str] | None = None
    ) -> Result:
        """What a command printed; it must end with this code."""
        words = [*line.split(), *more]
        result = CliRunner(env={**self.environment, **(env or {})}).invoke(cli, words, input=given)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def json(self, line: str, *more: str) -> Any:
        return json.loads(self(line, *more).stdout)


@pytest.fixture
def shell(empty_server: Server, tmp_path: Path) -> Shell:
    name = f"t-{uuid.uuid4().hex[:12]}"
    with empty_server.client() as admin:
        admin.tenants.create({"metadata": {"name": name}, "spec": {"limits": {"nvidia.com/gpu": 4}}})
        admin.namespaces.create({"metadata": {"name": name, "labels": {"bursar.io/tenant": name}}})
    return Shell(empty_server, tmp_path, name)


def manifest(name: str, gpus: int = 1, **labels: str) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Allocation",
        "metadata": {"name": name, "labels": labels},
        "spec": {"resources": {"requests": {"cpu": "1", "nvidia.com/gpu": str(gpus)}}},
    }
    return yaml.safe_dump(document)


def own_node(name: str) -> dict[str, Any]:
    """A node of a test's own: the taint keeps out what other tests have left waiting."""
    spec = {"capacity": {"cpu": "8", "memory": "16Gi"}, "taints": [{"key": "own", "effect": "NoSchedule"}]}
    return {"kind": "Node", "metadata": {"name": name}, "spec": spec}


# --- Looking


def test_get_prints_the_servers_table(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=f"{manifest('a', team='ml')}---\n{manifest('b')}")
    lines = shell(f"get alloc -n {shell.namespace}").stdout.splitlines()
    assert lines[0].split()[0] == "NAME"
    assert [line.split()[0] for line in lines[1:]] == ["a", "b"]
    wide = shell(f"get alloc -n {shell.namespace} -o wide --show-labels").stdout.splitlines()
    assert len(wide[0]) > len(lines[0])
    assert "PRIORITY " in wide[0]
    assert wide[1].endswith("team=ml")
    everywhere = shell("get alloc -A -l team=ml").stdout.splitlines()
    assert everywhere[0].startswith("NAMESPACE")
    assert [line.split()[:2] for line in everywhere[1:] if line.startswith(shell.namespace)] == [[shell.namespace, "a"]]
    assert shell(f"get alloc -n {shell.namespace} --no-headers -l team=ml").stdout.split()[0] == "a"


def test_get_in_every_form(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("a"))
    assert shell.json(f"get allocation a -n {shell.namespace} -o json")["metadata"]["name"] == "a"
    assert yaml.safe_load(shell(f"get alloc/a -n {shell.namespace} -o yaml").stdout)["metadata"]["name"] == "a"
    assert shell(f"get allocations -n {shell.namespace} -o name").stdout == "allocation/a\n"
    found = shell.json(f"get allocations -n {shell.namespace} -o json")
    assert (found["kind"], len(found["items"])) == ("List", 1)


def test_get_several_kinds(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("a"))
    shown = shell(f"get alloc/a tenant/{shell.namespace} -n {shell.namespace}").stdout
    assert "allocation/a " in shown
    assert f"tenant/{shell.namespace} " in shown


def test_get_nothing_says_so_aside(shell: Shell) -> None:
    result = shell(f"get allocations -n {shell.namespace}")
    assert result.stdout == ""
    assert result.stderr == f"No allocations found in namespace {shell.namespace}.\n"


def test_get_goes_on_after_what_is_missing(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("a"))
    result = shell(f"get alloc missing a -n {shell.namespace}", code=3)
    assert "a " in result.stdout
    assert result.stderr.startswith(f'Error: allocation "missing" not found in namespace {shell.namespace}\n')


def test_a_kind_only_the_server_knows(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("a"))
    assert "allocation/a" in shell(f"get events -n {shell.namespace}").stdout
    assert "did you mean 'allocations'" in shell("get alocations", code=2).stderr


def test_what_can_only_be_sent_is_no_kind_to_look_at(shell: Shell) -> None:
    for kind in ("preemptions", "selfsubjectaccessreviews"):
        assert f"unknown kind '{kind}'" in shell(f"get {kind} -n {shell.namespace}", code=2).stderr
    offered = shell("get zzzzzzzz", code=2).stderr
    assert "events" in offered
    assert "preemptions" not in offered


def test_describe(shell: Shell) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("a", team="ml"))
    lines = shell(f"describe alloc a -n {shell.namespace}").stdout.splitlines()
    assert lines[:4] == [
        "Name:         a",
        f"Namespace:    {shell.namespace}",
        "Kind:         Allocation",
        "Labels:       team=ml",
    ]
    assert "      nvidia.com/gpu: 1" in lines
    assert "  phase: Pending" in lines
    assert any("Created" in line for line in lines[lines.index("Events:") :])


@pytest.mark.parametrize(
    ("command", "heading"),
    [
        ("get allocations -w", "NAME"),
        ("watch allocations", "EVENT"),
        ("watch allocations -o json", ""),
        ("get allocations -w -o name", ""),
    ],
)
def test_watching_in_a_terminal(shell: Shell, command: str, heading: str) -> None:
    shell(f"create -n {shell.namespace} -f -", given=manifest("first"))
    with subprocess.Popen(
        [sys.executable, "-m", "bursar.cli", *command.split(), "-n", shell.namespace],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **shell.environment},
    ) as process:
        try:
            assert process.stdout is not None
            if heading:
                assert process.stdout.readline().startswith(heading)
            assert "first" in process.stdout.readline()
            shell(f"create -n {shell.namespace} -f -", given=manifest("later"))
            # The scheduler may say meanwhile why the first one waits.
            news = next(line for line in process.stdout if "first" not in line)
            assert "later" in news
            process.send_signal(2)
            assert process.wait(60) == 130
        finally:
            process.kill()


# --- Changing


def test_files_directories_and_lists(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / "one.yaml").write_text(manifest("one"))
    (folder / "two.json").write_text(json.dumps({"kind": "List", "items": [yaml.safe_load(manifest("two"))]}))
    said = shell(f"create -n {shell.namespace} -f {folder}").stdout
    assert said == "allocation/one created\nallocation/two created\n"
    gone = shell(f"delete -n {shell.namespace} -f {folder}").stdout
    assert gone == "allocation/two deleted\nallocation/one deleted\n"
    assert shell(f"get alloc -n {shell.namespace} -o name").stdout == ""


def test_an_object_that_does_not_say_its_kind(shell: Shell) -> None:
    body = '{"metadata": {"name": "plain"}, "spec": {"resources": {"requests": {"cpu": "1"}}}}'
    assert "has no `kind` field" in shell(f"create -n {shell.namespace} -f -", given=body, code=1).stderr
    assert shell(f"create allocation -n {shell.namespace} -f -", given=body).stdout == "allocation/plain created\n"
    assert shell(f"apply alloc -n {shell.namespace} -f -", given=body).stdout == "allocation/plain configured\n"


def test_an_object_without_a_name(shell: Shell) -> None:
    text = manifest("x").replace("name: x", "generateName: run-")
    for command in ("apply", "delete"):
        assert "no metadata.name" in shell(f"{command} -n {shell.namespace} -f -", given=text, code=1).stderr
    assert shell(f"create -n {shell.namespace} -f -", given=text).stdout.startswith("allocation/run-")


def test_create_by_name(shell: Shell) -> None:
    name = f"n-{uuid.uuid4().hex[:12]}"
    assert shell(f"create namespace {name} --tenant {shell.namespace}").stdout == f"namespace/{name} created\n"
    labels = shell.json(f"get ns {name} -o json")["metadata"]["labels"]
    assert labels["bursar.io/tenant"] == shell.namespace
    shell(f"create tenant {name}")
    shell(f"create tenant {name}", code=5)


def test_create_goes_on_and_ends_with_the_first_failure(shell: Shell) -> None:
    text = "---\n".join([manifest("a"), manifest("too-big", gpus=100), manifest("a"), manifest("b")])
    result = shell(f"create -n {shell.namespace} -f -", given=text, code=6)
    assert result.stdout == "allocation/a created\nallocation/b created\n"
    assert "nvidia.com/gpu" in result.stderr
    assert "  hint: " in result.stderr
    assert "already exists" in result.stderr


def test_a_namespace_in_the_file_and_another_on_the_line(shell: Shell) -> None:
    text = manifest("a").replace("name: a", f"name: a\n  namespace: {shell.namespace}")
    assert "is in namespace" in shell("create -n other -f -", given=text, code=1).stderr
    assert shell("create -f -", given=text).stdout == "allocation/a created\n"


def test_dry_runs_change_nothing(shell: Shell) -> None:
    assert shell(f"create -n {shell.namespace} --dry-run -f -", given=manifest("a")).stdout.endswith("(dry run)\n")
    assert shell(f"apply -n {shell.namespace} --dry-run -f -", given=manifest("a")).stdout.endswith(
        "created (dry run)\n"
    )
    assert shell(f"get alloc -n {shell.namespace} -o name").stdout == ""


def test_apply(shell: Shell) -> None:
    name = f"t-{uuid.uuid4().hex[:12]}"

    def tenant(**spec: Any) -> str:
        return yaml.safe_dump({"kind": "Tenant", "metadata": {"name": name}, "spec": spec})

    assert shell("apply -f -", given=tenant(limits={"nodes": 1, "cpu": 4})).stdout == f"tenant/{name} created\n"
    assert shell("apply -f -", given=tenant(limits={"nodes": 1, "cpu": 4})).stdout == f"tenant/{name} unchanged\n"
    shell(f"label tenant {name} owner=alice")
    assert shell("apply -f -", given=tenant(limits={"nodes": 2})).stdout == f"tenant/{name} configured\n"
    read = shell.json(f"get tenant {name} -o json")
    assert read["spec"] == {"limits": {"nodes": 2}}
    assert read["metadata"]["labels"] == {"owner": "alice"}


def test_patch(shell: Shell) -> None:
    assert shell(f"patch tenant {shell.namespace} -p", '{"spec": {"limits": {"nodes": 5}}}').stdout.endswith(
        "patched\n"
    )
    operations = '[{"op": "remove", "path": "/spec/limits/nodes"}]'
    shell(f"patch tenant/{shell.namespace} --type json -p", operations)
    assert shell.json(f"get tenant {shell.namespace} -o json")["spec"]["limits"] == {"nvidia.com/gpu": 4}
    shell(f"patch tenant {shell.namespace}", code=2)


def test_labels_and_annotations(shell: Shell) -> None:
    what = f"tenant {shell.namespace}"
    assert shell(f"label {what} team=ml zone=a").stdout == f"tenant/{shell.namespace} labeled\n"
    assert "--overwrite" in shell(f"label {what} team=web", code=5).stderr
    shell(f"label {what} team=web zone- --overwrite")
    assert shell(f"label {what} team=web").stdout == f"tenant/{shell.namespace} unchanged\n"
    shell(f"annotate {what}", "note=two words")
    metadata = shell.json(f"get {what} -o json")["metadata"]
    assert metadata["labels"] == {"team": "web"}
    assert metadata["annotations"] == {"note": "two words"}


def test_edit(shell: Shell, tmp_path: Path) -> None:
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nsed -i "s/nvidia.com\\/gpu: 4/nvidia.com\\/gpu: 8/" "$1"\n')
    editor.chmod(0o755)
    shell(f"edit tenant {shell.namespace}", env={"EDITOR": str(editor)})
    assert shell.json(f"get tenant {shell.namespace} -o json")["spec"]["limits"] == {"nvidia.com/gpu": 8}
    said = shell(f"edit tenant {shell.namespace}", env={"EDITOR": "true"}).stdout
    assert said == f"tenant/{shell.namespace} unchanged\n"


def test_delete_by_selector(shell: Shell) -> None:
    text = "---\n".join([manifest("a", batch="1"), manifest("b", batch="1"), manifest("c", batch="2")])
    shell(f"create -n {shell.namespace} -f -", given=text)
    shell(f"delete alloc -n {shell.namespace}", code=2)
    shell(f"delete alloc -n {shell.namespace} -l batch=1 --grace-period 0")
    assert shell(f"get alloc -n {shell.namespace} -o name").stdout == "allocation/c\n"
    shell(f"delete alloc missing -n {shell.namespace}", code=3)
    assert shell(f"delete alloc missing -n {shell.namespace} --ignore-not-found").output == ""


def test_release(shell: Shell) -> None:
    text = "---\n".join([manifest("a", batch="1"), manifest("b", batch="1"), manifest("c", batch="2")])
    shell(f"create -n {shell.namespace} -f -", given=text)
    assert shell(f"release -n {shell.namespace} -l batch=1 --dry-run").stdout == "2 would be released, 0 failed\n"
    assert shell(f"release -n {shell.namespace} -l batch=1").stdout == "2 released, 0 failed\n"
    shell(f"release -n {shell.namespace}", code=2)


def test_cordon(shell: Shell) -> None:
    name = f"node-{uuid.uuid4().hex[:12]}"
    shell("create -f -", given=yaml.safe_dump(own_node(name)))
    assert shell(f"cordon {name}").stdout == f"node/{name} cordoned\n"
    assert shell.json(f"get node {name} -o json")["spec"]["unschedulable"] is True
    shell(f"uncordon {name}")
    assert "unschedulable" not in shell.json(f"get node {name} -o json")["spec"]
    shell("cordon missing", code=3)
    shell(f"delete node {name}")


# --- Tenants, tokens, contexts


def test_taint(shell: Shell) -> None:
    name = f"node-{uuid.uuid4().hex[:12]}"
    shell("create -f -", given=yaml.safe_dump(own_node(name)))
    said = shell(f"taint {name} team=physics:NoSchedule own- --dry-run").stdout
    assert said == f"node/{name} tainted (dry run)\n"
    assert shell(f"taint {name} team=physics:NoSchedule").stdout == f"node/{name} tainted\n"
    assert shell(f"taint node {name} team=physics:NoSchedule").stdout == f"node/{name} unchanged\n"
    assert "--overwrite" in shell(f"taint {name} team=biology:NoSchedule", code=5).stderr
    assert "must be one of NoSchedule" in shell(f"taint {name} team:Never", code=1).stderr
    shell(f"taint {name} team=biology:NoSchedule flaky:NoExecute --overwrite")
    taints = shell.json(f"get node {name} -o json")["spec"]["taints"]
    assert [(one["key"], one.get("value"), one["effect"]) for one in taints] == [
        ("own", None, "NoSchedule"), ("team", "biology", "NoSchedule"), ("flaky", None, "NoExecute"),
    ]  # fmt: skip
    assert shell(f"taint {name} team:NoSchedule- flaky-").stdout == f"node/{name} untainted\n"
    # Its own taint stays: what other tests have waiting would come here.
    assert [one["key"] for one in shell.json(f"get node {name} -o json")["spec"]["taints"]] == ["own"]
    shell("taint no-such-node a:NoSchedule", code=3)
    shell(f"taint {name}", code=2)
    shell(f"delete node {name}")


def test_what_is_not_there_may_be_in_another_namespace(shell: Shell) -> None:
    said = shell("status nobody", code=3).stderr
    assert said.startswith('Error: allocation "nobody" not found in namespace default\n')
    assert "hint: `bursar status --ended` lists" in said
    assert "hint" not in shell(f"status nobody -n {shell.namespace}", code=3).stderr
    name = f"here-{shell.namespace}"
    shell(f"create -n {shell.namespace} -f -", given=manifest(name))
    missing = f'Error: allocation "{name}" not found in namespace default; it exists in {shell.namespace}\n'
    for command in ("logs", "explain", "get alloc", "describe alloc", "delete alloc", "preempt --reason test"):
        assert shell(f"{command} {name} -n default", code=3).stderr == missing, command


def test_tenant_limits(shell: Shell) -> None:
    shell(f"admin tenant update {shell.namespace} --max-nodes 250 --gpu-hours-budget 150000 --limit memory=40Ti")
    shell(f"admin tenant update {shell.namespace} --limit nvidia.com/gpu=none --max-concurrent-allocations 50")
    spec = shell.json(f"get tenant {shell.namespace} -o json")["spec"]
    assert spec == {"limits": {"nodes": 250, "memory": "40Ti", "allocations": 50}, "gpuHoursBudget": 150000}
    lines = shell(f"tenant quotas {shell.namespace}").stdout.splitlines()
    assert lines[0].split() == ["DIMENSION", "LIMIT", "SOURCE", "REQUESTED", "PLACED", "USED"]
    assert ["nodes", "250"] in [line.split()[:2] for line in lines]
    shown = [shell.json(f"tenant quotas {shell.namespace} {form}") for form in ("--json", "-o json")]
    assert shown[0] == shown[1]
    header, row = shell(f"get tenant {shell.namespace} -o wide").stdout.splitlines()
    assert header.split()[-3:] == ["GPU-HOURS", "NODE-HOURS", "BILLING"]
    assert row.split()[-3:] == ["150000", "<none>", "<none>"]
    refused = shell(f"admin tenant update {shell.namespace} --limit gpu=8", code=2)
    assert "full name, such as nvidia.com/gpu" in refused.stderr
    shell(f"admin tenant update {shell.namespace} --limit gpu=8 --force")
    shell(f"admin tenant update {shell.namespace}", code=2)
    shell("admin tenant update missing --max-nodes 1", code=3)


def test_a_limit_below_what_is_used_is_told(shell: Shell) -> None:
    for name in ("a", "b"):
        body = {"metadata": {"name": name}, "spec": {"resources": {"requests": {"cpu": 1}}}}
        shell(f"create allocation -n {shell.namespace} -f -", given=json.dumps(body))
    lower = f"admin tenant update {shell.namespace} --max-concurrent-allocations"
    assert shell(f"{lower} 1 --dry-run").output == f"tenant/{shell.namespace} updated (dry run)\n"
    assert "allocations" not in shell.json(f"get tenant {shell.namespace} -o json")["spec"]["limits"]
    lowered = f"note: tenant {shell.namespace} has a lower limit: max_concurrent_allocations: 1 → 0\n"
    for limit, more in ((1, ""), (0, lowered)):
        done = shell(f"{lower} {limit}")
        assert done.stdout == f"tenant/{shell.namespace} updated\n"
        assert done.stderr == (
            f"{more}note: max_concurrent_allocations: the limit is {limit}, and 2 are in use; "
            "running work continues, new work is refused until usage is below the limit\n"
        )
    assert shell(f"{lower} 2").stderr == ""
    without = f"note: tenant {shell.namespace} has no limit of its own now for max_concurrent_allocations; "
    assert shell(f"{lower} none").stderr.startswith(without)
    assert shell(f"{lower} none").stderr == "", "it was gone"


def test_limits_that_are_removed_are_told(shell: Shell, tmp_path: Path) -> None:
    where, limits = f"tenant {shell.namespace}", {"allocations": 0, "volumes": 3}
    body = {"metadata": {"name": "a"}, "spec": {"resources": {"requests": {"cpu": 1}}}}
    shell(f"create allocation -n {shell.namespace} -f -", given=json.dumps(body))
    gone = (
        f"note: tenant {shell.namespace} has no limits of its own now; "
        "limits of its tier, of the tenants above it and of the system apply\n"
    )
    tenant = {"kind": "Tenant", "metadata": {"name": shell.namespace}, "spec": {"limits": limits}}
    editor = tmp_path / "editor.sh"
    editor.write_text('#!/bin/sh\nsed -i "/^  limits:/,/^    volumes:/d; s/^spec:$/spec: {}/" "$1"\n')
    editor.chmod(0o700)
    ways: list[tuple[list[str], dict[str, Any]]] = [
        ([f"patch {where} -p", '{"spec":{"limits":null}}'], {}),
        (["apply -f -"], {"given": json.dumps({**tenant, "spec": {}})}),
        ([f"edit {where}"], {"env": {"EDITOR": str(editor)}}),
    ]
    for words, options in ways:
        lowered = shell("apply -f -", given=json.dumps(tenant))
        assert "is refused until usage is below the limit" in lowered.stderr
        assert shell(*words, **options).stderr == gone, words
    shell("apply -f -", given=json.dumps(tenant))
    assert shell(f"patch {where} --dry-run -p", '{"spec":{"limits":null}}').stderr == "", "nothing was changed"
    assert shell(f"patch {where} -p", '{"metadata":{"labels":{"a":"b"}}}').stderr == "", "limits were left as they are"


def test_tokens(shell: Shell) -> None:
    made = shell(f"token create --role user --tenant {shell.namespace} --user alice --ttl 1h")
    token = made.stdout.strip()
    assert "\n" not in token
    shown = shell("whoami", env={"BURSAR_TOKEN": token}).stdout.splitlines()
    assert shown[:3] == ["alice", "  role: user", f"  tenant: {shell.namespace}"]
    shell("create tenant mine", env={"BURSAR_TOKEN": token}, code=4)
    identity = made.stderr.partition("/")[2].partition(" ")[0]
    assert identity in shell("token list").stdout
    assert shell(f"token revoke {identity}").stdout == f"token/{identity} revoked\n"
    assert "bursar login" in shell("whoami", env={"BURSAR_TOKEN": token}, code=4).stderr
    shell("token revoke missing", code=3)
    shell("token create --role nobody", code=2)


def test_a_node_token_is_for_one_node_and_one_use(empty_server: Server, shell: Shell) -> None:
    name = f"node-{uuid.uuid4().hex[:12]}"
    token = shell(f"node token --name {name}").stdout.strip()
    with empty_server.client(token) as client:
        assert client.nodes.create(own_node(name))["status"]["token"]
    shell(f"get node {name}", env={"BURSAR_TOKEN": token}, code=4)
    shell(f"delete node {name}")


def test_the_first_minute_of_a_tenants_user(empty_server: Server, shell: Shell) -> None:
    """The namespace `default` is another's: a user is told which are theirs, and not to create it."""
    token = shell(f"token create --role user --tenant {shell.namespace} --user ann").stdout.strip()
    as_user = {"BURSAR_TOKEN": token}
    lost = shell("run --detach --gpus 1 -- hostname", code=3, env=as_user)
    assert f"give -n NAME: yours is {shell.namespace}" in lost.stderr
    assert "Create it first" not in lost.stderr
    elsewhere = shell("run --detach -n nowhere -- hostname", code=3, env=as_user).stderr
    assert "`bursar get namespaces` lists yours" in elsewhere

    said = shell(f"login {empty_server.url} --token - --context ann", given=token, env=FROM_FILE).stdout
    assert f'The default namespace is "{shell.namespace}".' in said
    shell("run --detach --gpus 1 -- hostname", env=FROM_FILE)
    second = f"{shell.namespace}-b"
    shell(f"create namespace {second} --tenant {shell.namespace}")
    said = shell(f"login {empty_server.url} --token - --context ann", given=token, env=FROM_FILE).stdout
    assert f'The default namespace is "{shell.namespace}"; yours are {shell.namespace}, {second}' in said
    assert (
        "default namespace"
        not in shell(f"login {empty_server.url} --token - --context ann -n {second}", given=token, env=FROM_FILE).stdout
    )


def test_a_nodes_token_is_kept_from_others(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "here.token"
    file.write_text("an older one")
    file.chmod(0o644)
    made = shell(f"node token --name {shell.namespace} --output {file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().startswith("bsr_")
    assert made.stdout == ""
    assert "no token was created" in shell(f"node token --name other --output {tmp_path}/no/file", code=1).stderr


def test_login_and_contexts(empty_server: Server, shell: Shell) -> None:
    said = shell(
        f"login {empty_server.url} --token - --context lab", given=f"{empty_server.token}\n", env=FROM_FILE
    ).stdout
    assert said.startswith(f"Logged in to {empty_server.url}")
    assert stat.S_IMODE(shell.config.stat().st_mode) == 0o600
    shell(f"get tenant {shell.namespace}", env=FROM_FILE)
    shell(f"login {empty_server.url} --token wrong --context bad", code=4, env=FROM_FILE)
    shell(f"login {empty_server.url} --token {empty_server.token} --context other -n {shell.namespace}", env=FROM_FILE)
    listed = [line.split() for line in shell("context list", env=FROM_FILE).stdout.splitlines()]
    assert listed[1:] == [["lab", empty_server.url, "<none>"], ["*", "other", empty_server.url, shell.namespace]]
    assert shell.namespace in shell("get allocations", env=FROM_FILE).stderr
    shell("context use lab", env=FROM_FILE)
    shell("get tenants --context other", env=FROM_FILE)
    shell("context delete other", env=FROM_FILE)
    shell("context use other", code=3, env=FROM_FILE)
    shell("get tenants --context other", code=1, env=FROM_FILE)


def test_nobody_there_says_what_to_do(shell: Shell) -> None:
    result = shell("get tenants", env={"BURSAR_URL": "http://127.0.0.1:9"}, code=7)
    told, hint = result.stderr.splitlines()
    assert told == "Error: could not reach http://127.0.0.1:9: the connection was refused"
    assert "check that the server runs (`bursar serve`)" in hint


def test_versions(shell: Shell) -> None:
    assert shell("version").stdout.startswith("bursar ")
    assert "server v1." in shell("version --server").stdout


def test_names_are_completed_by_asking_the_server(shell: Shell) -> None:
    shell(
        f"create -n {shell.namespace} -f -",
        given=f"{manifest('train-1')}---\n{manifest('train-2')}---\n{manifest('x')}",
    )

    def completed(*words: str) -> list[str]:
        environment = {
            **os.environ,
            **shell.environment,
            "_BURSAR_COMPLETE": "bash_complete",
            "BURSAR_COMPLETION_SECONDS": "30",
            "COMP_WORDS": " ".join(["bursar", *words]),
            "COMP_CWORD": str(len(words)),
        }
        shown = subprocess.run([sys.executable, "-m", "bursar.cli"], capture_output=True, text=True, env=environment)
        return [line.partition(",")[2] for line in shown.stdout.splitlines()]

    assert completed("get", "-n", shell.namespace, "alloc", "tr") == ["train-1", "train-2"]
    assert completed("get", "-n", shell.namespace, "alloc", "train-1", "x") == ["x"]
    assert completed("get", "-n", shell.namespace, "alloc/tr") == ["alloc/train-1", "alloc/train-2"]
    assert completed("explain", "-n", shell.namespace, "tr") == ["train-1", "train-2"]
    assert completed("explain", "-n", shell.namespace, "alloc/x") == ["alloc/x"]
    assert completed("explain", "-n", shell.namespace, "alloc", "x") == ["x"]
    assert shell.namespace in completed("tenant", "quotas", shell.namespace[:4])


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl on this machine")
def test_kubectl_works_with_the_kubeconfig(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    with migrated_directory() as data, started(data, tls=True) as secure:
        shell = Shell(secure, tmp_path, "default")
        assert "not trusted" in shell(f"login {secure.url} --token {secure.token}", code=7, env=FROM_FILE).stderr
        shell(f"login {secure.url} --token {secure.token} --ca-file {data / 'tls' / 'ca.crt'}", env=FROM_FILE)
        shell("create tenant physics", env=FROM_FILE)
        shell(f"kubeconfig --output {kubeconfig}", env=FROM_FILE)
        assert stat.S_IMODE(kubeconfig.stat().st_mode) == 0o600
        assert yaml.safe_load(shell("kubeconfig", env=FROM_FILE).stdout) == yaml.safe_load(kubeconfig.read_text())
        ran = subprocess.run(
            ["kubectl", "--kubeconfig", str(kubeconfig), "get", "tenant", "physics", "-o", "name"],
            capture_output=True,
            text=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    assert ran.stdout.strip() == "tenant/physics", ran.stderr


def test_kubeconfig_over_plain_http_says_what_is_wrong(shell: Shell) -> None:
    assert "--tls auto" in shell("kubeconfig").stderr


def test_the_example_can_be_applied_and_says_which_quota_is_full(shell: Shell) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "cluster.yaml")
    shell("apply -f", example)
    assert "configured" not in shell("apply -f", example).output
    refused = shell("create -n simulation -f -", given=manifest("big", gpus=5), code=6)
    assert "quota: simulation/gpus" in refused.output
