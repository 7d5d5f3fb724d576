"""What fits by exhaustive search is placed, and what does not is not: thousands of tiny clusters."""

import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, InterPodTerm, Spread, Taint, Toleration, Where
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.scheduling.state.cluster_state import ClusterState
from support.scheduling.cluster_states import HOST, NOW, RACK, Machine, ask, cluster_of, labelled, machine, run, submit
from support.scheduling.oracle import PARTS, Box, Slot, fits, occupy

SOAK = bool(os.environ.get("BURSAR_SOAK"))
SEEDS = 8
CASES = 1500 if SOAK else 80  # of each seed

POLICY = SchedulingPolicy(preemption=False, backfill=False)


class Case:
    """One tiny cluster, built twice: for the scheduler and for the oracle."""

    def __init__(self, random: Random, boxes_max: int = 4) -> None:
        self.random = random
        self.machines: list[Machine] = []
        self.boxes: list[Box] = []
        for name in "abcd"[: random.randint(1, boxes_max)]:
            self._box(name)
        self.cluster: ClusterState = cluster_of(*self.machines)
        self.asks: list[Ask] = []
        self.slots: list[Slot] = []
        for number in range(random.randint(0, 3)):
            self._resident(f"old{number}")

    def _box(self, name: str) -> None:
        random = self.random
        gpus, cpu = random.randint(0, 3), random.randint(1, 4)
        labels: dict[str, Any] = {"disk": "ssd"} if random.random() < 0.5 else {}
        rack = random.choice(["", "r1", "r2"])
        taint = "k" if random.random() < 0.15 else ""
        cordoned = random.random() < 0.05
        taints = (Taint(taint),) if taint else ()
        self.machines.append(
            machine(name, gpus=gpus, cpu=cpu, rack=rack, cordoned=cordoned, taints=taints, **labels)
        )  # fmt: skip
        where = {HOST: name, **labels, **({RACK: rack} if rack else {})}
        self.boxes.append(Box(name, {"cpu": cpu * PARTS}, [PARTS] * gpus, where, taint, not cordoned))

    def _resident(self, uid: str) -> None:
        """Work that is placed already on some node with capacity, whatever it would have asked for."""
        random = self.random
        box = random.choice(self.boxes)
        gpu = random.choice([0, 300, 500, 1000])
        slot = self.slot(uid, gpu, 0, constrained=random.random() < 0.3)
        free = [number for number, left in enumerate(box.gpus) if left >= gpu]
        if gpu and not free:
            return
        devices = (random.choice(free),) if gpu else ()
        occupy(box, slot, devices)
        run(self.cluster, self._ask(uid, [slot]), box.name, devices=devices or None)

    def slot(self, uid: str, gpu: int, cpu: int, *, whole: bool = False, constrained: bool = False) -> Slot:
        random = self.random
        slot: Slot = {
            "id": uid,
            "unit": uid,
            "gpu": gpu,
            "cpu": cpu,
            "whole": whole,
            "app": random.choice(["", "x", "y"]),
        }
        if constrained:
            key, app = random.choice([HOST, RACK]), random.choice(["x", "y"])
            match random.randint(0, 4):
                case 0:
                    slot["select"] = {"disk": "ssd"}
                case 1:
                    slot["tolerates"] = ("k",)
                case 2:
                    slot["near"] = (key, app)
                case 3:
                    slot["apart"] = (key, app)
                case 4:
                    slot["spread"] = (key, app, random.randint(1, 2))
        return slot

    def _ask(self, uid: str, slots: list[Slot], gang: Gang | None = None) -> Ask:
        slot = slots[0]
        where = Where(
            node_labels=tuple(slot.get("select", {}).items()),
            tolerations=tuple(Toleration(key, exists=True) for key in slot.get("tolerates", ())),
            near=tuple(InterPodTerm(key, labelled(app=app)) for key, app in [slot["near"]]) if "near" in slot else (),
            apart=tuple(InterPodTerm(key, labelled(app=app)) for key, app in [slot["apart"]])
            if "apart" in slot
            else (),
            spreads=tuple(Spread(key, skew, selector=labelled(app=app)) for key, app, skew in [slot["spread"]])
            if "spread" in slot
            else (),
        )
        return ask(
            uid, gpus=slot["gpu"] / PARTS, cpu=slot["cpu"] / PARTS, nodes=len(slots), exclusive=slot["whole"],
            where=where, labels={"app": slot["app"]} if slot["app"] else {}, gang=gang,
        )  # fmt: skip

    def want(self, uid: str, slot: Slot, nodes: int = 1, gang: Gang | None = None) -> None:
        slots = [dict(slot, id=f"{uid}{number}", unit=uid) for number in range(nodes)]
        self.slots.extend(slots)
        self.asks.append(self._ask(uid, slots, gang))

    def amounts(self) -> tuple[int, int]:
        return self.random.choice([0, 250, 400, 500, 600, 1000, 1000, 2000]), self.random.choice([0, 500, 1000, 2000])

    def agrees(self) -> bool:
        """Whether the scheduler and the oracle come to the same answer."""
        submit(self.cluster, *self.asks)
        expected = fits(self.boxes, self.slots)
        self.placed = len(decide(self.cluster, POLICY, NOW).bindings) == 1
        return expected == self.placed

    def told(self) -> str:
        return f"placed: {self.placed}\nboxes: {self.boxes}\nslots: {self.slots}"


