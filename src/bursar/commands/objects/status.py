"""Stored statuses: decode them, and set and drop their conditions."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.commands.command import Written
from bursar.core.objects.object import Stored

_decode_status = msgspec.json.Decoder(dict[str, Any]).decode


def status_of(one: Stored) -> dict[str, Any]:
    return _decode_status(one.status)


def unchanged(one: Stored) -> Written:
    return Written(one.key, one.doc, one.status, one.revision)


def set_condition(status: dict[str, Any], name: str, value: str, reason: str, message: str, at: str) -> None:
    """Set a condition; its transition time moves only when its value does."""
    condition = {"type": name, "status": value, "reason": reason, "lastTransitionTime": at}
    if message:
        condition["message"] = message
    conditions = []
    for one in status.get("conditions", ()):
        if one["type"] != name:
            conditions.append(one)
        elif one["status"] == value:
            condition["lastTransitionTime"] = one.get("lastTransitionTime", at)
    status["conditions"] = [*conditions, condition]


def drop_conditions(status: dict[str, Any], *names: str) -> None:
    status["conditions"] = [one for one in status.get("conditions", ()) if one["type"] not in names]
