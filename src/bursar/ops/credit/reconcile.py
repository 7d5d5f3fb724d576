"""Reconciliation of ended leases: post the exact difference between the charged and the measured time.

No balance falls below zero: an amount that cannot be paid is written off. Large differences are logged. A lease is
reconciled again when usage arrives late; then only the remaining difference is posted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog
from msgspec import Struct
from msgspec.structs import replace

from bursar.core.credit.account import WRITE_OFF
from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.credit.drift import NO_DRIFT, first_hour, hour_of
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import PriceList
from bursar.core.credit.usage_events import measured, micros_of
from bursar.core.values.money import MICROS, credits_of
from bursar.ops.credit.credit import load_credit_policy
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit import reconcile as store
from bursar.store.credit.reconcile import EndedLease, LastWord, MoreDrift
from bursar.store.db.database import Connection

log = structlog.get_logger()

# How much longer reconciliation waits for leases whose events have gaps.
GAP_MICROS = 3600 * MICROS


class Reconcile(Struct, frozen=True):
    """A lease that has ended, and the policy that says which differences need an alert. A batch has one policy."""

    ended: EndedLease
    policy: CreditPolicy


class Reconciled(Struct, frozen=True):
    """The result of a reconciliation. `measured` is None if nothing was measured: the posted time stands."""

    lease: int
    account: str
    measured: int | None
    difference: int = 0  # the amount posted in addition, negative for a refund
    written_off: int = 0
    drift: int = 0  # the account's drift over the period, if its owner got an alert


async def reconcile(db: Connection, commands: Sequence[Reconcile]) -> list[Reconciled | None]:
    """Reconcile one batch, in a transaction; None for a lease that another process reconciled first."""
    ids = sorted({one.ended.lease for one in commands})
    locked = await ledger_store.lock(db, {one.ended.account for one in commands}, ())
    sums = await store.lock_sums(db, ids)
    leases = await ledger_store.lock_ended(db, ids)
    measures = await store.load_measures(db, ids, sums)
    ledger = Ledger(locked.now, PriceList(), locked.accounts, leases)
    done: dict[int, Reconciled] = {}
    for one in commands:
        if one.ended.lease in measures.by_node and one.ended.lease not in done:
            done[one.ended.lease] = _decide(ledger, measures, one)
    if done:
        await _count_drift(db, ledger, done, commands[0].policy)
        await store.save_settled(db, {one.lease: one.measured for one in done.values()})
        await store.count(db, _outcomes(done.values(), measures.missing))
        await ledger_store.save(db, ledger)
    return [done.get(one.ended.lease) for one in commands]


def _decide(ledger: Ledger, measures: store.Measures, command: Reconcile) -> Reconciled:
    lease = ledger.leases[command.ended.lease]
    account, total = ledger.accounts[lease.account], measures.by_events.get(lease.id)
    by_events = None if total is None else micros_of(total, lease)
    used = measured(lease, measures.by_node[lease.id], by_events, told=measures.told.get(lease.id))
    if used is None:
        return Reconciled(lease.id, account.name, None)
    before = len(ledger.entries)
    difference = ledger.reconcile(lease, used, drift=command.policy.drift_credits)
    written_off = sum(entry.amount for entry in ledger.entries[before:] if entry.debit == WRITE_OFF)
    return Reconciled(lease.id, account.name, used, difference, written_off)


async def _count_drift(db: Connection, ledger: Ledger, done: dict[int, Reconciled], policy: CreditPolicy) -> None:
    """Add the differences to the drift of their accounts, and alert the owners of accounts that rise above the limit.
    The accounts are locked: another reconciler of their leases sees this drift, and its alert, before it adds more."""
    by_account: dict[int, list[Reconciled]] = {}
    for one in done.values():
        if one.difference:
            by_account.setdefault(ledger.leases[one.lease].account, []).append(one)
    if not by_account:
        return
    hours, limit = policy.drift_account_hours, policy.drift_account_credits
    before = await store.load_drifts(db, by_account, first_hour(ledger.now, hours))
    more: dict[int, MoreDrift] = {}
    for account, some in by_account.items():
        known, amount = before.get(account, NO_DRIFT), sum(abs(one.difference) for one in some)
        alerted = ledger.drift(ledger.accounts[account], known, amount, limit=limit, hours=hours)
        if alerted:
            done[some[-1].lease] = replace(some[-1], drift=known.amount + amount)
        more[account] = MoreDrift(len(some), amount, alerted)
    await store.add_drifts(db, hour_of(ledger.now), more)


def _outcomes(done: Iterable[Reconciled], missing: int) -> dict[str, tuple[int, int]]:
    """Leases and nanocredits by outcome, and the number of missing events."""
    found: dict[str, tuple[int, int]] = {"missing events": (missing, 0)} if missing else {}
    for one in done:
        parts = [(_outcome(one), abs(one.difference))]
        if one.written_off:
            parts.append(("written off", one.written_off))
        for name, amount in parts:
            leases, total = found.get(name, (0, 0))
            found[name] = (leases + 1, total + amount)
    return found


def _outcome(one: Reconciled) -> str:
    if one.measured is None:
        return "unmeasured"
    return "exact" if not one.difference else "debited" if one.difference > 0 else "refunded"


async def settle_late(runtime: Runtime, words: Sequence[LastWord]) -> None:
    """Reconcile leases that ended while their node was away, by the running time that the node has reported since."""
    async with runtime.database.reader() as db:
        await store.save_last_words(db, words)


async def forget_drift(runtime: Runtime) -> None:
    """Delete the drift of hours that no longer count."""
    policy = await load_credit_policy(runtime)
    async with runtime.database.reader() as db:
        await store.forget_drifts(db, first_hour(await ledger_store.load_now(db), policy.drift_account_hours))


def tell(done: Iterable[Reconciled], policy: CreditPolicy) -> None:
    """Log large differences, by lease and by account, after they are committed."""
    for one in done:
        if one.drift:
            log.warning(
                "account_drifted", message="the adjustments of an account add up to more than the limit",
                account=one.account, drift=credits_of(one.drift), limit=credits_of(policy.drift_account_credits),
                hours=policy.drift_account_hours,
            )  # fmt: skip
        if abs(one.difference) > policy.drift_credits or one.written_off:
            log.warning(
                "lease_adjusted", message="a lease's measured cost differs from the posted one", lease=one.lease,
                account=one.account,
                difference=credits_of(one.difference), written_off=credits_of(one.written_off),
            )  # fmt: skip
