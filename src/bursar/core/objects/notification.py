"""Notifications: events for webhooks, committed with the change that caused them (a transactional outbox)."""

from __future__ import annotations

from msgspec import Struct


class Notification(Struct, frozen=True):
    """An event for webhooks before it has a number and receivers; bridges/webhook.py delivers it."""

    type: str  # such as budget.warning
    tenant: str  # whose webhooks receive it
    subject: str  # the object that it is about
    data: bytes  # a JSON object
