"""Messages of quota refusals. Users, their scripts and their support tickets rely on the exact wording."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.core.quota.quota import Exceeded
from bursar.core.quota.visibility import ABOVE, Sees, everything, visible
from bursar.core.values.quantity import amount, format_amount
from bursar.core.values.refusal import Cause, Code, Refusal

# Resource names of Kubernetes; every other plain word is a limit of Bursar and is printed with the prefix `max_`.
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

UNCOVERED = "namespace:"  # the scope of namespaces that require quotas

_WAIT = "Wait for running allocations to complete, or contact your tenant admin."
_ASK = "Delete objects that are no longer needed, request less, or ask {} for a higher limit."


def dimension_label(dimension: str) -> str:
    """The printed name of a dimension: `max_nodes` for `nodes`; resources keep their name."""
    if dimension in _KUBERNETES or "/" in dimension or "." in dimension or "-" in dimension:
        return dimension
    return _PRINTED.get(dimension, f"max_{dimension}")


def dimension_of(label: str) -> str:
    """The stored name of a printed dimension: `nodes` for `max_nodes`."""
    stored = {printed: dimension for dimension, printed in _PRINTED.items()}
    return stored.get(label, label.removeprefix("max_"))


def quota_refusal(subject: str, exceeded: Sequence[Exceeded], sees: Sees = everything) -> Refusal:
    """Refuse by the first exceeded limit, with all of them as causes. Figures of scopes that the caller does not see
    are left out."""
    exceeded = visible(exceeded, sees)
    first = exceeded[0]
    if first.scope.startswith(UNCOVERED):
        return _not_covered(subject, [one for one in exceeded if one.scope == first.scope])
    # Tenant admins set quotas of namespaces; system admins set limits of tenants and of the system.
    admin = "your tenant admin" if first.scope.startswith("quota:") else "a system admin"
    hint = _WAIT if first.used > first.limit and first.scope != ABOVE else _ASK.format(admin)
    return Refusal(
        Code.QUOTA_EXCEEDED,
        _message(subject, first),
        hint,
        tuple(_cause(subject, fault) for fault in exceeded),
    )


def _not_covered(subject: str, bare: Sequence[Exceeded]) -> Refusal:
    """Refuse amounts that no ResourceQuota covers, in a namespace that requires it."""
    namespace = bare[0].scope.removeprefix(UNCOVERED)
    named = ", ".join(dimension_label(one.dimension) for one in bare)
    message = f"{subject} rejected: namespace {namespace} requires a quota, and none covers {named}"
    causes = tuple(
        Cause(
            "QuotaRequired", f"no ResourceQuota of namespace {namespace} limits {dimension_label(one.dimension)}",
            field=dimension_label(one.dimension), dimension=dimension_label(one.dimension), scope=one.scope,
            requested_delta=format_amount(one.dimension, one.requested),
        )
        for one in bare
    )  # fmt: skip
    hint = "Request nothing else, or ask your tenant admin for a ResourceQuota with a hard limit on it."
    return Refusal(Code.QUOTA_EXCEEDED, message, hint, causes)


def headroom_text(refusal: Refusal, sees: Sees = everything) -> str:
    """The exceeded limits of a refusal as one line: by how much, and the numbers. Figures of scopes that the reader of
    the line does not see are left out."""
    if refusal.code is not Code.QUOTA_EXCEEDED:
        return refusal.message
    return "; ".join(_lacking(one, sees) for one in refusal.causes) or refusal.message


def _lacking(cause: Cause, sees: Sees) -> str:
    if cause.scope.startswith(UNCOVERED):
        return cause.message
    if not cause.limit or not sees(cause.scope):
        return f"a limit above this tenant has no headroom: {cause.dimension}, requested {cause.requested_delta}"
    dimension = dimension_of(cause.dimension)
    limit, used, asked = (amount(dimension, one) for one in (cause.limit, cause.current_usage, cause.requested_delta))
    over = format_amount(dimension, used + asked - limit)
    numbers = f"limit {cause.limit}, used {cause.current_usage}, requested {cause.requested_delta}"
    return f"would exceed {cause.dimension} by {over}: {numbers}"


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
        return f"{subject} rejected: a limit above this tenant has no headroom: {label} quota (requested: {asked})"
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
