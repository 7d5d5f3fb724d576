"""Named SQL statements, read once from ``sql/<noun>.sql``.

A file holds statements separated by ``-- name: <name>`` lines, so that SQL stays SQL: it can be linted, explained and
pasted into psql as it is.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


class Statements:
    """The statements of one noun, as attributes: ``SQL = statements("quota/quota"); SQL.lock_rows``."""

    def __init__(self, noun: str, texts: dict[str, str]) -> None:
        self._noun = noun
        self._texts = texts

    def __getattr__(self, name: str) -> str:
        try:
            return self._texts[name]
        except KeyError:
            raise AttributeError(f"sql/{self._noun}.sql has no statement named {name}") from None


@cache
def statements(noun: str) -> Statements:
    text = resources.files("bursar.store").joinpath(f"sql/{noun}.sql").read_text()
    parts = _NAME.split(text)
    return Statements(noun, {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)})
