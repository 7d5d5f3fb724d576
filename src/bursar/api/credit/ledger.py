"""Handlers of the ledger as a whole: its sealed blocks, and its verification."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from msgspec import Struct

from bursar.api.http.action import seen_whole
from bursar.api.http.route import Answer, Call, Outcome, Param
from bursar.core.credit.hash_chain import Anchor, Finding
from bursar.core.values.instant import timestamp
from bursar.core.values.money import credits_of
from bursar.core.values.refusal import Refusal, field_fault, invalid
from bursar.ops.credit import ledger_verify, seal
from bursar.ops.credit.statement import system_balances
from bursar.wire.shared.document import encode

PARAMS: Final = (
    Param("after", "Continue after this block: a whole ledger is verified in several requests.", "integer"),
    Param("anchor", "BLOCK:HASH recorded earlier: the block must still have this hash."),
)
_ANCHOR: Final = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")


class FindingView(Struct):
    """A finding of the verification; `where` locates it, as in `entry 17`, `block 3` or `account 101`."""

    check: str
    where: str
    message: str


class LedgerVerdict(Struct):
    """The result of a verification. `sound` refers to the blocks up to `through`; if there is `more`, continue with it
    as `after`. `head` is the newest block and its hash: with it, a reader can prove later that no earlier entry was
    changed."""

    sound: bool
    findings: list[FindingView]
    through: int
    more: bool
    blocks: int
    entries: int
    head: str


class LedgerStanding(Struct):
    """The state of the ledger; `accounts` are the system accounts, the counterparties of all entries."""

    last_entry: int
    sealed_entry: int
    block: int
    head: str
    sealed_at: str | None
    kept_from: int
    verified_block: int
    verified_at: str | None
    findings: list[FindingView]
    accounts: dict[str, str]


async def show(call: Call) -> Outcome:
    if refusal := seen_whole(call, "the ledger"):
        return refusal
    standing = await seal.load_standing(call.context.runtime)
    shown = LedgerStanding(
        standing.last,
        standing.sealed,
        standing.block,
        f"{standing.block}:{standing.hash.hex()}" if standing.block else "",
        _time(standing.sealed_at),
        standing.floor,
        standing.verified,
        _time(standing.checked_at),
        [_view(one) for one in standing.findings],
        {name: credits_of(amount) for name, amount in (await system_balances(call.context.runtime)).items()},
    )
    return Answer(200, encode(shown))


async def verify(call: Call) -> Outcome:
    if refusal := seen_whole(call, "the ledger"):
        return refusal
    after, anchor = _number(call), _anchor(call)
    if isinstance(after, Refusal):
        return after
    if isinstance(anchor, Refusal):
        return anchor
    found = await ledger_verify.verify(call.context.runtime, after=after, anchor=anchor)
    head = f"{found.head.block}:{found.head.hash.hex()}" if found.head is not None else ""
    verdict = LedgerVerdict(
        found.sound,
        [_view(one) for one in found.findings],
        found.through,
        found.more,
        found.blocks,
        found.entries,
        head,
    )
    return Answer(200, encode(verdict))


def _view(one: Finding) -> FindingView:
    return FindingView(one.check, one.where, one.message)


def _time(at: datetime | None) -> str | None:
    return None if at is None else timestamp(at)


def _number(call: Call) -> int | Refusal:
    text = call.query.get("after", "0")
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    return invalid("after must be the number of a block", field_fault("after", "must be a number"))


def _anchor(call: Call) -> Anchor | Refusal | None:
    text = call.query.get("anchor", "")
    if not text:
        return None
    match = _ANCHOR.fullmatch(text)
    if match is None:
        return invalid("anchor must be BLOCK:HASH, as verify prints it", field_fault("anchor", "must be BLOCK:HASH"))
    return Anchor(int(match[1]), bytes.fromhex(match[2]))
