"""How refusals for quota read: the words that users, their scripts and their support tickets rely on."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.core.quota.quota import Exceeded
from bursar.core.quota.visibility import ABOVE, Sees, everything, told
from bursar.core.values.quantity import format_amount
from bursar.core.values.refusal import Cause, Code, Refusal

# Names that Kubernetes knows; every other plain word is a limit of the platform and is printed with its `max_`.
_KUBERNETES = frozenset(
    {
        "cpu",
        "memory",
        "storage",
        "ephemeral-storage",
        "pods",
        "services",
        "persistentvolumeclaims",
        "secrets",
        "configmaps",
    }
)
_PRINTED = {"allocations": "max_concurrent_allocations"}

_WAIT = "Wait for running allocations to complete, or contact your tenant admin."
_ASK = "Delete something that is no longer needed, ask for less, or ask {} for a higher limit."


def dimension_label(dimension: str) -> str:
    """`nodes` → `max_nodes`; resources keep their full name."""
    if dimension in _KUBERNETES or "/" in dimension or "." in dimension or "-" in dimension:
        return dimension
    return _PRINTED.get(dimension, f"max_{dimension}")


def dimension_of(label: str) -> str:
    """`max_nodes` → `nodes`: the name under which a limit is stored."""
    stored = {printed: dimension for dimension, printed in _PRINTED.items()}
    return stored.get(label, label.removeprefix("max_"))


def quota_refusal(subject: str, exceeded: Sequence[Exceeded], sees: Sees = everything) -> Refusal:
    """The first limit speaks; all of them are causes. Who does not see a scope is not told its figures."""
    exceeded = told(exceeded, sees)
    first = exceeded[0]
    # Quotas of a namespace are the tenant's own; its limits, and those above it, are set by the system's admins.
    whom = "your tenant admin" if first.scope.startswith("quota:") else "a system admin"
    hint = _WAIT if first.used > first.limit and first.scope != ABOVE else _ASK.format(whom)
    return Refusal(
        Code.QUOTA_EXCEEDED,
        _message(subject, first),
        hint,
        tuple(_cause(subject, fault) for fault in exceeded),
    )


def _cause(subject: str, fault: Exceeded) -> Cause:
    if fault.scope == ABOVE:
        return Cause(
            reason="QuotaExceeded",
            message=_message(subject, fault),
            field=dimension_label(fault.dimension),
            dimension=dimension_label(fault.dimension),
            requested_delta=format_amount(fault.dimension, fault.requested),
        )
    return Cause(
        reason="QuotaExceeded",
        message=_message(subject, fault),
        field=dimension_label(fault.dimension),
        dimension=dimension_label(fault.dimension),
        scope=fault.scope,
        limit=format_amount(fault.dimension, fault.limit),
        current_usage=format_amount(fault.dimension, fault.used),
        requested_delta=format_amount(fault.dimension, fault.requested),
    )


def _message(subject: str, fault: Exceeded) -> str:
    label = dimension_label(fault.dimension)
    if fault.scope == ABOVE:
        asked = format_amount(fault.dimension, fault.requested)
        return f"{subject} rejected: a limit above this tenant has no room for it: {label} quota (requested: {asked})"
    used, asked, limit = (format_amount(fault.dimension, value) for value in (fault.used, fault.requested, fault.limit))
    kind, _, name = fault.scope.partition(":")
    if kind == "quota":
        return f"exceeded quota: {label} limit {limit}, requested {asked}, used {used}"
    owner = f'tenant "{name}"' if kind == "tenant" else "the system"
    if fault.used > fault.limit:
        return (
            f"{subject} rejected: {owner} exceeds {label} quota\n"
            f"  Current usage: {used} {fault.dimension}\n"
            f"  New limit: {limit} {fault.dimension}\n"
            f"  Hint: {_WAIT}"
        )
    return (
        f"{subject} rejected: {owner} would exceed {label} quota (current: {used}, requested: {asked}, limit: {limit})"
    )
