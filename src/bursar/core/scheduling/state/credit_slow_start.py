"""How much of somebody's work is tried at once, since some of it could not be paid for.

What the scheduler plans for an account without credit comes back, and has kept others from being planned. So after a
refusal one allocation is tried, and with every one that could be paid for twice as many as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bursar.core.objects.ask import Ask
from bursar.core.scheduling.state.equivalence import EquivalenceKey

Payer = tuple[str, str]  # (tenant, who submitted)
ENOUGH = 512  # who could pay for so many pays like everybody else


@dataclass(slots=True)
class CreditProbes:
    """By payer, how many may be tried in one plan; who is not named here could always pay."""

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
    """One plan's part of it."""

    probes: CreditProbes
    _tried: dict[Payer, int] = field(default_factory=dict)

    def left(self, key: EquivalenceKey) -> int:
        """How many more of a group may be tried in this plan."""
        most = self.probes.most.get((key.tenant, key.payer)) if self.probes.most else None
        return ENOUGH if most is None else max(0, most - self._tried.get((key.tenant, key.payer), 0))

    def tried(self, key: EquivalenceKey, count: int) -> bool:
        """So many were; whether there may be more."""
        payer = (key.tenant, key.payer)
        if payer not in self.probes.most:
            return True
        self._tried[payer] = self._tried.get(payer, 0) + count
        return self.left(key) > 0
