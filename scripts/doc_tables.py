"""Writes the tables that the documentation takes from the code; with --check, only says whether they are up to date.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from bursar.api.http import metrics as api_metrics
from bursar.api.http.problem import TABLE
from bursar.core.credit.account import AccountStatus
from bursar.core.credit.lease import LeaseState
from bursar.core.nodes.eviction import EvictionReason, EvictionRule
from bursar.core.nodes.liveness import Liveness
from bursar.core.nodes.node_claim import ClaimState
from bursar.core.objects.allocation import Phase
from bursar.core.objects.approval import ApprovalReason, ApprovalState
from bursar.core.objects.event_text import StepReason
from bursar.core.objects.job import JobPhase
from bursar.core.objects.pending_reason import ReasonCode
from bursar.core.usage.budget import BudgetState
from bursar.core.values.refusal import Code
from bursar.ops.runtime import metrics as ops_metrics
from bursar.wire.kinds.registry import KINDS, policy

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "bursar"
STATES: dict[type[StrEnum], str] = {
    Phase: "allocation", JobPhase: "job", Liveness: "node", ClaimState: "claimed node", AccountStatus: "account",
    LeaseState: "credit lease", BudgetState: "budget", ApprovalState: "approval",
}  # fmt: skip
REASONS: dict[type[StrEnum], str] = {
    EvictionReason: "stopped work", EvictionRule: "rule of an eviction", StepReason: "event of a job",
    ApprovalReason: "expired approval",
}  # fmt: skip


def access() -> Iterator[str]:
    rows = ((f"**{who}**", code(verbs), code(resources)) for who, verbs, resources in policy().table())
    return table(("who", "verbs", "on"), rows)


def errors() -> Iterator[str]:
    return table(("code", "status", "reason"), ((f"`{code}`", str(at[0]), at[1]) for code, at in TABLE.items()))


def metrics() -> Iterator[str]:
    found = {
        str(state["_name"]) + ("_total" if isinstance(one, Counter) else ""): (type(one).__name__.lower(), state)
        for module in (ops_metrics, api_metrics)
        for one in vars(module).values()
        if isinstance(one, Counter | Gauge | Histogram)
        for state in (vars(one),)
    }
    rows = (
        (f"`{name}`", kind, code(", ".join(state["_labelnames"])), state["_documentation"])
        for name, (kind, state) in sorted(found.items())
    )
    return table(("name", "type", "labels", "meaning"), rows)


# The glossary.


def kinds() -> Iterator[str]:
    found = sorted((one.name, one.plural, one.description.rstrip(".")) for one in KINDS)
    return table(("kind", "resource", "meaning"), ((f"`{name}`", f"`{plural}`", text) for name, plural, text in found))


def packages() -> Iterator[str]:
    found = ((path.parent.relative_to(SOURCE), docstring(ast.parse(path.read_text(encoding="utf-8")), path))
             for path in sorted(SOURCE.rglob("__init__.py")) if path.parent != SOURCE)  # fmt: skip
    return table(("package", "content"), ((f"`{name}`", text) for name, text in found))


def types() -> Iterator[str]:
    found = [
        (node.name, path.relative_to(SOURCE / "core").with_suffix(""), docstring(node, path))
        for path in (SOURCE / "core").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    rows = ((f"`{name}`", f"`{module}`", text) for name, module, text in sorted(found, key=lambda one: one[0].lower()))
    return table(("type", "module in `core`", "meaning"), rows)


def values(enums: dict[type[StrEnum], str]) -> Iterator[str]:
    """The values of several enums, alphabetically, each with the comment behind its member."""
    found = sorted((value, of, text) for enum, of in enums.items() for value, text in meanings(enum))
    return table(("value", "of", "meaning"), ((f"`{value}`", of, text) for value, of, text in found))


def codes(enum: type[StrEnum]) -> Iterator[str]:
    """The values of one enum, in order of precedence."""
    return table(("code", "meaning"), ((f"`{value}`", text) for value, text in meanings(enum)))


def meanings(enum: type[StrEnum]) -> list[tuple[str, str]]:
    found = re.findall(r'^    [A-Z_]+ = "([^"]*)"  # (.+)$', inspect.getsource(enum), re.MULTILINE)
    if [value for value, _ in found] != [one.value for one in enum]:
        raise SystemExit(f"every member of {enum.__name__} needs a comment that says what it means")
    return found


def docstring(node: ast.Module | ast.ClassDef, path: Path) -> str:
    """The first sentence of a docstring."""
    text = ast.get_docstring(node)
    if not text:
        raise SystemExit(f"{path}: {getattr(node, 'name', 'the module')} needs a docstring")
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", paragraph)[0].rstrip(".:").replace("|", "\\|")


def code(words: str) -> str:
    return ", ".join(f"`{word}`" for word in words.split(", ") if word)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "access": ("security.md", access),
    "errors": ("api.md", errors),
    "metrics": ("metrics.md", metrics),
    "kinds": ("glossary.md", kinds),
    "states": ("glossary.md", partial(values, STATES)),
    "pending reasons": ("glossary.md", partial(codes, ReasonCode)),
    "reasons": ("glossary.md", partial(values, REASONS)),
    "refusal codes": ("glossary.md", partial(codes, Code)),
    "packages": ("glossary.md", packages),
    "types": ("glossary.md", types),
}


def updated(text: str, name: str, lines: Iterable[str]) -> str:
    """The text with the named table in its place."""
    begin = f"<!-- generated: {name} -->"
    wanted = "\n".join((begin, *lines, "<!-- end -->"))
    result, count = re.subn(rf"{re.escape(begin)}\n.*?<!-- end -->", lambda _: wanted, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{begin} … <!-- end --> must stand in the file exactly once, not {count} times")
    return result


def main() -> int:
    stale = []
    for name, (file, lines) in TABLES.items():
        path = DOCS / file
        before = path.read_text(encoding="utf-8")
        after = updated(before, name, lines())
        if before != after:
            stale.append(file)
            if "--check" not in sys.argv:
                path.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'out of date' if '--check' in sys.argv else 'updated'}: {', '.join(stale)}")
    if stale and "--check" in sys.argv:
        print("Bring them up to date with: .venv/bin/python scripts/doc_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
