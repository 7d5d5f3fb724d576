"""Quota warnings: the leader compares the usage of tenants with their limits after it has changed.

The first round looks at every limit. Later ones look at the tenants whose objects changed since, as the feed says, the
tenants above them, and those whose limits changed. Submissions do nothing for this. The warning itself is decided under
the tenant's lock (`commands/quota/warn.py`), so looking too often, or in two processes at once, does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from bursar.commands.command import DEPOSED, Written
from bursar.commands.quota.warn import QUOTAS, LimitUse, WarnQuota, next_told, tenant_key
from bursar.core.objects.object import Origin
from bursar.core.quota.quota import Counter
from bursar.core.quota.tenant_tree import Row, Tree, limits_of, lineage, tenant_scope
from bursar.core.quota.warning import marks_of
from bursar.core.values.quantity import UNLIMITED
from bursar.core.values.selector import Op, Selector, SelectorTerm
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY, RACES, Connection
from bursar.store.objects import change as change_store
from bursar.store.objects import listing
from bursar.store.objects.listing import Query
from bursar.store.quota import quota as quota_store
from bursar.wire.kinds.tenant import QUOTA_FIELD, TENANT, QuotaState

log = structlog.get_logger()

REVIEW_SECONDS = 2.0
AT_ONCE = 200  # a changed setting may warn every tenant at once; other commands use the same lane

REVIEWING = Origin(QUOTAS, "review")
_WARNED = Selector((SelectorTerm(QUOTA_FIELD, Op.IN, (str(QuotaState.WARNING),)),))


@dataclass(slots=True)
class Reviewed:
    """The state of the last review: how far the feed was read, the tree, and the marks reported to each tenant."""

    revision: int = -1
    tree: Tree = field(default_factory=Tree)
    told: dict[str, dict[str, int]] = field(default_factory=dict)


async def run_quota_warnings(runtime: Runtime, fence: int) -> None:
    """Review limits while this process leads; wait while the database is away."""
    last = Reviewed()
    while True:
        try:
            await review(runtime, last, fence)
        except (*AWAY, *RACES) as error:
            last = Reviewed()  # a warning may be lost: look at everything again
            log.info("quota_warnings_wait", message="the review of limits waits for the database", error=repr(error))
        except Exception:
            last = Reviewed()
            log.exception("quota_warnings_failed", message="the review of limits failed and is tried again")
        await asyncio.sleep(REVIEW_SECONDS)


async def review(runtime: Runtime, last: Reviewed, fence: int | None = None) -> int:
    """Warn the tenants whose usage crossed a mark since the last review; return the number of changed warnings."""
    async with runtime.database.reader() as db:
        commands = await _commands(runtime, db, last, fence)
    changed = 0
    for at in range(0, len(commands), AT_ONCE):
        some = commands[at : at + AT_ONCE]
        # A change of a warning takes the tree's lock in shared mode, so no other writer waits for it.
        replies = await asyncio.gather(*(runtime.changing.submit(one, one.key.name) for one in some))
        if DEPOSED in replies:
            log.info("quota_warnings_deposed", message="another controller leads and reports on limits")
            break
        for one, reply in zip(some, replies, strict=True):
            if isinstance(reply, Written):
                changed += 1
                last.told[one.key.name] = msgspec.json.decode(reply.status).get("quotaWarnings", {})
            else:
                last.told.pop(one.key.name, None)
                log.info("quota_warning_refused", message="a warning was refused", tenant=one.key.name, error=reply)
    return changed


async def _commands(runtime: Runtime, db: Connection, last: Reviewed, fence: int | None) -> list[WarnQuota]:
    position = await change_store.load_position(db)
    tree = await runtime.trees.refresh(db)
    first = last.revision < position.floor
    if first:
        last.told = await _load_told(db)
        touched = set(tree.tenants)
    else:
        touched = await _touched(db, tree, last, position.revision)
    limited = [name for name in touched if name in tree.tenants and (limits_of(tree, name) or last.told.get(name))]
    rows = await quota_store.load_limited(db) if first else {}
    if not first and limited:
        rows = await quota_store.load_scopes(db, [tenant_scope(name) for name in limited])
    last.revision, last.tree = position.revision, tree
    return [
        WarnQuota(key=tenant_key(name), origin=REVIEWING, fence=fence, uid=tree.tenants[name].uid, uses=uses)
        for name in sorted(limited)
        if (uses := tuple(_news(tree, name, rows, last.told.get(name, {}))))
    ]


async def _load_told(db: Connection) -> dict[str, dict[str, int]]:
    """The marks that are reported now, from the statuses of the tenants that have any."""
    found = await listing.load_page(db, Query(TENANT.name, fields=_WARNED))
    return {one.name: msgspec.json.decode(one.status).get("quotaWarnings", {}) for one in found.items}


async def _touched(db: Connection, tree: Tree, last: Reviewed, revision: int) -> set[str]:
    """The tenants whose usage or limits may have changed since the last review."""
    used = await change_store.list_tenants_between(db, last.revision, revision) if revision > last.revision else []
    touched = {above for name in used for above in lineage(tree, name)}
    if tree is last.tree:
        return touched
    if tree.quota_policy != last.tree.quota_policy:
        return set(tree.tenants)
    tiers = {name for name, tier in tree.tiers.items() if tier != last.tree.tiers.get(name)}
    changed = {
        name for name, one in tree.tenants.items() if one is not last.tree.tenants.get(name) or one.tier in tiers
    }
    # A tenant that was moved takes its usage away from the tenants above, and to others.
    for name in changed:
        touched |= {*lineage(tree, name), *lineage(last.tree, name)}
    return touched


def _news(tree: Tree, tenant: str, rows: Mapping[Row, Counter], told: Mapping[str, int]) -> Iterator[LimitUse]:
    """The limits whose mark differs from the reported one, checked without a lock, because they rarely do."""
    limits = limits_of(tree, tenant)
    for dimension in {*limits, *told}:
        counter = rows.get((tenant_scope(tenant), dimension), Counter())
        marks, limit = marks_of(tree, tenant, dimension), limits.get(dimension, UNLIMITED)
        use = LimitUse(dimension, counter.accepted, limit, marks)
        if next_told(told, (use,)) != told:
            yield use
