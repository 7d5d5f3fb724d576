"""Sealing of the ledger: hash entries into blocks, roll blocks up into pages, and drop entries after their retention.

Each block and each page is one transaction, whose first lock is the sealing lock: one process seals at a time, and one
that is killed leaves nothing half done. Writers of entries never wait for it. Statements on a whole page or partition
may take long, and have a connection of their own. `bursar.ops.credit.ledger_verify` verifies the sealed entries.
"""

from __future__ import annotations

from itertools import takewhile

import structlog

from bursar.core.credit.account import QUARTER
from bursar.core.credit.hash_chain import GENESIS, SealedBlock, SealedPage, block_hash, page_hash, quarter_end
from bursar.core.values.replace import replace
from bursar.ops.credit.ledger_verify import prove
from bursar.ops.runtime import metrics
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import seal as store
from bursar.store.credit.ledger import ensure_partitions, load_last
from bursar.store.credit.seal import Partition, SealProgress
from bursar.store.db.database import Connection

log = structlog.get_logger()

# The largest block; a balance at a time is searched for in at most one block.
BLOCK_ENTRIES_MAX = 150_000
# More blocks than a busy quarter of an hour has.
PAGE_BLOCKS_MAX = 1000


class Broken(Exception):
    """The entries to seal are incomplete."""


async def seal(runtime: Runtime, *, entries_max: int = BLOCK_ENTRIES_MAX) -> int:
    """Seal all committed entries, block by block, and roll up every finished quarter of an hour. Returns the number of
    blocks; 0 if another process is sealing."""
    blocks = 0
    while await seal_block(runtime, entries_max):
        blocks += 1
    while await roll_up(runtime):
        pass
    metrics.LEDGER_BLOCKS.inc(blocks)
    return blocks


async def seal_block(runtime: Runtime, entries_max: int = BLOCK_ENTRIES_MAX) -> SealedBlock | None:
    async with runtime.database.reader() as db, db.transaction():
        if not await store.lock(db):
            return None
        return await _seal_block(db, entries_max)


async def _seal_block(db: Connection, entries_max: int) -> SealedBlock | None:
    before = await store.load_head(db)
    number, first, previous = (before.number + 1, before.last + 1, before.hash) if before else (1, 1, GENESIS)
    # All entries up to the ledger's last number are committed, so every later statement sees them.
    last = min(await load_last(db), first + entries_max - 1)
    if last < first:
        return None
    begun = await store.load_time(db, first)
    if begun is None:
        raise Broken(f"entry {first} is missing: sealing stops before it")
    later = await store.find_first_since(db, first, last, quarter_end(begun))
    last = later - 1 if later is not None else last
    digest = await store.load_digest(db, first, last)
    if digest.lines != last - first + 1:
        raise Broken(f"only {digest.lines} of the entries {first} to {last} exist: sealing stops before them")
    block = SealedBlock(
        number,
        first,
        last,
        digest.amount,
        digest.first_at,
        digest.last_at,
        digest.checksum,
        digest.weighted,
        digest.entries_hash,
        digest.kept_hash,
        await store.save_sums(db, number, first, last),
        previous,
    )
    block = replace(block, hash=block_hash(block))
    await store.save_block(db, block)
    return block


async def roll_up(runtime: Runtime) -> SealedPage | None:
    """Make one page of the blocks of a finished quarter of an hour, which is one before that of the newest block."""
    async with runtime.database.patient() as db, db.transaction():
        if not await store.lock(db):
            return None
        return await _roll_up(db)


