"""Writes the tables that the documentation takes from the code; with --check, only says whether they are up to date.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from bursar.api.http import metrics as api_metrics
from bursar.api.http.problem import TABLE
from bursar.core.values.access import table as access_table
from bursar.ops.runtime import metrics as ops_metrics

DOCS = Path(__file__).resolve().parent.parent / "docs"


def access() -> Iterator[str]:
    rows = ((f"**{who}**", code(verbs), code(resources)) for who, verbs, resources in access_table())
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
    return table(("name", "type", "labels", "what it tells"), rows)


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
