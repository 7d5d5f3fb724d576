"""The documentation is true, as far as a program can tell: what it links to, names and lists is there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click
import msgspec
import pytest
from prometheus_client import REGISTRY

import bursar.api.serve
import bursar.loops.housekeeping
import bursar.rpc.serve
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.nodes.eviction import EvictionReason, EvictionRule
from bursar.core.nodes.liveness import Liveness, Patience
from bursar.core.objects.allocation import Phase
from bursar.core.objects.event_text import StepReason
from bursar.core.objects.job import JobPhase
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.values.money import credits_of
from bursar.core.values.refusal import Code
from bursar.main import api, controller, serve
from bursar.wire.kinds.registry import KINDS
from bursar.wire.kinds.settings import RECORD_DAYS, CreditSettings, NodeSettings, SchedulingSettings, UsageSettings
from support.process.server import data_directory

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
MAKE = re.compile(r"\bmake ([a-z]+)\b")
DEMO_SECONDS_MAX = 110
SERVING = (bursar.api.serve, bursar.loops.housekeeping, bursar.rpc.serve)  # together they register every metric


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_architecture_says_who_writes_each_table() -> None:
    tables = set(re.findall(r"^CREATE TABLE (\w+)", page("docs/schema.sql"), re.MULTILINE))
    rows = page("ARCHITECTURE.md").partition("| tables | written by |")[2].partition("\n\n")[0]
    named = {name for row in rows.splitlines() if row for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == tables


def test_every_page_is_in_the_index_and_every_decision_in_its_own() -> None:
    linked = set(re.findall(r"\]\(([\w./-]+)\)", page("docs/index.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked
    assert {f"howto/{path.name}" for path in (ROOT / "docs" / "howto").glob("*.md")} - {"howto/README.md"} <= linked
    decisions = re.findall(r"\]\(([\w./-]+)\)", page("docs/decisions/README.md"))
    assert sorted(decisions) == sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))


def test_the_files_that_the_architecture_names_exist() -> None:
    """Also those that are named after another file of the same folder."""
    missing, folder = [], ROOT
    for name in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|sql))`", page("ARCHITECTURE.md")):
        folder = (ROOT / "src" / "bursar" / name).parent if "/" in name else folder
        if not any((place / name).exists() for place in (ROOT / "src" / "bursar", folder)):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    ours = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    missing = [link for link in ours if link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    # Only what is set as code is a command.
    quoted = re.findall(r"```.*?```|`[^`\n]+`", page(name), re.DOTALL)
    named = {target for text in quoted for target in MAKE.findall(text)}
    assert named <= targets


def test_generated_tables_equal_the_code() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "doc_tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_glossary_has_every_kind_package_state_reason_code_and_type() -> None:
    listed = set(re.findall(r"^\| `([^`]+)` \|", page("docs/glossary.md"), re.MULTILINE))
    source = ROOT / "src" / "bursar"
    packages = {str(path.parent.relative_to(source)) for path in source.glob("*/**/__init__.py")}
    classes = {
        name
        for path in (source / "core").rglob("*.py")
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    enums = (Phase, JobPhase, Liveness, ReasonCode, EvictionReason, EvictionRule, StepReason, Code)
    values = {str(value) for enum in enums for value in enum}
    assert not ({kind.name for kind in KINDS} | packages | classes | values) - listed


def test_the_terms_of_the_glossary_are_in_order() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", page("docs/glossary.md"), re.MULTILINE)
    assert terms == sorted(terms, key=str.lower)
    assert len(terms) == len(set(terms))


def test_every_metric_is_listed_and_no_other() -> None:
    table = page("docs/metrics.md").partition("<!-- end -->")[0]
    listed = set(re.findall(r"^\| `(bursar_[a-z_]+)`", table, re.MULTILINE))
    registered = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in REGISTRY.collect()
        if family.name.startswith("bursar_")
    }
    assert listed == registered
    assert SERVING


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "docs/operations.md"])
def test_metrics_and_alerts_name_what_exists(name: str) -> None:
    known = set(re.findall(r"bursar_[a-z_]+", page("docs/metrics.md")))
    assert set(re.findall(r"\bbursar_[a-z_]+", page(name))) <= known


def test_every_option_of_the_server_is_explained_and_no_other() -> None:
    text = page("docs/operations.md")
    options = {
        option
        for command in (serve, api, controller)
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for option in parameter.opts
    }
    commands = text.replace("--single-transaction", "")  # an option of pg_restore
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", commands)) == options


def test_every_variable_is_explained() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    # One is how a shell's completion is asked for, the other is between the server and its children.
    variables = set(re.findall(r'"(BURSAR_[A-Z_]+)"', source)) - {"BURSAR_COMPLETE", "BURSAR_PARENT"}
    assert variables == set(re.findall(r"BURSAR_[A-Z_]+", page("docs/operations.md")))


def test_every_kind_is_in_the_table_of_kinds() -> None:
    rows = re.findall(r"^\| ([A-Z]\w+) \| `(\w+)` \| ([^|]*)\| ([^|]*)\|", page("docs/api.md"), re.MULTILINE)
    told = {(name, plural, tuple(re.findall(r"`(\w+)`", short)), "yes" in where) for name, plural, short, where in rows}
    assert told == {(kind.name, kind.plural, kind.short_names, kind.namespaced) for kind in KINDS}


def test_every_reason_is_in_the_table_of_reasons_in_its_order() -> None:
    section = page("docs/scheduling.md").partition("## Why is my work pending?")[2]
    told = re.findall(r"^\| `([a-z_]+?)(?:_<resource>)?` \|", section, re.MULTILINE)
    assert told == list(ReasonCode)


def test_every_setting_of_the_scheduler_is_in_the_table_of_settings() -> None:
    section = page("docs/scheduling.md").partition("## Settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)[1:]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told == {field.encode_name for field in msgspec.structs.fields(SchedulingSettings)}


def test_every_setting_of_nodes_is_in_the_table_of_settings() -> None:
    section = page("docs/nodes.md").partition("## Settings")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE)
    defaults = {name: str(getattr(Patience(), name)) for name in NodeSettings.__struct_fields__}
    told = {field.encode_name: defaults[field.name] for field in msgspec.structs.fields(NodeSettings)}
    assert dict(rows) == told


def test_every_setting_of_credit_is_in_the_table_of_settings() -> None:
    section = page("docs/credits.md").partition("## Settings")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", section, re.MULTILINE)
    defaults = {name: getattr(CreditPolicy(), name) for name in CreditSettings.__struct_fields__}
    for name in ("drift_credits", "drift_account_credits"):
        defaults[name] = credits_of(defaults[name])
    told = {field.encode_name: str(defaults[field.name]) for field in msgspec.structs.fields(CreditSettings)}
    assert dict(rows) == told


def test_every_setting_of_usage_is_in_the_table_of_settings() -> None:
    section = page("docs/usage.md").partition("## How hours are kept")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", section, re.MULTILINE)
    defaults = {"record_days": str(RECORD_DAYS)}
    assert dict(rows) == {one.encode_name: defaults[one.name] for one in msgspec.structs.fields(UsageSettings)}


def test_every_promise_names_code_and_tests_that_exist() -> None:
    promises = page("docs/invariants.md").partition("\n## Lock order")[0].split("\n### ")[1:]
    assert promises
    for promise in promises:
        sentence, _, rest = promise.partition("\n")
        enforced, _, tested = rest.partition("\n## ")[0].partition("\n**Tested by**\n")
        assert enforced.startswith("\n**Enforced by**\n\n- "), f"nothing enforces: {sentence}"
        assert re.search(r"`[\w/]+\.(?:py|sql)`", enforced), f"no file enforces: {sentence}"
        lines = [line for line in tested.splitlines() if line]
        assert lines, f"nothing tests: {sentence}"
        assert lines[0].startswith("- `tests/"), f"nothing tests: {sentence}"
        for line in lines:
            assert line.startswith("- "), f"not one test per line: {line}"
            assert line.count("`tests/") <= 1, f"not one test per line: {line}"


def test_the_files_and_tests_that_the_invariants_name_exist() -> None:
    text = page("docs/invariants.md")
    for file in re.findall(r"`(?!tests/)([\w/]+\.(?:py|sql))`", text):
        assert (ROOT / "src" / "bursar" / file).exists(), f"{file} is gone"
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) == text.count("`tests/"), "a test is named in a form that is not checked"
    for file, test in named:
        assert (ROOT / file).exists(), f"{file} is gone"
        assert not test or f"def {test}(" in page(file), f"{file} has no {test}"


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/invariants.md"])
def test_pages_name_what_their_files_have(name: str) -> None:
    """A class or function in a file, as in "`Lane` in `ops/runtime/lane.py`"."""
    text = " ".join(page(name).split())
    missing = []
    for named, file in re.findall(r"`([A-Za-z_.]+)` in `(?:src/bursar/)?((?!tests/)[\w/]+\.(?:py|sql))`", text):
        paths = [path for path in (ROOT / "src" / "bursar").rglob(Path(file).name) if str(path).endswith(file)]
        if not any(re.search(rf"\b{named.split('.')[-1]}\b", path.read_text(encoding="utf-8")) for path in paths):
            missing.append(f"{named} in {file}")
    assert not missing


def test_no_two_decisions_have_the_same_number() -> None:
    numbers = sorted(int(path.name[:4]) for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_name_no_path_of_somebody_s_machine(path: Path) -> None:
    assert not re.search(r"/(home|Users|work|workspace)/", path.read_text(encoding="utf-8"))


@pytest.mark.starts_processes
@pytest.mark.timeout(DEMO_SECONDS_MAX + 10)
def test_the_demo_ends_well_and_leaves_nothing_behind() -> None:
    with data_directory() as home:
        demo = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "demo.py")],
            env={**os.environ, "TMPDIR": str(home)},
            capture_output=True,
            text=True,
            timeout=DEMO_SECONDS_MAX,
        )
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert "Done." in demo.stdout
        assert not list(home.iterdir())
        assert not [process for process in _processes() if str(home) in process]


def _processes() -> Iterator[str]:
    """The command lines of all processes; those that end while we look are gone, and that is fine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text(errors="replace")
