"""The style of the code, as far as a program can see it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "bursar"
MODULES = sorted(SOURCE.rglob("*.py"))
CODE = [*MODULES, *sorted(SOURCE.rglob("*.sql")), *sorted((ROOT / "tests").rglob("*.py"))]
CODE += [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file()]

LINES_MAX = 800
LONGER: dict[str, str] = {}
EMPTY_WORDS = frozenset({"utils", "util", "helpers", "helper", "common", "manager", "base", "impl", "misc"})


def test_modules_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LINES_MAX
    }
    assert set(long) == set(LONGER), f"over {LINES_MAX} lines: {long}; split what is new, take out what is not"


def test_modules_are_named_after_what_they_hold() -> None:
    empty = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if EMPTY_WORDS & {word for part in path.relative_to(SOURCE).with_suffix("").parts for word in part.split("_")}
    ]
    assert not empty


def test_every_module_says_first_what_it_is() -> None:
    silent = [
        str(path.relative_to(SOURCE))
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py")
        and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_nothing_is_left_for_later() -> None:
    # In two halves, so that this file is not found itself.
    fingerprints = re.compile(rf"\b({'TO' + 'DO'}|{'FIX' + 'ME'}|{'X' + 'XX'})\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in CODE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if fingerprints.search(line)
    ]
    assert not found


def test_objects_are_removed_in_one_place() -> None:
    # What has finalizers must not slip out by another way.
    found = [str(path.relative_to(SOURCE)) for path in MODULES if "batch.remove(" in path.read_text(encoding="utf-8")]
    assert found == ["ops/objects/removal.py"]


# Names that two classes share because they are the same thing: on the wire and in the rules, or at both ends of a call.
SAME_THING = frozenset(
    {
        "Billing", "Namespace", "NodeClaim", "Nomination", "PriceList", "PriorityClass", "ResourceQuota", "Taint",
        "Tenant", "Tier", "Toleration", "ConfigError", "Unavailable", "Cost", "StreamRefused",
    }
)  # fmt: skip


def test_one_word_names_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        if "_pb2" in path.name:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert set(shared) <= SAME_THING, f"rename what means something else: {shared}"
    assert set(shared) == SAME_THING, f"no longer shared: {SAME_THING - set(shared)}"
