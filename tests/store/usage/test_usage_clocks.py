"""Windows that are read while what they are about goes on: by a clock that is behind that of who writes."""

from datetime import UTC, datetime, timedelta

import pytest

from bursar.core.usage.usage_levels import UsageBegan, UsageEnded, Used
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.usage.usage_rollup import roll
from bursar.store.usage import usage_levels as store

# In the middle of an hour: all of it is within one.
NOW = datetime.now(UTC).replace(minute=30, second=0, microsecond=0) - timedelta(hours=1)


def at(seconds: float) -> int:
    return int((NOW + timedelta(seconds=seconds)).timestamp())


@pytest.mark.parametrize("is_entered", [False, True])
@pytest.mark.parametrize("user", ["", "physics/ann"])
async def test_what_ends_or_begins_only_later_is_not_counted_yet(runtime: Runtime, user: str, is_entered: bool) -> None:
    begun = [
        UsageBegan("ends-later", "n1", 1, "physics", "physics/ann", "lab", "a", {"nodes": 3000}, "", at(-600)),
        UsageBegan("begins-later", "n1", 1, "physics", "physics/ann", "lab", "b", {"nodes": 5000}, "", at(120)),
    ]
    async with runtime.database.reader() as db, db.transaction():
        await store.save(db, begun, ())
        await store.save(db, (), [UsageEnded("ends-later", "n1", at(60), "Succeeded")])
    if is_entered:
        await roll(runtime.database, NOW)
    async with runtime.database.reader() as db:
        begin = NOW - timedelta(minutes=15)
        if user:
            found = (await store.load_user_window(db, user, ["physics"], begin, now=NOW))["physics", user]
        else:
            found = (await store.load_window(db, ["physics"], begin, now=NOW))["physics"]
        assert found["nodes", ""].total == 3000 * 600
        assert await store.recompute(db, "physics", begin, NOW, user=user) == {("nodes", ""): Used(3000 * 600)}
