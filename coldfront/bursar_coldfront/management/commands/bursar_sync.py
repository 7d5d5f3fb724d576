"""`coldfront bursar_sync`: compare every allocation with Bursar, and correct the differences."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from bursar_coldfront.models import mark
from bursar_coldfront.push import client, differences, push_due


class Command(BaseCommand):
    help = "Compare all allocations with Bursar; --apply corrects the differences."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--apply", action="store_true", help="send the allocations that differ")

    def handle(self, *_: Any, **options: Any) -> None:
        with client() as bursar:
            found = list(differences(bursar))
        for allocation, said in found:
            self.stdout.write(f"allocation {allocation.pk} ({allocation.project.title}): {said}")
        if not found:
            self.stdout.write("Bursar has what ColdFront says.")
            return
        if not options["apply"]:
            self.stdout.write(f"{len(found)} allocations differ. To correct them: coldfront bursar_sync --apply")
            return
        for allocation, _said in found:
            mark(allocation.pk, allocation.project_id)
        sent, failed = push_due(limit=len(found) + 100)
        self.stdout.write(f"{sent} allocations sent, {failed} failed and are tried again")
