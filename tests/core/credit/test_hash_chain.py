"""Sealing as rules: what is hashed, how a changed line is found, and what a forecast says."""

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from bursar.core.credit.account import QUARTER, Account
from bursar.core.credit.hash_chain import (
    GENESIS,
    SealedBlock,
    SealedPage,
    block_hash,
    chain_fault,
    changed_line,
    micros_of,
    page_fault,
    page_hash,
    quarter_end,
    time_of,
)
from bursar.core.credit.lease import Lease
from bursar.core.credit.ledger import Entry, Type
from bursar.core.credit.statement import forecast
from bursar.core.values.money import MICROS, cost
from bursar.core.values.replace import replace
from support.credit.entry_lines import line, lines_hash

texts = st.text(max_size=8)
numbers = st.integers(0, 2**62)
entries = st.builds(
    Entry, st.sampled_from(Type), numbers, numbers, numbers, numbers, numbers, numbers, numbers, numbers,
    texts, texts, texts,
)  # fmt: skip


def sealed(lines: list[bytes], number: int = 1, first: int = 1, previous: bytes = GENESIS) -> SealedBlock:
    checksum, weighted = sums(lines)
    block = SealedBlock(
        number,
        first,
        first + len(lines) - 1,
        7,
        0,
        1,
        checksum,
        weighted,
        lines_hash(lines),
        GENESIS,
        GENESIS,
        previous,
    )
    return replace(block, hash=block_hash(block))


def sums(lines: list[bytes]) -> tuple[int, int]:
    """As the database counts them."""
    parts = [int.from_bytes(sha256(one).digest()[:5]) for one in lines]
    return sum(parts), sum(part * place for place, part in enumerate(parts, 1))


@given(entries, entries, numbers, numbers)
def test_two_entries_never_read_the_same(one: Entry, other: Entry, number: int, at: int) -> None:
    assert (line(number, at, one) == line(number, at, other)) is (one == other)


def test_texts_that_run_into_each_other_do_not_either() -> None:
    one, other = Entry(Type.DEBIT, 1, 2, 3, request="a", actor="b"), Entry(Type.DEBIT, 1, 2, 3, request="ab")
    assert line(1, 1, one) != line(1, 1, other)


@given(st.lists(st.binary(), min_size=1, max_size=50), st.data())
def test_one_changed_line_is_found_by_the_checksums(lines: list[bytes], data: st.DataObject) -> None:
    block = sealed(lines, first=data.draw(st.integers(1, 10**12)))
    assert changed_line(block, *sums(lines)) is None
    place = data.draw(st.integers(0, len(lines) - 1))
    changed = [*lines[:place], lines[place] + b"!", *lines[place + 1 :]]
    assert lines_hash(changed) != block.entries_hash
    assert changed_line(block, *sums(changed)) == block.first + place


def test_a_chain_is_broken_by_whatever_is_changed() -> None:
    first = sealed([b"a", b"b"])
    second = sealed([b"c"], 2, 3, first.hash)
    assert chain_fault(first, None) is None
    assert chain_fault(second, first) is None
    for block, before in (
        (replace(second, amount=8), first),
        (replace(second, last_at=2), first),
        (replace(second, checksum=second.checksum + 1), first),
        (replace(second, hash=GENESIS), first),
        (second, replace(first, hash=GENESIS)),
        (second, None),
        (sealed([b"c"], 3, 3, first.hash), first),
        (sealed([b"c"], 2, 4, first.hash), first),
        (sealed([b"c"], 2, 3), first),
    ):
        assert chain_fault(block, before) is not None


def test_so_is_one_of_pages() -> None:
    def page(number: int, block: int, entry: int, previous: bytes) -> SealedPage:
        one = SealedPage(number, block, block + 1, entry, entry + 9, GENESIS, previous)
        return replace(one, hash=page_hash(one))

    first = page(1, 1, 1, GENESIS)
    second = page(2, 3, 11, first.hash)
    assert page_fault(first, None) is None
    assert page_fault(second, first) is None
    for one, before in (
        (replace(second, rollup_hash=first.hash), first),
        (replace(second, last=21), first),
        (second, None),
        (page(3, 3, 11, first.hash), first),
        (page(2, 4, 11, first.hash), first),
        (page(2, 3, 12, first.hash), first),
        (page(2, 3, 11, GENESIS), first),
    ):
        assert page_fault(one, before) is not None


@given(st.integers(0, 250_000_000_000_000_000))
def test_times_are_kept_to_the_microsecond(micros: int) -> None:
    assert micros_of(time_of(micros)) == micros
    assert quarter_end(micros) - QUARTER <= micros < quarter_end(micros)
    assert quarter_end(micros) % QUARTER == 0


@given(st.integers(0, 10**15), st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 3600 * MICROS))))
def test_a_forecast_does_not_depend_on_what_was_posted_yet(posted: int, running: list[tuple[int, int]]) -> None:
    """What has passed is spent, whether it was posted or not; at the end nothing is left."""
    now = 10**15
    leases = [
        Lease(
            number, 100, "j", rate=rate, started_at=1, since=now - passed, posted_until=now - passed, paid_until=now + 1
        )
        for number, (rate, passed) in enumerate(running)
    ]
    shown = forecast(Account(100, "t", posted=posted), leases, now)
    spent = sum(cost(rate, passed) for rate, passed in running)
    assert shown.left == max(0, posted - spent)
    assert shown.rate == sum(rate for rate, _ in running)
    if shown.micros is None:
        assert not running
    else:
        assert cost(shown.rate, shown.micros) <= shown.left
        assert cost(shown.rate, shown.micros + 1) >= shown.left
