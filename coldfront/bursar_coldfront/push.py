"""Sending the wanted state to Bursar: repeatable, in any order, with older states ignored.

Each object carries the number of the state that it was written from. A write names the version that was read, so of two
pushers one is told of a conflict and reads again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from coldfront.core.allocation.models import Allocation
from coldfront.core.project.models import Project
from django.db.models import F, Q, Sum
from django.utils import timezone

from bursar.client import BursarError, Client, Conflict, NotFound
from bursar.core.values.quantity import amount, format_amount
from bursar_coldfront.mapping import MappingError
from bursar_coldfront.models import Outbox
from bursar_coldfront.wanted import Wanted, is_governed, setting, wanted_gone, wanted_of

log = logging.getLogger(__name__)

NUMBER = "bursar.io/coldfront-number"
OWNED = "bursar.io/coldfront"  # the label of objects that the plugin made
QUOTA = "coldfront"
TRIES = 10
WAIT_SECONDS_MAX = 600

Document = dict[str, Any]


def client() -> Client:
    return Client(setting("URL"), token=setting("TOKEN"))


def push_due(limit: int = 100) -> tuple[int, int]:
    """Send the allocations that are due; return how many were sent, and how many failed and are tried again later."""
    now = timezone.now()
    due = Outbox.objects.filter(sent__lt=F("number")).filter(Q(next_try=None) | Q(next_try__lte=now))
    sent = failed = 0
    with client() as bursar:
        for row in due.order_by("changed")[:limit]:
            try:
                push(bursar, wanted_for(row))
            except (BursarError, MappingError) as error:
                failed += 1
                wait = min(WAIT_SECONDS_MAX, 2 ** min(row.tries, 10))
                Outbox.objects.filter(pk=row.pk, number=row.number).update(
                    tries=F("tries") + 1, next_try=now + timedelta(seconds=wait), error=str(error)[:2000]
                )
                log.warning("allocation %s was not sent, again in %s s: %s", row.allocation_pk, wait, error)
            else:
                sent += 1
                Outbox.objects.filter(pk=row.pk, sent__lt=row.number).update(sent=row.number, tries=0, error="")
    return sent, failed


def wanted_for(row: Outbox) -> Wanted:
    """The wanted state for a row. Its number is read before the state, so the state is at least as new."""
    total = Outbox.objects.filter(project_pk=row.project_pk).aggregate(total=Sum("number"))["total"] or 0
    allocation = Allocation.objects.filter(pk=row.allocation_pk).first()
    if allocation is not None:
        return wanted_of(allocation, row.number, total)
    project = Project.objects.filter(pk=row.project_pk).first()
    return wanted_gone(project, row.project_pk, row.allocation_pk, row.number, total)


def push(bursar: Client, wanted: Wanted) -> None:
    """Make Bursar's objects as wanted."""
    put(bursar.tenants, wanted.tenant, wanted.project_number, lambda before: _tenant(wanted, before))
    push_members(bursar, wanted)
    if wanted.quota is None:
        _delete(bursar.namespaces, wanted.namespace)
        return
    quota = wanted.quota
    put(bursar.namespaces, wanted.namespace, wanted.number, lambda before: _namespace(wanted, before))
    quotas = bursar.resourcequotas(wanted.namespace)
    put(quotas, QUOTA, wanted.number, lambda before: _quota(quota, before))


def push_members(bursar: Client, wanted: Wanted) -> None:
    """Add and remove the members of the tenant. Members that somebody else added stay."""
    there = {one["spec"]["user"]: one for one in members(bursar, wanted.tenant)}
    for user, role in wanted.members.items():
        spec = {"tenant": wanted.tenant, "user": user, "role": role}
        name = there[user]["metadata"]["name"] if user in there else ""
        put(bursar.members, name, wanted.project_number, lambda _, spec=spec: {"spec": spec})
    for user, one in there.items():
        ours = one["metadata"].get("labels", {}).get(OWNED) == "true"
        if user not in wanted.members and ours and _number(one) <= wanted.project_number:
            _delete(bursar.members, one["metadata"]["name"])


def members(bursar: Client, tenant: str) -> list[Document]:
    return list(bursar.members.list(field_selector=f"spec.tenant={tenant}"))


