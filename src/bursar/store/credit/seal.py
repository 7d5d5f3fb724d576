"""Blocks and pages of entries in the database, and the removal of old partitions of entries after their sums are
verified."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from bursar.core.credit.hash_chain import Finding, SealedBlock, SealedPage, micros_of, time_of
from bursar.store.db.database import Connection
from bursar.store.db.sql_loader import statements

SQL = statements("credit/seal")

_decode = msgspec.json.Decoder(list[Finding]).decode


class Digest(NamedTuple):
    """The sums of a range of entries; the same fields as a block has."""

    lines: int
    amount: int
    first_at: int
    last_at: int
    checksum: int
    weighted: int
    entries_hash: bytes
    kept_hash: bytes


class Partition(NamedTuple):
    name: str
    pending: bool
    first: int
    last: int


class SealProgress(NamedTuple):
    """The progress of sealing and verification, with the findings."""

    last: int  # number of the last entry
    sealed: int  # number of the last entry in a block
    block: int
    hash: bytes
    sealed_at: datetime | None
    floor: int  # number of the first entry that is still stored singly
    verified: int  # blocks up to this one were verified after they were sealed
    reviewed: int  # blocks up to this one were verified again
    leases: int  # leases up to this one were verified again
    checked_at: datetime | None
    findings: list[Finding]

    @property
    def unsealed(self) -> int:
        return self.last - self.sealed


async def lock(db: Connection) -> bool:
    """Try to take the sealing lock until the end of the transaction; return whether no other process holds it."""
    return bool(await db.fetchval(SQL.lock))


async def load_head(db: Connection) -> SealedBlock | None:
    row = await db.fetchrow(SQL.head)
    return _block(row) if row else None


async def load_time(db: Connection, entry: int) -> int | None:
    at = await db.fetchval(SQL.time_of_entry, entry)
    return micros_of(at) if at else None


async def find_first_since(db: Connection, first: int, last: int, at: int) -> int | None:
    number: int | None = await db.fetchval(SQL.first_since, first, last, time_of(at))
    return number


async def load_digest(db: Connection, first: int, last: int) -> Digest:
    lines, amount, *times, checksum, weighted, entries, kept = await db.fetchrow(SQL.digest, first, last)
    first_at, last_at = (micros_of(at) if at else 0 for at in times)
    return Digest(lines, int(amount), first_at, last_at, int(checksum), int(weighted), entries, kept)


async def load_kept_hash(db: Connection, first: int, last: int) -> bytes:
    return bytes(await db.fetchval(SQL.kept_hash, first, last))


async def save_sums(db: Connection, block: int, first: int, last: int) -> bytes:
    """Sum the entries of a block into rollups and balances; return the hash of the sums."""
    await db.execute(SQL.save_kept, first, last)
    await db.execute(SQL.save_rollups, block, first, last)
    await db.execute(SQL.save_balances, block)
    return await load_rollup_hash(db, block)


async def load_rollup_hash(db: Connection, block: int) -> bytes:
    return bytes(await db.fetchval(SQL.rollup_hash, block))


async def save_block(db: Connection, block: SealedBlock) -> None:
    await db.execute(
        SQL.save_block, block.number, block.first, block.last, block.amount, time_of(block.first_at),
        time_of(block.last_at), block.checksum, block.weighted, block.entries_hash, block.kept_hash, block.rollup_hash,
        block.previous, block.hash,
    )  # fmt: skip


async def load_blocks(db: Connection, after: int, until: int, limit: int) -> list[SealedBlock]:
    """Load the blocks in (after, until], in order."""
    return [_block(row) for row in await db.fetch(SQL.blocks, after, until, limit)]


async def load_last_page(db: Connection) -> SealedPage | None:
    return _page(await db.fetchrow(SQL.last_page))


async def load_block_before(db: Connection, number: int) -> SealedBlock | None:
    row = await db.fetchrow(SQL.block_before, number)
    return _block(row) if row else None


async def load_page_before(db: Connection, number: int) -> SealedPage | None:
    return _page(await db.fetchrow(SQL.page_before, number))


async def load_page_of_block(db: Connection, block: int) -> SealedPage | None:
    return _page(await db.fetchrow(SQL.page_of_block, block))


async def load_page_of_entry(db: Connection, entry: int) -> SealedPage | None:
    return _page(await db.fetchrow(SQL.page_of_entry, entry))


async def load_last_page_before(db: Connection, days: float) -> SealedPage | None:
    return _page(await db.fetchrow(SQL.last_page_before, days))


async def merge_rollups(db: Connection, first_block: int, last_block: int) -> bytes:
    """Merge the rollups of a page's blocks; return the hash of the result."""
    await db.execute(SQL.merge_rollups, first_block, last_block)
    await db.execute(SQL.drop_merged, first_block, last_block)
    return await load_rollup_hash(db, last_block)


async def save_page(db: Connection, page: SealedPage) -> None:
    await db.execute(
        SQL.save_page, page.number, page.first_block, page.last_block, page.first, page.last, page.rollup_hash,
        page.previous, page.hash,
    )  # fmt: skip


async def raise_floor(db: Connection, floor: int, before: int) -> None:
    """Raise the floor: entries below it may be dropped from now on."""
    # The row of `seal` is locked last: others write to it meanwhile.
    await db.execute(SQL.thin_balances, floor, before)
    await db.execute(SQL.raise_floor, floor)


async def list_partitions(db: Connection) -> list[Partition]:
    return [Partition(*row) for row in await db.fetch(SQL.partitions)]


async def drop_partition(db: Connection, partition: Partition) -> None:
    """Drop a partition in three steps, none of which blocks a writer. It resumes after the steps that are already
    done."""
    how = "FINALIZE" if partition.pending else "CONCURRENTLY"
    await db.execute(f"ALTER TABLE entry DETACH PARTITION {partition.name} {how}")
    await drop_orphans(db)


async def drop_orphans(db: Connection) -> list[str]:
    names = [row["name"] for row in await db.fetch(SQL.orphans)]
    for name in names:
        await db.execute(f"DROP TABLE IF EXISTS {name}")
    return names


async def load_standing(db: Connection) -> SealProgress:
    row = await db.fetchrow(SQL.standing)
    return SealProgress(**{**row, "hash": row["hash"] or b"", "findings": _decode(row["findings"])})


async def claim_check(db: Connection, seconds: float) -> bool:
    """Claim the periodic verification; return whether it is due and no other process runs it."""
    return await db.fetchval(SQL.claim_check, seconds) is not None


async def claim_drop(db: Connection, seconds: float) -> bool:
    return await db.fetchval(SQL.claim_drop, seconds) is not None


async def save_check(db: Connection, verified: int, reviewed: int, leases: int, findings: list[Finding]) -> None:
    await db.execute(SQL.save_check, verified, reviewed, leases, msgspec.json.encode(findings))


async def save_checked(db: Connection) -> None:
    """Record that the periodic verification is complete."""
    await db.execute(SQL.save_checked)


def _block(row: Any) -> SealedBlock:
    number, first, last, amount, first_at, last_at, checksum, weighted, *hashes = row
    return SealedBlock(
        number, first, last, int(amount), micros_of(first_at), micros_of(last_at), int(checksum), int(weighted), *hashes
    )


def _page(row: Any) -> SealedPage | None:
    return SealedPage(*row) if row else None
