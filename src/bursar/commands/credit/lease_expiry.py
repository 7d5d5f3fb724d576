"""The command that closes an expired lease."""

from __future__ import annotations

from dataclasses import dataclass

from bursar.commands.credit.ledger import Credit, LedgerBatch, Receipt, no_lease
from bursar.core.credit.lease import lease_name
from bursar.core.values.refusal import Code, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Lapse(Credit):
    """Close a lease, if its `paid_until` has not changed."""

    number: int
    paid_until: int

    def lease(self) -> int:
        return self.number

    def decide(self, batch: LedgerBatch, /) -> Receipt | Refusal:
        lease = batch.open_lease(self.number)
        if lease is None:
            return no_lease(self.number)
        if lease.paid_until != self.paid_until:
            return Refusal(Code.STALE, f"{lease_name(self.number)} was extended")
        batch.ledger.lapse(lease)
        return batch.receipt(batch.ledger.accounts[lease.account], lease=lease)
