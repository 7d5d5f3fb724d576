"""What people outside are told: committed with what it tells of, and sent to those who asked (bridges/webhook.py)."""

from __future__ import annotations

from msgspec import Struct


class Tiding(Struct, frozen=True):
    type: str
    tenant: str
    subject: str
    data: bytes  # a JSON object
