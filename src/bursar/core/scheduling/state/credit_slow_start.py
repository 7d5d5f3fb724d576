"""Credit slow start: the number of allocations tried at once for an account that refused to pay.

Placements that an account cannot pay for are rejected at commit, and have displaced other work in the plan. So after a
refusal one allocation is tried, and the number doubles with every allocation that is paid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.equivalence import EquivalenceKey

Payer = tuple[str, str]  # (tenant, submitter)
ENOUGH = 512  # the number from which the limit is lifted


@dataclass(slots=True)
class CreditProbes:
    """By payer, the number that one plan may try; payers without an entry are unlimited."""

    most: dict[Payer, int] = field(default_factory=dict)

    def refused(self, ask: Ask) -> None:
        self.most[ask.tenant, ask.payer] = 1

    def paid(self, ask: Ask) -> None:
        payer = (ask.tenant, ask.payer)
        if payer in self.most:
            self.most[payer] *= 2
            if self.most[payer] >= ENOUGH:
                del self.most[payer]


@dataclass(slots=True)
class CreditSlowStart:
    """The limits of credit slow start during one plan."""

    probes: CreditProbes
    _tried: dict[Payer, int] = field(default_factory=dict)

    def left(self, key: EquivalenceKey) -> int:
        """The number of allocations of a class that this plan may still try."""
        most = self.probes.most.get((key.tenant, key.payer)) if self.probes.most else None
        return ENOUGH if most is None else max(0, most - self._tried.get((key.tenant, key.payer), 0))

    def tried(self, key: EquivalenceKey, count: int) -> bool:
        """Count attempts; true if more are allowed."""
        payer = (key.tenant, key.payer)
        if payer not in self.probes.most:
            return True
        self._tried[payer] = self._tried.get(payer, 0) + count
        return self.left(key) > 0
