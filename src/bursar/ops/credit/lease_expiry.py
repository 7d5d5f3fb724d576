"""Ending leases that nobody extends any more: what they paid for is over by now, and what is held is settled.

A node that is away cannot say how long its work ran: all of the paid time is posted, until it comes back and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bursar.core.credit.lease import lease_name
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.credit.ledger import Credit, Desk, Receipt, no_lease
from bursar.ops.runtime.lane import Overloaded, put_all, raise_first
from bursar.ops.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapse(Credit):
    """End a lease, if it is still paid only until then."""

    number: int
    paid_until: int

    def lease(self) -> int:
        return self.number

    def decide(self, desk: Desk, /) -> Receipt | Refusal:
        lease = desk.open_lease(self.number)
        if lease is None:
            return no_lease(self.number)
        if lease.paid_until != self.paid_until:
            return Refusal(Code.STALE, f"{lease_name(self.number)} was extended")
        desk.ledger.lapse(lease)
        return desk.receipt(desk.ledger.accounts[lease.account], lease=lease)


async def lapse(runtime: Runtime, overdue: Mapping[int, int]) -> dict[int, bool]:
    """End these leases, by number, each with until when it was seen to be paid. Of those that were decided, whether
    each was ended: what was extended meanwhile, or has ended, is left alone. What was not taken is still overdue."""
    asked = [Lapse(number=number, paid_until=paid_until) for number, paid_until in overdue.items()]
    replies = await put_all(runtime.crediting, asked)
    raise_first([one for one in replies if not isinstance(one, Overloaded)])
    return {
        one.number: not isinstance(reply, Refusal)
        for one, reply in zip(asked, replies, strict=True)
        if not isinstance(reply, BaseException)
    }
