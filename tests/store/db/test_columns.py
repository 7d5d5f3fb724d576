"""Columns that travel as texts come out as they went in."""

import pytest

from bursar.store.db.columns import documents, numbers, texts
from bursar.store.db.database import connect


def test_a_separator_in_a_text_does_not_shift_what_follows() -> None:
    assert texts(["a", "b\x1fc", "d"]).split("\x1f") == ["a", "b c", "d"]
    assert texts(["\x1f"]) == " "


@pytest.mark.parametrize("values", [["a"], ["a", "b"], ["", "b"], ["a", ""], ["é", "日本", "'\"\\{}", "NULL"]])
async def test_texts_are_taken_apart_again(database_url: str, values: list[str]) -> None:
    db = await connect(database_url)
    assert await db.fetchval("SELECT string_to_array($1, chr(31))", texts(values)) == values
    await db.close()


async def test_what_is_not_there_is_null(database_url: str) -> None:
    db = await connect(database_url)
    sent = documents([b'{"a":"\\u001f"}', None, b"[]"])
    assert await db.fetchval("SELECT string_to_array($1, chr(31), '')::json[]", sent) == [
        b'{"a":"\\u001f"}',
        None,
        b"[]",
    ]
    assert await db.fetchval("SELECT string_to_array($1, ',')::boolean[]", numbers([True, False])) == [True, False]
    assert await db.fetchval("SELECT string_to_array($1, ',')::bigint[]", numbers([-1, 2**62])) == [-1, 2**62]
    await db.close()