def alone(case: Case) -> None:
    """One allocation, on one node or on several, whole ones or parts, with a constraint or without."""
    whole = case.random.random() < 0.2
    case.want("u", case.slot("u", *case.amounts(), whole=whole, constrained=case.random.random() < 0.7))


def several_nodes(case: Case) -> None:
    whole = case.random.random() < 0.3
    slot = case.slot("u", *case.amounts(), whole=whole, constrained=case.random.random() < 0.4)
    case.want("u", slot, case.random.randint(2, 3))


def gang_of_equals(case: Case) -> None:
    count = case.random.randint(2, 4)
    whole = case.random.random() < 0.2
    slot = case.slot("u", *case.amounts(), whole=whole, constrained=case.random.random() < 0.5)
    for number in range(count):
        case.want(f"u{number}", slot, gang=Gang("g", count))


def gang_of_different(case: Case) -> None:
    count = case.random.randint(2, 4)
    for number in range(count):
        whole = case.random.random() < 0.15
        slot = case.slot("u", *case.amounts(), whole=whole, constrained=case.random.random() < 0.4)
        case.want(f"u{number}", slot, gang=Gang("g", count))


def gang_of_parts(case: Case) -> None:
    """Parts of devices, which must be distributed over them with care."""
    count = case.random.randint(3, 4)
    for number in range(count):
        slot = case.slot("u", case.random.choice([200, 300, 400, 500, 600, 700, 1000]), 0)
        case.want(f"u{number}", slot, gang=Gang("g", count))


def gang_over_several_nodes(case: Case) -> None:
    """Two that want two different nodes each, alike or not, and perhaps a third that wants one."""
    slots = [case.slot("u", *case.amounts()), case.slot("u", *case.amounts())]
    alike = case.random.random() < 0.6
    third = case.random.random() < 0.5
    for number in range(2):
        case.want(f"u{number}", slots[0] if alike else slots[number], 2, gang=Gang("g", 2 + third))
    if third:
        case.want("u2", case.slot("u", 500, 500), gang=Gang("g", 3))


KINDS = [alone, several_nodes, gang_of_equals, gang_of_different, gang_of_parts, gang_over_several_nodes]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_fits_by_exhaustive_search_is_placed_and_nothing_else(kind: Callable[[Case], None], seed: int) -> None:
    random = Random(f"{kind.__name__}{seed}")
    both = {True: 0, False: 0}
    for number in range(CASES):
        case = Case(random, boxes_max=4 if kind is alone else 3)
        kind(case)
        assert case.agrees(), f"case {number}\n{case.told()}"
        both[case.placed] += 1
    assert min(both.values()) > CASES // 20, "both answers must occur, else the cases prove nothing"
