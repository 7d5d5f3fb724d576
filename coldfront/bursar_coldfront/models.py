"""The outbox: one row per allocation, with a number that grows with every change of it.

A change commits together with the higher number. The pusher sends the whole wanted state under the number that it read,
and notes it as sent; Bursar keeps the highest number per object and ignores older ones.
"""

from __future__ import annotations

from django.db import models
from django.db.models import F


class Outbox(models.Model):
    allocation_pk = models.IntegerField(unique=True)
    project_pk = models.IntegerField()
    number = models.BigIntegerField(default=1)
    sent = models.BigIntegerField(default=0)
    tries = models.IntegerField(default=0)
    next_try = models.DateTimeField(null=True)
    error = models.TextField(default="", blank=True)
    changed = models.DateTimeField(auto_now=True)

    class Meta:
        verbose_name_plural = "outbox"

    def __str__(self) -> str:
        return f"allocation {self.allocation_pk}: {self.sent} of {self.number} sent"


def mark(allocation_pk: int, project_pk: int) -> None:
    """Note that an allocation changed. It touches this database only."""
    there = Outbox.objects.filter(allocation_pk=allocation_pk)
    if not there.update(number=F("number") + 1, tries=0, next_try=None):
        _, created = Outbox.objects.get_or_create(allocation_pk=allocation_pk, defaults={"project_pk": project_pk})
        if not created:
            there.update(number=F("number") + 1, tries=0, next_try=None)
