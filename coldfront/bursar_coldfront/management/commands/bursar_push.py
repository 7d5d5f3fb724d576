"""`coldfront bursar_push`: send the allocations that have changed to Bursar."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from bursar_coldfront.push import push_due


class Command(BaseCommand):
    help = "Send changed allocations to Bursar."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--watch", action="store_true", help="go on, and send changes as they come")
        parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks (default: 5)")

    def handle(self, *_: Any, **options: Any) -> None:
        while True:
            sent, failed = push_due()
            if sent or failed or not options["watch"]:
                self.stdout.write(f"{sent} allocations sent, {failed} failed and are tried again")
            if not options["watch"]:
                return
            time.sleep(options["every"])