def _tenant(wanted: Wanted, before: Document | None) -> Document:
    spec = dict((before or {}).get("spec") or {})
    spec |= {"limits": wanted.limits, "displayName": wanted.display_name}
    if parent := setting("PARENT", ""):
        spec["parent"] = parent
    return {"spec": spec}


def _namespace(wanted: Wanted, before: Document | None) -> Document:
    labels = {"bursar.io/tenant": wanted.tenant, "bursar.io/quota-required": "true"}
    return {"labels": labels, "spec": (before or {}).get("spec") or {}}


def _quota(hard: dict[str, str], _: Document | None) -> Document:
    return {"spec": {"hard": hard}}


def put(resource: Any, name: str, number: int, make: Callable[[Document | None], Document]) -> bool:
    """Create or replace an object, unless it was written from a newer state; return whether it was written. Without a
    name it is created, and the server names it."""
    for _ in range(TRIES):
        before = _found(resource, name) if name else None
        if before is not None and _number(before) > number:
            return False
        after = _marked(name, number, before, make(before))
        if before is not None and _same(before, after):
            return False
        try:
            if before is None:
                resource.create(after)
            else:
                resource.replace(after)
        except Conflict:
            continue  # Somebody wrote it meanwhile.
        return True
    raise PushFailed(f"{name} was changed again and again meanwhile")


class PushFailed(BursarError):
    """An object could not be written."""


def _marked(name: str, number: int, before: Document | None, wanted: Document) -> Document:
    was = (before or {}).get("metadata", {})
    metadata: Document = {
        **({"name": name} if name else {}),
        "labels": {**was.get("labels", {}), OWNED: "true", **wanted.get("labels", {})},
        "annotations": {**was.get("annotations", {}), NUMBER: str(number)},
    }
    if before is not None:
        metadata["resourceVersion"] = was["resourceVersion"]
    return {"metadata": metadata, "spec": wanted["spec"]}


def _same(before: Document, after: Document) -> bool:
    """Whether an object is as wanted already, number included."""
    was = before["metadata"]
    kept = all(was.get("labels", {}).get(name) == value for name, value in after["metadata"]["labels"].items())
    return kept and _number(before) == _number(after) and (before.get("spec") or {}) == after["spec"]


def _number(document: Document) -> int:
    said = document["metadata"].get("annotations", {}).get(NUMBER, "0")
    return int(said) if said.isdigit() else 0


def _delete(resource: Any, name: str) -> None:
    try:
        resource.delete(name)
    except NotFound:
        return


def differences(bursar: Client) -> Iterator[tuple[Allocation, str]]:
    """The allocations whose state in Bursar is not the wanted one, with the first difference."""
    for allocation in Allocation.objects.all():
        row = Outbox.objects.filter(allocation_pk=allocation.pk).first()
        if row is None and not is_governed(allocation):
            continue
        wanted = wanted_of(allocation, row.number if row else 1, 1)
        if said := difference(bursar, wanted):
            yield allocation, said


def difference(bursar: Client, wanted: Wanted) -> str:
    """How Bursar's state differs from the wanted one; empty if it does not."""
    tenant = _found(bursar.tenants, wanted.tenant)
    if tenant is None:
        return f"tenant {wanted.tenant} is missing"
    if (limits := (tenant.get("spec") or {}).get("limits", {})) != wanted.limits:
        return f"tenant {wanted.tenant} has limits {limits}, wanted {wanted.limits}"
    there = _found(bursar.namespaces, wanted.namespace)
    if wanted.quota is None:
        return "" if there is None else f"namespace {wanted.namespace} is still there"
    quota = _found(bursar.resourcequotas(wanted.namespace), QUOTA) if there is not None else None
    if quota is None:
        return f"namespace {wanted.namespace} or its quota is missing"
    hard = (quota.get("spec") or {}).get("hard", {})
    if hard != canonical(wanted.quota):
        return f"namespace {wanted.namespace} has {hard}, wanted {wanted.quota}"
    found = {one["spec"]["user"]: one["spec"]["role"] for one in members(bursar, wanted.tenant)}
    return "" if found == wanted.members else f"tenant {wanted.tenant} has members {found}, wanted {wanted.members}"


def canonical(quota: dict[str, str]) -> dict[str, str]:
    return {dimension: format_amount(dimension, amount(dimension, value)) for dimension, value in quota.items()}


def _found(resource: Any, name: str) -> Document | None:
    try:
        found: Document = resource.get(name)
    except NotFound:
        return None
    return found
