"""Columns of many rows, each sent as one text that the server splits.

asyncpg converts each element of an array in Python, but only copies a text. In statements that write hundreds of rows
of a dozen columns, that conversion is most of the cost of sending them. In SQL such a column reads `string_to_array($1,
chr(31))`; a single empty text becomes NULL there, which `coalesce` corrects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SEPARATOR = "\x1f"
_RAW = SEPARATOR.encode()


def texts(values: Sequence[str]) -> str:
    column = SEPARATOR.join(values)
    if column.count(SEPARATOR) != len(values) - 1:
        # No name contains the separator. In free text it is replaced, so that it cannot shift the following rows.
        column = SEPARATOR.join(value.replace(SEPARATOR, " ") for value in values)
    return column


def documents(values: Sequence[bytes | None]) -> str:
    """Encode JSON documents, which never contain a raw control character; None becomes an empty text."""
    return _RAW.join(value or b"" for value in values).decode()


def numbers(values: Sequence[int]) -> str:
    """Encode numbers and booleans in the format of a Python list, the fastest way to write many; the server ignores the
    spaces."""
    return str(list(map(int, values)))[1:-1]


def lists(rows: Iterable[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into `width` arrays, for statements that write few rows; without rows the arrays are empty."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]
