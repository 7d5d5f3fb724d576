"""The task for django-q2: send what is due. Schedule it every minute, or run `coldfront bursar_push --watch`."""

from __future__ import annotations

from bursar_coldfront.push import push_due


def push() -> str:
    sent, failed = push_due()
    return f"{sent} sent, {failed} failed"
