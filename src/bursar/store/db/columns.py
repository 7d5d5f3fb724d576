"""Columns of many rows, each sent as one text and taken apart by the server.

asyncpg looks at every element of an array in Python; a text it only copies. For statements that write hundreds of rows
of a dozen columns each, that is most of what sending them costs. In SQL such a column reads
`string_to_array($1, chr(31))`; a single empty text comes out as NULL there, and is put right with `coalesce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SEPARATOR = "\x1f"
_RAW = SEPARATOR.encode()


def texts(values: Sequence[str]) -> str:
    column = SEPARATOR.join(values)
    if column.count(SEPARATOR) != len(values) - 1:
        # No name has this character. In free text it must not shift the rows that follow.
        column = SEPARATOR.join(value.replace(SEPARATOR, " ") for value in values)
    return column


def documents(values: Sequence[bytes | None]) -> str:
    """JSON, which never holds a control character as such; None is an empty text."""
    return _RAW.join(value or b"" for value in values).decode()


def numbers(values: Sequence[int]) -> str:
    """Numbers, and truths as the numbers they are. As a list prints them, which is the fastest way to write many: the
    server passes over the spaces."""
    return str(list(map(int, values)))[1:-1]


def lists(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Columns as arrays, for statements that write few rows: `width` of them, also without a row."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]
