"""An oracle for tiny clusters: whether something fits, found by trying everything.

It shares no rule with the scheduler: plain dictionaries, and every way of giving slots to nodes and devices. With pod
affinity, something fits if there is an order in which each slot may legally come to its node at its time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

PARTS = 1000  # of a device


@dataclass
class Box:
    """A node: what is free, what is left of each GPU, its labels, and who is there."""

    name: str
    free: dict[str, int]
    gpus: list[int]
    labels: dict[str, str]
    taint: str = ""
    open: bool = True
    tenants: list[dict[str, Any]] = field(default_factory=list)


# A slot is a dictionary: cpu, gpu (in thousandths), whole (wants the node for itself), labels, unit (who must lie on
# different nodes), select, tolerates, near, apart, spread: the last three (topology key, value of the label `app`, …).
Slot = dict[str, Any]


def fits(boxes: list[Box], slots: list[Slot]) -> bool:
    if not slots:
        return True
    tried = set()
    for number, slot in enumerate(slots):
        kind = repr(sorted((key, repr(value)) for key, value in slot.items() if key not in ("id", "unit")))
        if kind in tried and all(other["unit"] != slot["unit"] for other in slots if other is not slot):
            continue
        tried.add(kind)
        rest = slots[:number] + slots[number + 1 :]
        for box in boxes:
            if _legal(boxes, box, slot):
                for devices in _devices(box, slot):
                    _come(box, slot, devices)
                    found = fits(boxes, rest)
                    _go(box, slot, devices)
                    if found:
                        return True
        if not any(_cares(one) for one in slots):
            return False  # without pod affinity the order makes no difference
    return False


def _cares(slot: Slot) -> bool:
    return bool(slot.get("near") or slot.get("apart") or slot.get("spread"))


def _legal(boxes: list[Box], box: Box, slot: Slot) -> bool:
    if not box.open or any(one["unit"] == slot["unit"] for one in box.tenants):
        return False
    if any(one["whole"] for one in box.tenants) or (slot["whole"] and box.tenants):
        return False
    if any(box.labels.get(key) != value for key, value in slot.get("select", {}).items()):
        return False
    if box.taint and box.taint not in slot.get("tolerates", ()):
        return False
    if box.free["cpu"] < slot["cpu"]:
        return False
    if slot["gpu"] >= PARTS and sum(left == PARTS for left in box.gpus) < slot["gpu"] // PARTS:
        return False
    return _near(boxes, box, slot) and _apart(boxes, box, slot) and _spread(boxes, box, slot)


def _domain(boxes: list[Box], box: Box, key: str) -> list[Box]:
    return [one for one in boxes if one.labels.get(key) == box.labels[key]]


def _count(boxes: list[Box], app: str) -> int:
    return sum(one["app"] == app for box in boxes for one in box.tenants)


def _near(boxes: list[Box], box: Box, slot: Slot) -> bool:
    if not slot.get("near"):
        return True
    key, app = slot["near"]
    if key not in box.labels:
        return False
    if _count(_domain(boxes, box, key), app):
        return True
    return slot["app"] == app and not _count([one for one in boxes if key in one.labels], app)


def _apart(boxes: list[Box], box: Box, slot: Slot) -> bool:
    if slot.get("apart"):
        key, app = slot["apart"]
        if key in box.labels and _count(_domain(boxes, box, key), app):
            return False
    for other in boxes:
        for one in other.tenants:
            if one.get("apart"):
                key, app = one["apart"]
                same = key in box.labels and other.labels.get(key) == box.labels[key]
                if same and slot["app"] == app:
                    return False
    return True


def _spread(boxes: list[Box], box: Box, slot: Slot) -> bool:
    if not slot.get("spread"):
        return True
    key, app, skew = slot["spread"]
    if key not in box.labels:
        return False
    eligible = [
        one
        for one in boxes
        if key in one.labels and all(one.labels.get(name) == value for name, value in slot.get("select", {}).items())
    ]
    least = min(_count(_domain(boxes, one, key), app) for one in eligible)
    more = 1 if slot["app"] == app else 0
    return bool(_count(_domain(boxes, box, key), app) + more - least <= skew)


def _devices(box: Box, slot: Slot) -> Iterator[tuple[int, ...]]:
    if slot["whole"]:
        if len(box.gpus) * PARTS >= slot["gpu"]:
            yield ()
    elif not slot["gpu"]:
        yield ()
    elif slot["gpu"] < PARTS:
        for number, left in enumerate(box.gpus):
            if left >= slot["gpu"]:
                yield (number,)
    else:
        whole = [number for number, left in enumerate(box.gpus) if left == PARTS]
        yield from combinations(whole, slot["gpu"] // PARTS)


def _come(box: Box, slot: Slot, devices: tuple[int, ...]) -> None:
    box.tenants.append(slot)
    if not slot["whole"]:
        box.free["cpu"] -= slot["cpu"]
        for number in devices:
            box.gpus[number] -= min(slot["gpu"], PARTS)


def _go(box: Box, slot: Slot, devices: tuple[int, ...]) -> None:
    box.tenants.remove(slot)
    if not slot["whole"]:
        box.free["cpu"] += slot["cpu"]
        for number in devices:
            box.gpus[number] += min(slot["gpu"], PARTS)


def occupy(box: Box, slot: Slot, devices: tuple[int, ...]) -> None:
    """Somebody is there already."""
    _come(box, slot, devices)
