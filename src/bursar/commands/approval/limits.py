"""Requests for higher limits: their creation, and the decision that raises the limits of a tenant.

The limits change in the transaction of the approval, under the tree's exclusive lock, so that nobody charges between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bursar.commands.approval.decide import Decide, name_of
from bursar.commands.command import Result
from bursar.commands.objects.object import CreateObject, changed_draft, tenant_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.objects.approval import Approval, Verdict
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota.limit_request import not_higher, raised, shortages
from bursar.core.values.refusal import Cause, Code, Refusal, invalid
from bursar.wire.kinds.quotarequest import QuotaRequest
from bursar.wire.kinds.tenant import TENANT, Tenant
from bursar.wire.shared.document import EMPTY
from bursar.wire.shared.limits import amounts, dimension_name

_request: Final = msgspec.json.Decoder(QuotaRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits(CreateObject):
    """Store a request for limits, each of which must be above the present one."""

    def _refusal(self, batch: UnitOfWork) -> Refusal | None:
        if refusal := super(RequestLimits, self)._refusal(batch):
            return refusal
        return not_higher(batch.tree, tenant_of(batch, self.key, self.draft.tenant), wanted_in(self.draft))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideLimits(Decide):
    """A decision on a request for limits. Its approval writes the tenant too."""

    within: str = ""  # the tenant whose administrator decides, within its own limits; empty: an approver

    @property
    def changes_tree(self) -> bool:
        return self.decision.verdict is Verdict.APPROVE

    def objects(self) -> Iterable[Key]:
        return (self.key, Key(TENANT.name, "", self.tenant)) if self.changes_tree else (self.key,)

    def decide(self, batch: UnitOfWork) -> Result:
        before = batch.objects.get(self.key)
        owner = batch.tree.tenants.get(self.tenant)
        if before is not None and self.within and (owner is None or owner.parent != self.within):
            return Refusal(
                Code.FORBIDDEN,
                f"{name_of(self.key)} is decided by an approver, a system admin, or an administrator of the tenant "
                "directly above its own",
                "Ask one of them.",
            )
        return Decide.decide(self, batch)

    def _approve(self, batch: UnitOfWork, before: Stored, approval: Approval, after: Approval) -> Result:
        wanted = wanted_in(before)
        more = raised(batch.tree, self.tenant, wanted)
        if self.within and (refusal := shortages(batch.tree, self.tenant, self.within, more)):
            return refusal
        if more:
            tenant = _with_limits(batch.objects[Key(TENANT.name, "", self.tenant)], _written(before), more)
            if isinstance(tenant, Refusal):
                return tenant
            batch.put(
                tenant, Origin(self.origin.actor, "approve", f"quotarequest/{self.key.namespace}/{self.key.name}")
            )
        return super(DecideLimits, self)._approve(batch, before, approval, after)


def wanted_in(request: Stored) -> dict[str, int]:
    """The requested limits as amounts."""
    return amounts(_request.decode(request.doc).spec.limits)


def _written(request: Stored) -> dict[str, Any]:
    """The requested limits as they are written, by dimension."""
    return {dimension_name(name): value for name, value in _request.decode(request.doc).spec.limits.items()}


def _with_limits(tenant: Stored, written: Mapping[str, Any], more: Mapping[str, int]) -> Stored | Refusal:
    """The tenant with these limits in its spec, in place of those on the same dimensions."""
    document = msgspec.json.decode(tenant.doc)
    spec = document.get("spec") or {}
    kept = {name: value for name, value in (spec.get("limits") or {}).items() if dimension_name(name) not in more}
    document["spec"] = {**spec, "limits": {**kept, **{name: written[name] for name in more}}}
    if tenant.status != EMPTY:
        document["status"] = msgspec.json.decode(tenant.status)
    one = msgspec.convert(document, Tenant)
    if causes := TENANT.check(one):
        return invalid("; ".join(f"{cause.field}: {cause.message}" for cause in causes), *_listed(causes))
    return changed_draft(TENANT, tenant, one, spec_changed=True, keep_charge=True)


def _listed(causes: list[Cause]) -> tuple[Cause, ...]:
    return tuple(causes[:50])
