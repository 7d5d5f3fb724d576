"""Credit backoff: work that its account could not pay for waits until the account changes.

Some obstacles end without a notification, such as a daily cap: so it is tried again after a while in any case.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bursar.core.objects.ask import Ask
from bursar.core.objects.pending_reason import UNPAID, PendingReason
from bursar.core.scheduling.state.cluster_state import ClusterState
from bursar.core.scheduling.state.equivalence import UnitKey
from bursar.core.scheduling.state.scheduler_memory import Blocked
from bursar.store.credit import ledger as store
from bursar.store.db.database import Connection

TOLD_MAX = 10_000
KNOWN_MAX = 200_000
TIDIED_MAX = 200  # pending entries that each review checks


@dataclass(frozen=True, slots=True)
class _Waits:
    """A unit that waits for credit. Notifications with a number above `since` arrived after its last attempt."""

    tenant: str
    since: int
    blocked: Blocked


@dataclass(slots=True)
class Unpaid:
    heard: int = 0  # the number of account notifications so far
    _told: list[tuple[int, str]] = field(default_factory=list)
    _last: dict[str, int] = field(default_factory=dict)  # by tenant, the number of its last notification
    _last_of_all: int = 0
    _known: dict[int, str] = field(default_factory=dict)  # by account, its tenant, which never changes
    _waiting: dict[UnitKey, _Waits] = field(default_factory=dict)
    _of: dict[str, dict[UnitKey, None]] = field(default_factory=dict)  # by tenant, the same
    _heard_of: set[str] = field(default_factory=set)  # tenants whose pending work is to be reviewed
    # By tenant and uid, unpaid preemptors: they are kept when the cluster state is loaded again.
    _kept: dict[str, dict[str, _Waits]] = field(default_factory=dict)

    def tell(self, payload: str) -> bool:
        """Note that accounts got or freed credit; true if any work waits for credit."""
        self.heard += 1
        if len(self._told) >= TOLD_MAX:
            self._told = [(self.heard, store.ALL)]
        self._told.append((self.heard, payload))
        return bool(self._waiting)

    async def review(self, db: Connection, cluster: ClusterState) -> None:
        """Unblock the pending work of tenants with notifications since its last attempt."""
        if self._told:
            told, self._told = self._told, []
            await self._note(db, told)
        heard_of, self._heard_of = self._heard_of, set()
        for tenant in heard_of:
            self._try_again(cluster, tenant)
        self._tidy(cluster)

    def _try_again(self, cluster: ClusterState, tenant: str) -> None:
        for key in [key for key in self._of.get(tenant, ()) if self._was_told(self._waiting[key])]:
            self._leave(key)
            if (known := cluster.memory.blocked.get(key)) is not None and known.reason.why in UNPAID:
                del cluster.memory.blocked[key]
        if kept := {uid: one for uid, one in self._kept.pop(tenant, {}).items() if not self._was_told(one)}:
            self._kept[tenant] = kept

    def _tidy(self, cluster: ClusterState) -> None:
        """Check a few entries each time, round robin: drop those that were tried again or are no longer pending."""
        for _ in range(min(TIDIED_MAX, len(self._waiting))):
            key = next(iter(self._waiting))
            one = self._leave(key)
            if key in cluster.memory.blocked:
                self._enter(key, one)

    def _enter(self, key: UnitKey, one: _Waits) -> None:
        self._waiting[key] = one
        self._of.setdefault(one.tenant, {})[key] = None

    def _leave(self, key: UnitKey) -> _Waits:
        one = self._waiting.pop(key)
        self._of[one.tenant].pop(key, None)
        if not self._of[one.tenant]:
            del self._of[one.tenant]
        return one

    def _was_told(self, one: _Waits) -> bool:
        return max(self._last_of_all, self._last.get(one.tenant, 0)) > one.since

    async def _note(self, db: Connection, told: Iterable[tuple[int, str]]) -> None:
        named = [(number, store.told_of(payload)) for number, payload in told]
        if len(self._known) > KNOWN_MAX:
            self._known.clear()
        unknown = {each for _, ids in named for each in ids or () if each not in self._known}
        if unknown:
            found = await store.load_accounts(db, unknown)
            self._known.update({each: account.tenant for each, account in found.items()})
        for number, ids in named:
            if ids is None:
                self._last_of_all = number
                self._heard_of |= self._of.keys() | self._kept.keys()
            for each in ids or ():
                if each in self._known:
                    self._last[self._known[each]] = number
                    self._heard_of.add(self._known[each])

    def wait(
        self,
        cluster: ClusterState,
        asks: Iterable[Ask],
        reason: PendingReason,
        until: float,
        since: int,
        *,
        keep: bool = False,
    ) -> None:
        """Block these until then, unless one of their accounts changes, or did so since the attempt."""
        blocked = Blocked(reason, 0, 0, until, firm=True)
        for ask in asks:
            one = _Waits(ask.tenant, since, blocked)
            if self._was_told(one):
                self._heard_of.add(one.tenant)  # The notification arrived during the attempt.
            if keep:
                self._kept.setdefault(one.tenant, {})[ask.uid] = one
            if ask.uid in cluster.waiting:
                self._block(cluster, ask, one)

    def _block(self, cluster: ClusterState, ask: Ask, one: _Waits) -> None:
        key = cluster.unit_key(ask.uid)
        cluster.memory.blocked[key] = one.blocked
        cluster.memory.probes.refused(ask)
        if key in self._waiting:
            self._leave(key)
        self._enter(key, one)
        if cluster.memory.reserved_for == key:
            cluster.memory.reserved_for = cluster.memory.reservation = None

    def restore(self, cluster: ClusterState, now: float) -> None:
        """Block unpaid preemptors again after the cluster state was loaded again."""
        self._waiting.clear()
        self._of.clear()
        kept, self._kept = self._kept, {}
        for uid, one in [each for some in kept.values() for each in some.items()]:
            if one.blocked.until > now and uid in cluster.waiting:
                self._kept.setdefault(one.tenant, {})[uid] = one
                self._block(cluster, cluster.waiting[uid].members[uid], one)
