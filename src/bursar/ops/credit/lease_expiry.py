"""Lease expiry: close leases that were not extended in time, and settle their holds.

A node that is away cannot report how long its work ran, so all of the paid time is posted until it reports.
"""

from __future__ import annotations

from collections.abc import Mapping

from bursar.commands.credit.lease_expiry import Lapse
from bursar.core.values.refusal import Refusal
from bursar.ops.runtime.lane import Overloaded, put_all, raise_first
from bursar.ops.runtime.runtime import Runtime


async def lapse(runtime: Runtime, overdue: Mapping[int, int]) -> dict[int, bool]:
    """Close these leases, given by number with the `paid_until` seen last. The result says for each decided lease
    whether it was closed: one that was extended meanwhile, or is closed already, is left alone. Leases missing from the
    result are still overdue."""
    asked = [Lapse(number=number, paid_until=paid_until) for number, paid_until in overdue.items()]
    replies = await put_all(runtime.crediting, asked)
    raise_first([one for one in replies if not isinstance(one, Overloaded)])
    return {
        one.number: not isinstance(reply, Refusal)
        for one, reply in zip(asked, replies, strict=True)
        if not isinstance(reply, BaseException)
    }
