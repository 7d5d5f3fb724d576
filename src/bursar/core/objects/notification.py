"""What people outside are told: committed with what it tells of, and sent to those who asked (bridges/webhook.py)."""

from __future__ import annotations

from msgspec import Struct


class Notification(Struct, frozen=True):
    """A notice before it has a number and receivers."""

    type: str  # such as budget.warning
    tenant: str  # whose people may hear of it
    subject: str  # what it is about
    data: bytes  # a JSON object