async def _roll_up(db: Connection) -> SealedPage | None:
    before = await store.load_last_page(db)
    number, first_block, previous = (
        (before.number + 1, before.last_block + 1, before.hash) if before else (1, 1, GENESIS)
    )
    blocks = await store.load_blocks(db, first_block - 1, first_block + PAGE_BLOCKS_MAX, PAGE_BLOCKS_MAX + 1)
    if not blocks:
        return None
    quarter = blocks[0].first_at // QUARTER
    together = list(takewhile(lambda one: one.first_at // QUARTER == quarter, blocks[:PAGE_BLOCKS_MAX]))
    if len(together) == len(blocks):
        return None
    last = together[-1]
    rollup_hash = await store.merge_rollups(db, first_block, last.number)
    page = SealedPage(number, first_block, last.number, together[0].first, last.last, rollup_hash, previous)
    page = replace(page, hash=page_hash(page))
    await store.save_page(db, page)
    # A copy of this hash, kept elsewhere, proves later that nothing before it was changed.
    log.info(
        "ledger_rolled_up", message="a page of the ledger was rolled up", page=number, block=last.number,
        hash=last.hash.hex(),
    )  # fmt: skip
    return page


async def create_partitions(runtime: Runtime) -> None:
    """Create partitions for the next entries in advance."""
    async with runtime.database.reader() as db:
        await ensure_partitions(db)


async def drop_lines(runtime: Runtime, days: float, *, seconds: float = 0.0) -> list[str]:
    """Drop the partitions whose entries are all rolled up and older than `days`, after verifying them once more; return
    their names. A partition with a fault is kept. Nothing is done if another process tried within the last
    `seconds`."""
    if not await _claim_drop(runtime, seconds):
        return []
    dropped = []
    for partition in await _list_old(runtime, days):
        await _claim_drop(runtime)
        async with runtime.database.patient() as db:
            await store.drop_partition(db, partition)
        dropped.append(partition.name)
        log.info(
            "ledger_entries_dropped", message="a partition of old entries was dropped", partition=partition.name,
            first=partition.first, last=partition.last,
        )  # fmt: skip
    async with runtime.database.reader() as db:
        return dropped + await store.drop_orphans(db)


async def _claim_drop(runtime: Runtime, seconds: float = 0.0) -> bool:
    """Claim the dropping of partitions. The process that does it renews its claim with `seconds` 0."""
    async with runtime.database.reader() as db:
        return await store.claim_drop(db, seconds)


async def _list_old(runtime: Runtime, days: float) -> list[Partition]:
    """The partitions below the floor, after raising the floor as far as possible."""
    async with runtime.database.reader() as db:
        partitions = await store.list_partitions(db)
        newest = await store.load_last_page_before(db, days)
        floor = (await store.load_standing(db)).floor
    old = []
    for partition in partitions:
        if partition.last >= floor and (newest is None or partition.last > newest.last):
            break
        if partition.last >= floor:
            async with runtime.database.reader() as db:
                page = await store.load_page_of_entry(db, partition.last)
            assert page is not None, "there is a page as far as the newest one"
            if not await _prove(runtime, partition, page):
                break
            await _raise_floor(runtime, page.last + 1, floor)
            floor = page.last + 1
        old.append(partition)
    return old


async def _prove(runtime: Runtime, partition: Partition, page: SealedPage) -> bool:
    async with runtime.database.reader() as db:
        begin = await store.load_page_of_entry(db, partition.first) if partition.first else None
    after = begin.first_block - 1 if begin is not None else 0
    while after < page.last_block:
        await _claim_drop(runtime)
        proof = await prove(runtime, after=after, until=page.last_block)
        if proof.findings:
            log.error(
                "ledger_entries_kept", message="old entries are not dropped, because their verification found faults",
                findings=[str(one) for one in proof.findings],
            )  # fmt: skip
            return False
        if proof.through <= after:
            log.error(
                "ledger_entries_kept", message="old entries are not dropped, because blocks are missing", after=after,
                until=page.last_block,
            )  # fmt: skip
            return False
        after = proof.through
    return True


async def _raise_floor(runtime: Runtime, floor: int, before: int) -> None:
    async with runtime.database.patient() as db, db.transaction():
        await store.raise_floor(db, floor, before)


async def load_standing(runtime: Runtime) -> SealProgress:
    """The progress of sealing and verification, with the findings."""
    async with runtime.database.reader() as db:
        return await store.load_standing(db)
