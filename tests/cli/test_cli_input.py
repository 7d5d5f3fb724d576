"""What users type and what is in their files."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner

from bursar.bench.main import bench
from bursar.cli.main import cli
from bursar.cli.objects import edit, label, patch
from bursar.cli.quota import admin
from bursar.cli.quota.admin import NumberOrNone
from bursar.cli.session import login
from bursar.cli.shell import manifest, resource_arg
from bursar.cli.shell.limit_notes import lowered_notes
from bursar.cli.shell.problem import Problem
from bursar.client import Client
from bursar.main import sim


@pytest.fixture
def nobody() -> Client:
    """A client without a server: what is known here needs none."""
    return Client("http://127.0.0.1:9")


@pytest.mark.parametrize("word", ["allocations", "allocation", "alloc", "al", "Allocation"])
def test_a_kind_has_many_names(word: str, nobody: Client) -> None:
    assert resource_arg.find(word, nobody).plural == "allocations"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("alloc", ["allocations/"]),
        ("alloc a b", ["allocations/a", "allocations/b"]),
        ("alloc,nodes", ["allocations/", "nodes/"]),
        ("alloc/a node/b", ["allocations/a", "nodes/b"]),
    ],
)
def test_targets(words: str, found: list[str], nobody: Client) -> None:
    assert [f"{one.noun.plural}/{one.name}" for one in resource_arg.targets(words.split(), nobody)] == found


@pytest.mark.parametrize("words", ["", "alloc,nodes a", "alloc/a b", "alloc/", "/a", "alloc .."])
def test_targets_that_make_no_sense(words: str, nobody: Client) -> None:
    with pytest.raises(click.UsageError):
        resource_arg.targets(words.split(), nobody)


def parsed(text: str) -> list[dict[str, Any]]:
    return [one.document for one in manifest.parse(text, "x.yaml")]


def test_several_documents_and_lists() -> None:
    text = """
kind: Tenant
---
# nothing here
---
kind: List
items:
- kind: Node
- kind: AllocationList
  items:
  - metadata: {name: a}
"""
    assert parsed(text) == [{"kind": "Tenant"}, {"kind": "Node"}, {"kind": "Allocation", "metadata": {"name": "a"}}]


def test_json_is_read_too() -> None:
    assert parsed('{"kind": "Tenant",\n\t"spec": {"a": [1, true, null, "8000m"]}}') == [
        {"kind": "Tenant", "spec": {"a": [1, True, None, "8000m"]}}
    ]


def test_what_only_yaml_has_becomes_text() -> None:
    assert parsed("{2: a, on: b, at: 2024-01-15T10:30:00Z, day: 2024-01-15}") == [
        {"2": "a", "true": "b", "at": "2024-01-15T10:30:00Z", "day": "2024-01-15"}
    ]


@pytest.mark.parametrize("text", ["a: b: c", "- 1", "just text", "\t- x", "metadata: [1]"])
def test_what_is_no_object_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(Problem, match=r"x\.yaml"):
        parsed(text)


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.yaml", "a.yml", "c.json", "README.md", "deep/d.yaml"):
        (tmp_path / name).write_text(f'{{"kind": "{name}"}}')
    flat = [one.document["kind"] for one in manifest.read([str(tmp_path)])]
    assert flat == ["a.yml", "b.yaml", "c.json"]
    assert len(manifest.read([str(tmp_path)], recursive=True)) == 4


def test_nothing_and_nowhere_are_said(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="no object in"):
        manifest.read([str(tmp_path)])
    with pytest.raises(Problem, match="not found"):
        manifest.read([str(tmp_path / "x.yaml")])


def test_labels() -> None:
    assert label.split(["node", "a", "zone=x", "empty=", "old-"]) == (
        ["node", "a"],
        {"zone": "x", "empty": "", "old": None},
    )
    with pytest.raises(click.UsageError):
        label.split(["node", "a", "zone=x", "stray"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nvidia.com/gpu=512", ("nvidia.com/gpu", 512)),
        ("memory=40Ti", ("memory", "40Ti")),
        ("max_nodes=2", ("nodes", 2)),
        ("volumes=none", ("volumes", None)),
    ],
)
def test_limits(text: str, found: tuple[str, Any]) -> None:
    assert admin.limit(text) == found


@pytest.mark.parametrize("text", ["nodes", "=3", "nodes="])
def test_limits_that_make_no_sense(text: str) -> None:
    with pytest.raises(click.UsageError):
        admin.limit(text)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("https://x/", "https://x"),
        ("bursar.example.com", "https://bursar.example.com"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
    ],
)
def test_urls(given: str, url: str) -> None:
    assert login.checked_url(given) == url


@pytest.mark.parametrize("given", ["ftp://x", "https://", "http:///path"])
def test_urls_that_are_none(given: str) -> None:
    with pytest.raises(click.BadParameter):
        login.checked_url(given)


def test_patches() -> None:
    assert patch.parsed("{a: 1}", "merge") == {"a": 1}
    with pytest.raises(click.UsageError, match="list of operations"):
        patch.parsed("{a: 1}", "json")
    with pytest.raises(click.UsageError, match="an object"):
        patch.parsed("[]", "strategic")


def test_what_an_editor_left() -> None:
    assert edit.parsed(None) == {}
    assert edit.parsed("# only a comment\n") == {}
    assert edit.parsed("kind: Tenant\n") == {"kind": "Tenant"}
    with pytest.raises(Problem, match="more than one"):
        edit.parsed("a: 1\n---\nb: 2\n")


def options_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Option]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options_of(found, f"{path} {name}")
    else:
        yield from ((path, one) for one in command.params if isinstance(one, click.Option))


def test_no_numeric_option_takes_nan_or_infinity() -> None:
    """Each refuses them itself, by its name, before anything is sent."""
    found = 0
    for path, option in chain(options_of(cli, "bursar"), options_of(sim, "bursar sim"), options_of(bench, "bench")):
        if not isinstance(option.type, (click.types.FloatParamType, NumberOrNone)):
            continue
        found, numeric = found + 1, cast("click.ParamType[Any]", option.type)
        for value in ("nan", "-nan", "inf", "-inf", "1e999"):
            with pytest.raises(click.BadParameter) as refused:
                numeric.convert(value, option, click.Context(click.Command(path)))
            assert option.opts[-1] in refused.value.format_message(), (path, value)
    assert found > 8


@pytest.mark.parametrize("words", ["watch nodes --timeout", "delete node a --timeout", "run --gpus"])
def test_a_number_that_is_none_is_refused_with_the_options_name(words: str) -> None:
    refused = CliRunner().invoke(cli, [*words.split(), "nan", *(["--", "true"] if "run" in words else [])])
    assert refused.exit_code == 2
    assert f"Invalid value for '{words.split()[-1]}': nan is not a number." in refused.output


def test_each_lowered_limit_is_noted() -> None:
    before = {"nvidia.com/gpu": "64", "memory": "1Ti", "cpu": 8, "volumes": 3, "nodes": 4}
    after = {"nvidia.com/gpu": 32, "memory": "1000Gi", "cpu": "8000m", "volumes": 5, "allocations": 1}
    assert list(lowered_notes("physics", before, after)) == [
        "note: tenant physics has a lower limit: memory: 1Ti → 1000Gi",
        "note: tenant physics has a lower limit: nvidia.com/gpu: 64 → 32",
    ]
