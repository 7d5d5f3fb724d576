"""The hash chain of the ledger: entries are sealed in blocks, blocks in pages, each with the hash of its predecessor.

The chain makes tampering evident: a change, removal or insertion of an entry changes the hash of its block and of every
later block, so that any later hash that was copied elsewhere (an anchor) reveals it. The database hashes the entries
(`entry_hash` in the schema); this module hashes blocks and pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Final

from msgspec import Struct

from bursar.core.credit.account import QUARTER

GENESIS: Final = bytes(32)  # the predecessor's hash of the first block and the first page
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class SealedBlock(Struct, frozen=True):
    """Consecutive entries of one quarter of an hour, sealed together. Times are microseconds since 1970."""

    number: int
    first: int
    last: int
    amount: int
    first_at: int
    last_at: int
    checksum: int
    weighted: int
    entries_hash: bytes
    kept_hash: bytes
    rollup_hash: bytes
    previous: bytes
    hash: bytes = b""


class SealedPage(Struct, frozen=True):
    """The sealed blocks of one past quarter of an hour, rolled up together."""

    number: int
    first_block: int
    last_block: int
    first: int
    last: int
    rollup_hash: bytes
    previous: bytes
    hash: bytes = b""


class Check(StrEnum):
    """A check of the ledger's verification, as metrics and the API name it."""

    CHAIN = "chain"  # a block or page was changed, or does not follow its predecessor
    ENTRY = "entry"  # an entry was changed, removed or inserted
    KEPT = "kept"  # a permanently kept entry was changed, removed or inserted
    ROLLUP = "rollup"  # a rollup is not the sum of its entries
    BALANCE = "balance"  # a balance is not the sum of its entries
    HELD = "held"  # an account's hold is not the sum of its open leases' holds
    LEASE = "lease"  # the figures of a lease contradict each other
    NEGATIVE = "negative"  # a value that must not be negative is
    SUM = "sum"  # the balances of all accounts do not add up to zero


class Finding(Struct, frozen=True):
    """A violation that the verification of the ledger found: the check, the place and the message."""

    check: Check
    where: str  # `entry 17`, `block 3`, `account 101`, …
    message: str
    block: int = 0  # the block with the violation; 0: it concerns the present state
    lease: int = 0  # the lease with the violation, for checks that look at some leases each time


@dataclass(frozen=True, slots=True)
class Anchor:
    """A block's hash that was copied outside of the system, to verify the chain against."""

    block: int
    hash: bytes


def block_hash(block: SealedBlock) -> bytes:
    return _hash(
        "block", block.number, block.first, block.last, block.amount, block.first_at, block.last_at, block.checksum,
        block.weighted, block.entries_hash, block.kept_hash, block.rollup_hash, block.previous,
    )  # fmt: skip


def page_hash(page: SealedPage) -> bytes:
    return _hash(
        "page", page.number, page.first_block, page.last_block, page.first, page.last, page.rollup_hash, page.previous
    )


def _hash(*parts: str | int | bytes) -> bytes:
    return sha256(" ".join(one.hex() if isinstance(one, bytes) else str(one) for one in parts).encode()).digest()


def changed_line(block: SealedBlock, checksum: int, weighted: int) -> int | None:
    """Locate the changed entry of a block, if there is exactly one: it adds some d to the checksum, and d times its
    place to the weighted checksum."""
    added, weight = checksum - block.checksum, weighted - block.weighted
    if not added or weight % added:
        return None
    number = block.first + weight // added - 1
    return number if block.first <= number <= block.last else None


def chain_fault(block: SealedBlock, before: SealedBlock | None) -> Finding | None:
    """The violation of a block that was changed, or does not follow its predecessor."""
    where = f"block {block.number}"
    number, first, previous = (before.number + 1, before.last + 1, before.hash) if before else (1, 1, GENESIS)
    if block.number != number:
        return Finding(Check.CHAIN, f"block {number}", f"it is missing: the next block is {block.number}")
    if block.hash != block_hash(block):
        return Finding(Check.CHAIN, where, "its hash does not match its content")
    if block.previous != previous:
        return Finding(Check.CHAIN, where, "it does not hold the hash of the block before it")
    if block.first != first or block.last < block.first:
        return Finding(Check.CHAIN, where, f"it begins with entry {block.first} instead of entry {first}")
    return None


def page_fault(page: SealedPage, before: SealedPage | None) -> Finding | None:
    """The violation of a page that was changed, or does not follow its predecessor."""
    where = f"page {page.number}"
    number, first, block, previous = (
        (before.number + 1, before.last + 1, before.last_block + 1, before.hash) if before else (1, 1, 1, GENESIS)
    )
    if page.number != number:
        return Finding(Check.CHAIN, f"page {number}", f"it is missing: the next page is {page.number}")
    if page.hash != page_hash(page):
        return Finding(Check.CHAIN, where, "its hash does not match its content")
    if page.previous != previous:
        return Finding(Check.CHAIN, where, "it does not hold the hash of the page before it")
    if (page.first, page.first_block) != (first, block):
        return Finding(Check.CHAIN, where, f"it begins with block {page.first_block} instead of block {block}")
    return None


def quarter_end(at: int) -> int:
    """The end of the quarter of an hour that contains a time."""
    return (at // QUARTER + 1) * QUARTER


def micros_of(at: datetime) -> int:
    return (at - EPOCH) // _MICROSECOND


def time_of(micros: int) -> datetime:
    return EPOCH + micros * _MICROSECOND
