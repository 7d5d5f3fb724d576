"""Sealing: entries in blocks, blocks in pages, each with the hash of the one before.

What was sealed cannot be changed, taken out or put in without being seen: whoever changes a line must change the hash
of its block, and of every block after it, and who has written down one later hash still sees it. Lines are hashed where
they are kept (`entry_hash` in the schema); `line` says the same in words. What is above the lines is hashed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Final

from msgspec import Struct

from bursar.core.credit.account import QUARTER
from bursar.core.credit.ledger import Entry

GENESIS: Final = bytes(32)  # what the first block and the first page come after
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
    """The blocks of a quarter of an hour that is over, rolled up together."""

    number: int
    first_block: int
    last_block: int
    first: int
    last: int
    rollup_hash: bytes
    previous: bytes
    hash: bytes = b""


class Check(StrEnum):
    """What is verified. The names are those that metrics and doors show."""

    CHAIN = "chain"  # a block or page is not as it was sealed, or not after the one before
    ENTRY = "entry"  # a line was changed, taken out or put in
    KEPT = "kept"  # so with one that is kept for ever
    ROLLUP = "rollup"  # sums are not those of the lines
    BALANCE = "balance"  # a balance is not the sum of its entries
    HELD = "held"  # what is held is not what open leases hold
    LEASE = "lease"  # a lease's own figures do not agree
    NEGATIVE = "negative"  # something is below zero that never may be
    SUM = "sum"  # all accounts together are not zero


class Finding(Struct, frozen=True):
    """Something that is not as it must be: where, and what is wrong with it."""

    check: Check
    where: str  # `entry 17`, `block 3`, `account 101`, …
    message: str
    block: int = 0  # in which it was found; 0: it is of the present
    lease: int = 0  # of which it was found, where only some of them are looked at each time


@dataclass(frozen=True, slots=True)
class Anchor:
    """A block's hash that somebody has written down elsewhere."""

    block: int
    hash: bytes


def line(number: int, at: int, entry: Entry) -> bytes:
    """What is hashed of an entry: its numbers, the lengths of its texts, then the texts. No two have the same."""
    texts = [str(entry.type).encode(), entry.request.encode(), entry.actor.encode(), entry.reason.encode()]
    numbers = (
        number, at, entry.debit, entry.credit, entry.amount, entry.lease, entry.seq, entry.rate, entry.begin, entry.end,
        *(len(text) for text in texts),
    )  # fmt: skip
    return " ".join(str(one) for one in numbers).encode() + b" " + b"".join(texts)


def lines_hash(lines: Iterable[bytes]) -> bytes:
    """Of the hashes of all lines, one after another."""
    return sha256(b"".join(sha256(one).digest() for one in lines)).digest()


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
    """Which entry of a block was changed, if it is one alone. A changed line adds some d to the sum, and d times its
    place to the weighted sum."""
    added, weight = checksum - block.checksum, weighted - block.weighted
    if not added or weight % added:
        return None
    number = block.first + weight // added - 1
    return number if block.first <= number <= block.last else None


def chain_fault(block: SealedBlock, before: SealedBlock | None) -> Finding | None:
    """Whether a block is what was sealed, right after the one before."""
    where = f"block {block.number}"
    number, first, previous = (before.number + 1, before.last + 1, before.hash) if before else (1, 1, GENESIS)
    if block.number != number:
        return Finding(Check.CHAIN, f"block {number}", f"it is missing: block {block.number} comes next")
    if block.hash != block_hash(block):
        return Finding(Check.CHAIN, where, "its hash is not that of what it says")
    if block.previous != previous:
        return Finding(Check.CHAIN, where, "it was not sealed after the block that is before it")
    if block.first != first or block.last < block.first:
        return Finding(Check.CHAIN, where, f"it begins with entry {block.first}, and should with entry {first}")
    return None


def page_fault(page: SealedPage, before: SealedPage | None) -> Finding | None:
    where = f"page {page.number}"
    number, first, block, previous = (
        (before.number + 1, before.last + 1, before.last_block + 1, before.hash) if before else (1, 1, 1, GENESIS)
    )
    if page.number != number:
        return Finding(Check.CHAIN, f"page {number}", f"it is missing: page {page.number} comes next")
    if page.hash != page_hash(page):
        return Finding(Check.CHAIN, where, "its hash is not that of what it says")
    if page.previous != previous:
        return Finding(Check.CHAIN, where, "it was not sealed after the page that is before it")
    if (page.first, page.first_block) != (first, block):
        return Finding(Check.CHAIN, where, f"it begins with block {page.first_block}, and should with block {block}")
    return None


def quarter_end(at: int) -> int:
    """When the quarter of an hour that a time is in is over."""
    return (at // QUARTER + 1) * QUARTER


def micros_of(at: datetime) -> int:
    return (at - EPOCH) // _MICROSECOND


def time_of(micros: int) -> datetime:
    return EPOCH + micros * _MICROSECOND
