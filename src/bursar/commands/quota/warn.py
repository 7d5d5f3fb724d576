"""Quota warnings: a tenant has used much of a limit, or is clearly below the mark again.

A warning is written to the tenant's status, where it can be watched; to the feed, from which Events are served; and
as a notice to its webhooks. All of that is one transaction, decided under the tenant's lock against its stored status,
so concurrent controllers report a crossing only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from bursar.commands.command import Command, Result
from bursar.commands.objects.object import not_found
from bursar.commands.objects.status import set_condition, status_of, unchanged
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.charge import Charge
from bursar.core.objects.notification import Notification
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.warning import QuotaNews, reached, warning_message
from bursar.core.values.instant import timestamp
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from bursar.wire.kinds.tenant import QUOTA_FIELD, QUOTA_WARNING, TENANT, QuotaState
from bursar.wire.shared.document import encode

QUOTAS: Final = "system:quotas"  # the actor in the audit log
WARN, RESTORE = "warn", "restore"  # the verbs in the audit log and in Events


class LimitUse(Struct, frozen=True):
    """The usage of one limit of a tenant, and the percentages of it at which to warn."""

    dimension: str
    used: int
    limit: int
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnQuota(Command):
    """Report limits whose usage crossed a mark since the last report. The usage was read without a lock."""

    uid: str
    uses: tuple[LimitUse, ...]

    def charges(self, _: UnitOfWork) -> Iterable[tuple[str, Charge]]:
        return ()

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        if before is None:
            return not_found(self.key)
        if before.uid != self.uid:
            return Refusal(Code.STALE, f"tenant {self.key.name} was deleted and created again")
        was = told_in(before)
        now = next_told(was, self.uses)
        if now == was:
            return unchanged(before)
        risen = [one for one in self.uses if now.get(one.dimension, 0) > was.get(one.dimension, 0)]
        batch.notifications += [self._notification(one, now[one.dimension]) for one in risen]
        message = "; ".join(warning_message(one.dimension, one.used, one.limit) for one in risen)
        message = message or _below(was, now)
        origin = Origin(self.origin.actor, WARN if risen else RESTORE, message)
        return batch.put(_with_told(before, now, message, timestamp(batch.now)), origin)

    def _notification(self, one: LimitUse, mark: int) -> Notification:
        data = {
            "tenant": self.key.name,
            "dimension": one.dimension,
            "threshold": mark / 100,
            "utilization": round(one.used / one.limit, 4) if one.limit else None,
            "used": format_amount(one.dimension, one.used),
            "limit": format_amount(one.dimension, one.limit),
            "message": warning_message(one.dimension, one.used, one.limit),
        }
        return Notification(QuotaNews.WARNING, self.key.name, self.key.name, encode(data))


def tenant_key(name: str) -> Key:
    return Key(TENANT.name, "", name)


def told_in(tenant: Stored) -> dict[str, int]:
    """The reported mark of each dimension, by the tenant's status."""
    return dict(status_of(tenant).get("quotaWarnings") or {})


def next_told(was: Mapping[str, int], uses: Iterable[LimitUse]) -> dict[str, int]:
    """The reported marks after these usages; other dimensions stay as they are."""
    now = dict(was)
    for one in uses:
        mark = reached(one.used, one.limit, one.marks, was.get(one.dimension, 0))
        if mark:
            now[one.dimension] = mark
        else:
            now.pop(one.dimension, None)
    return now


def _below(was: Mapping[str, int], now: Mapping[str, int]) -> str:
    fallen = sorted(name for name, mark in was.items() if now.get(name, 0) < mark)
    return f"usage of {', '.join(fallen)} is below {'the mark' if len(fallen) == 1 else 'the marks'} again"


def _with_told(tenant: Stored, told: Mapping[str, int], message: str, at: str) -> Stored:
    status: dict[str, Any] = status_of(tenant)
    status.pop("quotaWarnings", None)
    if told:
        status["quotaWarnings"] = dict(sorted(told.items()))
    reason = "LimitNearlyUsed" if told else "LimitsHaveRoom"
    set_condition(status, QUOTA_WARNING, str(bool(told)), reason, message, at)
    state = QuotaState.WARNING if told else QuotaState.WITHIN
    return replace(tenant, status=encode(status), fields={**tenant.fields, QUOTA_FIELD: str(state)})
