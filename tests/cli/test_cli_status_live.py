"""`bursar status` against a real server: whose work it shows, where it finds it, and what the shell completes."""

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from support.process.server import Server


class People:
    """A tenant of its own with two namespaces, and the tokens of two who work there."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.url, self.config = server.url, str(directory / "config.yaml")
        self.tenant = f"t-{uuid.uuid4().hex[:12]}"
        self.other = f"{self.tenant}-b"
        with server.client() as admin:
            admin.tenants.create({"metadata": {"name": self.tenant}, "spec": {}})
            for space in (self.tenant, self.other):
                labels = {"bursar.io/tenant": self.tenant}
                admin.namespaces.create({"metadata": {"name": space, "labels": labels}})
            made = {name: admin.request("POST", "/api/v1/tokens", body=self._user(name)) for name in ("ann", "bob")}
        self.tokens = {"admin": server.token, **{name: one["status"]["token"] for name, one in made.items()}}

    def _user(self, name: str) -> dict[str, Any]:
        return {"role": "user", "tenant": self.tenant, "user": name}

    def environment(self, who: str) -> dict[str, str]:
        return {"BURSAR_URL": self.url, "BURSAR_TOKEN": self.tokens[who], "BURSAR_CONFIG": self.config}

    def say(self, who: str, *line: str, given: str | None = None, code: int = 0) -> Result:
        done = CliRunner(env=self.environment(who)).invoke(cli, line, input=given)
        assert done.exit_code == code, f"{line}: {done.exit_code}\n{done.output}\n{done.exception!r}"
        return done

    def submit(self, who: str, name: str, space: str = "", kind: str = "Allocation") -> None:
        spec: dict[str, Any] = {"resources": {"requests": {"cpu": "1"}}, "nodeSelector": {"none": "such"}}
        if kind == "Job":
            spec = {"parallelism": 1, "completions": 2, "template": {"spec": spec}}
        body = {"kind": kind, "metadata": {"name": name, "namespace": space or self.tenant}, "spec": spec}
        self.say(who, "create", "-f", "-", given=json.dumps(body))

    def listed(self, who: str, *line: str) -> list[list[str]]:
        """The first columns of each row."""
        rows = [one.split() for one in self.say(who, "status", *line).stdout.splitlines()[1:]]
        return [row[1:3] for row in rows if row[0].startswith(self.tenant)]


@pytest.fixture
def people(empty_server: Server, tmp_path: Path) -> People:
    return People(empty_server, tmp_path)


def test_whose_work_is_listed(people: People) -> None:
    people.submit("ann", "one")
    people.submit("ann", "train", people.other, kind="Job")
    people.submit("bob", "two")
    people.submit("admin", "three")
    unfolded = [["one", "Pending"], ["job/train", "Queued"], ["train-0", "Pending"]]
    hers = unfolded[:2]
    assert people.listed("ann", "--all") == unfolded
    assert people.listed("ann") == hers
    assert people.listed("bob", "--user", "ann") == hers
    assert people.listed("admin", "--user", f"{people.tenant}/ann") == hers
    assert people.listed("ann", "-n", people.tenant) == hers[:1]
    assert [name for name, _ in people.listed("bob", "--everybody")] == ["one", "three", "two", "job/train"]
    assert ["three", "admin"] in people.listed("bob", "--everybody"), "and whose it is"
    found = json.loads(people.say("bob", "status", "--json").stdout)
    assert [(one["kind"], one["metadata"]["name"]) for one in found["items"]] == [("Allocation", "two")]
    assert found["items"][0]["status"]["user"] == f"{people.tenant}/bob"


def test_nothing_is_said_in_words_and_as_an_empty_list(people: People) -> None:
    ann = f"{people.tenant}/ann"
    assert people.say("ann", "status").stderr == f"No active work of {ann}. Add --ended to see finished work.\n"
    said = people.say("ann", "status", "--ended", "-n", people.other).stderr
    assert said == f"No work of {ann} in namespace {people.other}.\n"
    assert "--user TENANT/nobody" in people.say("admin", "status", "--user", "nobody").stderr
    assert json.loads(people.say("ann", "status", "--json").stdout)["items"] == []


def test_a_name_is_found_where_it_is_the_only_one(people: People) -> None:
    people.submit("ann", "one", people.other)
    people.submit("ann", "train", people.other, kind="Job")
    people.submit("ann", "twin")
    people.submit("ann", "twin", people.other)
    assert people.say("ann", "status", "one").stdout.startswith(f"{people.other}/one is Pending\n")
    for name in ("train", "job/train"):
        lines = people.say("ann", "status", name).stdout.splitlines()
        assert lines[0] == f"job {people.other}/train is Queued"
        assert lines[-1] == f"  more     bursar explain job/train -n {people.other}"
    refused = people.say("ann", "status", "twin", code=3).stderr
    assert f"it exists in {people.tenant}, {people.other}" in refused
    assert "give its namespace with -n" in refused
    assert people.say("ann", "status", "twin", "-n", people.other).stdout.startswith(f"{people.other}/twin is")
    assert json.loads(people.say("ann", "status", "one", "--json").stdout)["metadata"]["namespace"] == people.other


@pytest.mark.parametrize("name", ["job/", "/train", "..", "", "node/n1"])
def test_what_is_no_name_is_refused_in_words(people: People, name: str) -> None:
    assert (
        "give an allocation or a job, as in `train-0` or `job/train`"
        in people.say("ann", "status", name, code=2).stderr
    )


def test_names_are_completed_wherever_the_work_is(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    people.submit("ann", "one")
    people.submit("ann", "other", people.other)
    people.submit("ann", "train", people.other, kind="Job")
    for name, value in people.environment("ann").items():
        monkeypatch.setenv(name, value)

    def offered(words: Sequence[str], incomplete: str) -> list[str]:
        completion = ShellComplete(cli, {}, "bursar", "_BURSAR_COMPLETE")
        return [item.value for item in completion.get_completions(["status", *words], incomplete)]

    assert offered([], "o") == ["one", "other"]
    assert offered(["-n", people.other], "o") == ["other"]
    assert offered([], "jo") == ["job/"]
    assert offered([], "job/") == ["job/train"]
