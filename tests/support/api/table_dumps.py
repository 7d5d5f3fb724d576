"""Every row of the database as text, to compare before and after."""

import json
from collections import Counter
from collections.abc import Iterable

import pytest

from support.api.site import Site

Dump = dict[str, Counter[str]]
# Questions to the scheduler come and go with reads.
RESTLESS = frozenset({"inquiry"})
# Counters that move with every allowed change: those of the feed, the ledger, and the tenants above.
COUNTERS = frozenset({"ledger", "quota", "revision", "tree"})
# Tables that hold objects with the values of their environment variables: the objects, the feed that watches read, and
# answers to be repeated.
WITH_VARIABLES = frozenset({"change", "object", "request"})


async def dump(site: Site) -> Dump:
    """Every row of every table, as text."""
    async with site.context.database.reader() as db, db.transaction(isolation="repeatable_read"):
        tables = await db.fetch(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition"
            " AND relnamespace = 'public'::regnamespace"
        )
        return {
            one["relname"]: Counter(row[0] for row in await db.fetch(f'SELECT to_jsonb(t)::text FROM "{one[0]}" AS t'))
            for one in tables
            if one["relname"] not in RESTLESS
        }


def changes(before: Dump, after: Dump) -> list[tuple[str, str, str]]:
    """(table, what happened to the row, row). Markers of batches, which hold nothing, are left out."""
    found = []
    for table in sorted({*before, *after}):
        was, is_ = before.get(table, Counter()), after.get(table, Counter())
        found += [(table, "gone", row) for row in was - is_] + [(table, "new", row) for row in is_ - was]
    return [one for one in found if not (one[0] == "request" and json.loads(one[2])["scope"] == "batch")]


def none(found: Iterable[str]) -> None:
    """Fail with all that was found, as far as anybody would read."""
    if listed := list(found):
        pytest.fail("\n".join([f"{len(listed)}:", *(one[:1000] for one in listed[:40])]), pytrace=False)
