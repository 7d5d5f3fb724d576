"""Receivers of Django's signals: they write to the outbox and nothing else.

ColdFront's own signals miss expiry, edits of dates and edits in Django's admin site; `post_save` misses nothing.
ColdFront sends signals after the change is saved, outside of a transaction: an exception here would show its user an
error for a change that stands. So a failure is logged, and `coldfront bursar_sync` finds what was missed.
"""

from __future__ import annotations

import logging
from typing import Any

from coldfront.core.allocation.models import Allocation, AllocationAttribute, AllocationUser
from coldfront.core.project.models import Project, ProjectUser
from django.db.models.signals import post_delete, post_save
from django.dispatch import receiver

from bursar_coldfront.models import Outbox, mark
from bursar_coldfront.wanted import is_governed

log = logging.getLogger(__name__)


@receiver((post_save, post_delete), sender=Allocation)
def allocation_changed(instance: Allocation, **_: Any) -> None:
    _mark(instance)


@receiver((post_save, post_delete), sender=AllocationAttribute)
@receiver((post_save, post_delete), sender=AllocationUser)
def part_changed(instance: AllocationAttribute | AllocationUser, **_: Any) -> None:
    _mark(instance.allocation)


@receiver((post_save, post_delete), sender=ProjectUser)
def member_changed(instance: ProjectUser, **_: Any) -> None:
    """The role of a member in the project decides their role in the tenant."""
    _mark_project(instance.project)


@receiver(post_save, sender=Project)
def project_changed(instance: Project, **_: Any) -> None:
    _mark_project(instance)


def _mark_project(project: Project) -> None:
    try:
        for allocation in Allocation.objects.filter(project=project):
            _mark(allocation)
    except Exception:
        log.exception("the change of project %s was not noted; run: coldfront bursar_sync --apply", project.pk)


def _mark(allocation: Allocation) -> None:
    try:
        # A deleted allocation names no resource any more.
        if is_governed(allocation) or Outbox.objects.filter(allocation_pk=allocation.pk).exists():
            mark(allocation.pk, allocation.project_id)
    except Exception:
        log.exception("the change of allocation %s was not noted; run: coldfront bursar_sync --apply", allocation.pk)
