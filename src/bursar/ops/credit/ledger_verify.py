"""Verification of the ledger: that nothing was changed since it was sealed, and that all sums agree.

Entries that are kept are hashed again; of dropped entries, their rollups are. Each page, or block that is in no page
yet, is verified in a snapshot of its own, which takes no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic

import structlog

from bursar.core.credit.hash_chain import (
    Anchor,
    Check,
    Finding,
    SealedBlock,
    SealedPage,
    chain_fault,
    changed_line,
    page_fault,
)
from bursar.core.values.money import MICROS
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger_verify as store
from bursar.store.credit import seal as seal_store
from bursar.store.credit.ledger_verify import LEASE_MAX
from bursar.store.credit.seal import SealProgress
from bursar.store.db.database import Connection, TooSlow, snapshot

log = structlog.get_logger()

# Entries verified in one call, which takes a few seconds.
ENTRIES_MAX = 300_000
UNITS_MAX = 200
FINDINGS_MAX = 100
MOMENT = 60 * MICROS
BLOCK_MAX = 2**62
# For new blocks, and again for leases, in each review. Reviews begin every minute, so both must be shorter.
WORK_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a verification: its range and findings. If there is `more`, it continues after `through`."""

    findings: tuple[Finding, ...]
    through: int  # the last verified block
    more: bool
    blocks: int = 0
    entries: int = 0  # entries hashed again
    head: Anchor | None = None  # the newest block; a copy of it proves later that it was not changed

    @property
    def sound(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class _Unit:
    """The unit of verification: a page, or a block that is in no page yet."""

    page: SealedPage | None
    page_before: SealedPage | None
    blocks: list[SealedBlock]
    before: SealedBlock | None
    floor: int
    sealed: int

    @property
    def reach(self) -> tuple[int, int]:
        return self.blocks[0].number, self.blocks[-1].number

    @property
    def end(self) -> int:
        """The last block that it should have. Verification continues after it, even if blocks are missing."""
        return self.page.last_block if self.page is not None else self.blocks[-1].number

    @property
    def entries(self) -> tuple[int, int]:
        return self.blocks[0].first, self.blocks[-1].last

    @property
    def times(self) -> tuple[int, int]:
        """The range of its entries' times; it begins earlier, because an entry is saved after it is decided."""
        return self.blocks[0].first_at - MOMENT, self.blocks[-1].last_at


async def verify(
    runtime: Runtime, *, after: int = 0, entries_max: int = ENTRIES_MAX, anchor: Anchor | None = None
) -> Proof:
    """Verify a bounded number of blocks after `after`, and with the last block also the present balances and holds.
    `anchor` is a block's hash that was kept elsewhere: the block must still have it."""
    proof = await prove(runtime, after=after, entries_max=entries_max)
    findings = list(proof.findings)
    if not proof.more:
        findings += await prove_present(runtime)
        findings += await _prove_all_leases(runtime)
        if anchor is not None:
            findings += await _anchored(runtime, anchor)
    return Proof(tuple(findings), proof.through, proof.more, proof.blocks, proof.entries, proof.head)


async def prove(runtime: Runtime, *, after: int = 0, until: int = BLOCK_MAX, entries_max: int = ENTRIES_MAX) -> Proof:
    """Verify the blocks after `after`, up to `until`: their hashes, and the sums of their entries."""
    findings: list[Finding] = []
    through, blocks, entries = after, 0, 0
    for _ in range(UNITS_MAX):
        async with snapshot(runtime.database) as db:
            unit = await _load_unit(db, through)
            if unit is None:
                break
            found, hashed = await _prove_unit(db, unit)
        findings += found
        through, blocks, entries = unit.end, blocks + len(unit.blocks), entries + hashed
        if through >= until or entries >= entries_max or len(findings) >= FINDINGS_MAX:
            break
    async with snapshot(runtime.database) as db:
        head = await seal_store.load_head(db)
    more = head is not None and head.number > through
    return Proof(
        tuple(findings[:FINDINGS_MAX]), through, more, blocks, entries, Anchor(head.number, head.hash) if head else None
    )


async def prove_present(runtime: Runtime) -> list[Finding]:
    """Verify the present: balances, holds, and entries that are not sealed yet."""
    async with snapshot(runtime.database) as db:
        head = await seal_store.load_head(db)
        return await store.list_present(db, head.number if head else 0, head.last if head else 0)


async def prove_leases(runtime: Runtime, after: int = 0) -> tuple[list[Finding], int]:
    """Verify the posted amounts of the next leases after `after`: the findings, and the last lease."""
    async with snapshot(runtime.database) as db:
        head = await seal_store.load_head(db)
        return await store.list_leases(db, head.last if head else 0, after)


async def _prove_all_leases(runtime: Runtime) -> list[Finding]:
    found: list[Finding] = []
    through = 0
    while through < LEASE_MAX and len(found) < FINDINGS_MAX:
        more, through = await prove_leases(runtime, through)
        found += more
    return found


async def review(runtime: Runtime, *, seconds: float = 0.0, work_seconds: float = WORK_SECONDS) -> SealProgress | None:
    """Verify the blocks sealed since the last review, some older ones, some leases, and the present; save the findings.
    None if another process began a review within the last `seconds`. New blocks and leases are each verified for at
    most `work_seconds`."""
    async with runtime.database.reader() as db:
        if not await seal_store.claim_check(db, seconds):
            return None
    slow: TooSlow | None = None
    for look in (_review_old, _review_new, _review_leases, _review_present):
        try:
            await look(runtime, monotonic() + work_seconds)
        except TooSlow as error:
            # The other checks still run, and the error is raised at the end.
            slow = slow or error
    if slow is not None:
        raise slow
    async with runtime.database.reader() as db:
        await seal_store.save_checked(db)
        return await seal_store.load_standing(db)


async def _review_old(runtime: Runtime, _: float) -> None:
    last = await _load_standing(runtime)
    if last.reviewed >= last.verified:
        return
    proof = await prove(runtime, after=last.reviewed)
    reviewed = proof.through if proof.through < last.verified else 0
    await _write_down(runtime, proof.findings, _in_blocks(last.reviewed, proof.through), reviewed=reviewed)


async def _review_new(runtime: Runtime, until: float) -> None:
    more, after = True, (await _load_standing(runtime)).verified
    while more:
        proof = await prove(runtime, after=after)
        await _write_down(runtime, proof.findings, _in_blocks(after, proof.through), verified=proof.through)
        more = proof.more and proof.through > after and monotonic() < until
        after = proof.through


async def _review_leases(runtime: Runtime, until: float) -> None:
    more, after = True, (await _load_standing(runtime)).leases
    while more:
        found, through = await prove_leases(runtime, after)
        more = through < LEASE_MAX and monotonic() < until
        leases = through if through < LEASE_MAX else 0
        await _write_down(runtime, found, _of_leases(after, through), leases=leases)
        after = through


async def _review_present(runtime: Runtime, _: float) -> None:
    await _write_down(runtime, await prove_present(runtime), lambda one: not one.block and not one.lease)


def _in_blocks(after: int, through: int) -> Callable[[Finding], bool]:
    return lambda one: one.block > 0 and after < one.block <= through


def _of_leases(after: int, through: int) -> Callable[[Finding], bool]:
    return lambda one: not one.block and after < one.lease <= through


async def _write_down(
    runtime: Runtime,
    found: Iterable[Finding],
    looked_at: Callable[[Finding], bool],
    *,
    verified: int | None = None,
    reviewed: int | None = None,
    leases: int | None = None,
) -> None:
    """Save the findings and the progress. Earlier findings remain for ranges that were not verified this time."""
    last = await _load_standing(runtime)
    still = [one for one in last.findings if not looked_at(one)]
    findings = list(dict.fromkeys([*found, *still]))[:FINDINGS_MAX]
    for one in findings:
        if one not in last.findings:
            log.error(
                "ledger_wrong", message="the verification of the ledger found a fault", check=str(one.check),
                where=one.where, error=one.message,
            )  # fmt: skip
    async with runtime.database.reader() as db:
        await seal_store.save_check(
            db,
            last.verified if verified is None else verified,
            last.reviewed if reviewed is None else reviewed,
            last.leases if leases is None else leases,
            findings,
        )


async def _load_standing(runtime: Runtime) -> SealProgress:
    async with runtime.database.reader() as db:
        return await seal_store.load_standing(db)


async def _anchored(runtime: Runtime, anchor: Anchor) -> list[Finding]:
    async with snapshot(runtime.database) as db:
        found = await seal_store.load_blocks(db, anchor.block - 1, anchor.block, 1)
    if found and found[0].hash == anchor.hash:
        return []
    fault = "its hash is not the one that was kept" if found else "it is missing"
    return [Finding(Check.CHAIN, f"block {anchor.block}", fault, anchor.block)]


async def _load_unit(db: Connection, after: int) -> _Unit | None:
    page = await seal_store.load_page_of_block(db, after + 1)
    blocks = await _blocks_of(db, page) if page is not None else []
    while page is not None and not blocks:
        # No block of the page is left: the next existing block shows which ones are missing before it.
        page = await seal_store.load_page_of_block(db, page.last_block + 1)
        blocks = await _blocks_of(db, page) if page is not None else []
    if page is None:
        blocks = await seal_store.load_blocks(db, after, BLOCK_MAX, 1)
    if not blocks:
        return None
    before = await seal_store.load_block_before(db, blocks[0].number)
    page_before = await seal_store.load_page_before(db, page.number) if page is not None else None
    standing = await seal_store.load_standing(db)
    return _Unit(page, page_before, blocks, before, standing.floor, standing.sealed)


async def _blocks_of(db: Connection, page: SealedPage) -> list[SealedBlock]:
    first, last = page.first_block, page.last_block
    return await seal_store.load_blocks(db, first - 1, last, last - first + 1)


async def _prove_unit(db: Connection, unit: _Unit) -> tuple[list[Finding], int]:
    """The findings in a unit, and the number of entries hashed. Sums are compared only if all entries are right. No
    statement reads the entries of more than one block, because a page may have millions."""
    found = _prove_chain(unit)
    hashed, whole = 0, True
    for block in unit.blocks:
        lines, count = await _prove_lines(db, block, unit.floor)
        found += lines
        hashed += count
        whole = whole and count == block.last - block.first + 1 and not lines
        if await seal_store.load_kept_hash(db, block.first, block.last) != block.kept_hash:
            named = await store.list_kept(db, block.first, block.last, block.number) if count else []
            found += named or [_finding(Check.KEPT, block, "its permanently kept entries differ from the seal")]
    found += await _prove_sums(db, unit, whole)
    found += await store.list_ended(db, unit.reach, unit.times, unit.sealed)
    for block in unit.blocks if whole else ():
        # The last entry of the previous block is compared with the first one of this block.
        found += await store.list_untimely(db, max(unit.entries[0], block.first - 1), block.last, block.number)
    # Below the floor only the balances at the ends of pages are kept.
    if whole and unit.entries[1] >= unit.floor:
        for block in unit.blocks:
            found += await store.list_balances_of_block(db, block.number, block.first, block.last)
    else:
        found += await store.list_balances_of_page(db, *unit.reach)
    return found, hashed


def _prove_chain(unit: _Unit) -> list[Finding]:
    found, before = [], unit.before
    for block in unit.blocks:
        if fault := chain_fault(block, before):
            found.append(Finding(fault.check, fault.where, fault.message, block.number))
        before = block
    if unit.page is not None:
        fault = page_fault(unit.page, unit.page_before)
        if fault is None and (unit.reach, unit.entries) != (
            (unit.page.first_block, unit.page.last_block),
            (unit.page.first, unit.page.last),
        ):
            fault = Finding(Check.CHAIN, f"page {unit.page.number}", "its blocks differ from its record of them")
        if fault is not None:
            found.append(Finding(fault.check, fault.where, fault.message, unit.page.last_block))
    return found


async def _prove_lines(db: Connection, block: SealedBlock, floor: int) -> tuple[list[Finding], int]:
    """The findings in a block's entries, and their number: below the floor, entries may have been dropped."""
    digest = await seal_store.load_digest(db, block.first, block.last)
    if digest.lines < block.last - block.first + 1:
        missing = await store.list_missing(db, block.first, block.last, block.number) if block.last >= floor else []
        return missing, digest.lines
    if digest.entries_hash == block.entries_hash:
        return [], digest.lines
    number = changed_line(block, digest.checksum, digest.weighted)
    if number is not None:
        changed = Finding(Check.ENTRY, f"entry {number}", "it was changed after it was sealed", block.number)
    else:
        changed = _finding(Check.ENTRY, block, "several of its entries were changed after they were sealed")
    return [changed], digest.lines


async def _prove_sums(db: Connection, unit: _Unit, whole: bool) -> list[Finding]:
    first, last = unit.reach
    amount, lowest, highest = await store.load_rollup_sum(db, first, last)
    sealed = unit.page.rollup_hash if unit.page is not None else unit.blocks[-1].rollup_hash
    where = f"page {unit.page.number}" if unit.page is not None else f"block {last}"
    parts = [(block.first, block.last) for block in unit.blocks]
    found = await store.list_rollups(db, (first, last), parts) if whole else []
    if not found and await seal_store.load_rollup_hash(db, last) != sealed:
        found = [Finding(Check.ROLLUP, where, "its rollups differ from the seal", last)]
    if not found and (lowest, highest) != (last, last):
        found = [Finding(Check.ROLLUP, where, "single blocks in it still have rollups of their own", last)]
    if amount:
        found.append(Finding(Check.SUM, where, "its rollups do not sum to zero over all accounts", last))
    return found


def _finding(check: Check, block: SealedBlock, message: str) -> Finding:
    return Finding(check, f"block {block.number}", message, block.number)
