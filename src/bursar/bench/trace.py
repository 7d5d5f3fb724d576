"""`bursar bench trace`: GPU utilization of a cluster that a recorded workload fills.

The procedure is that of the paper "Beware of Fragmentation" (USENIX ATC 2023), so that its figures can be laid beside
ours: pods arrive in random order and never leave; each is placed at once or dropped for good. The nodes are a fleet as
the scheduler keeps it, and places are chosen by what it chooses with; nothing is known of a pod before it arrives.
"""

from __future__ import annotations

import csv
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bursar.bench.rivals import RIVALS, Rival
from bursar.core.nodes.node import WHOLE
from bursar.core.objects.ask import ANYWHERE, Operator, Requirement, Shape, Where
from bursar.core.scheduling.state.fleet import Fleet
from bursar.core.scheduling.state.node_filter import Floats, NodeFilters
from bursar.core.scheduling.state.node_scores import NO, NodeScoreCache
from bursar.core.scheduling.state.packing import ArrivalMix, TakenCapacity, choose_devices

GPU = "nvidia.com/gpu"
MODEL = "gpu-model"
MEBIBYTE = 1 << 20
DEMAND = 1.3  # pods arrive until they have asked for so many times the GPUs there are
REPORTED = (95, 100, 130)  # percent of the GPUs that were asked for by then
OURS = "fragmentation"
POLICIES = (OURS, *RIVALS)
ARRIVALS_MAX = 1_000_000  # of a seed; openb has about ten thousand
SEEDS_MAX = 1000


class TraceError(ValueError):
    """A workload that cannot be replayed; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Pod:
    shape: Shape
    gpu_milli: int  # of all its devices


@dataclass(frozen=True, slots=True)
class TraceNode:
    name: str
    allocatable: dict[str, int]
    labels: dict[str, str]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file whose rows cannot be read."""
    try:
        yield
    except KeyError as error:
        raise TraceError(f"{path} has no column {error}") from None
    except (TypeError, ValueError, csv.Error) as error:
        raise TraceError(f"{path} has a row that cannot be read: {error}") from None


def read_nodes(path: Path) -> list[TraceNode]:
    with _reading(path), path.open(newline="") as file:
        return [
            TraceNode(
                row["sn"],
                {
                    "cpu": int(row["cpu_milli"]),
                    "memory": int(row["memory_mib"]) * MEBIBYTE,
                    GPU: int(row["gpu"]) * WHOLE,
                },
                {MODEL: row["model"]},
            )
            for row in csv.DictReader(file)
        ]


def read_pods(path: Path) -> list[Pod]:
    """The pods by name: a seed shuffles the same list whatever the order in the file."""
    with _reading(path), path.open(newline="") as file:
        return [_pod(row) for row in sorted(csv.DictReader(file), key=lambda row: row["name"])]


def _pod(row: dict[str, str]) -> Pod:
    gpu_milli = int(row["num_gpu"]) * int(row["gpu_milli"] or 0)
    asked = {"cpu": int(row["cpu_milli"]), "memory": int(row["memory_mib"]) * MEBIBYTE, GPU: gpu_milli}
    if min(asked.values()) < 0:
        raise ValueError(f"pod {row['name']} asks for a negative amount")
    models = tuple(one for one in (row.get("gpu_spec") or "").split("|") if one)
    where = Where(required=((Requirement(MODEL, Operator.IN, models),),)) if models else ANYWHERE
    return Pod(Shape(tuple(sorted((name, amount) for name, amount in asked.items() if amount)), where=where), gpu_milli)


def require_arrivals(pods: Sequence[Pod], gpu_milli: int) -> None:
    """Refuse a workload that asks for too few GPUs to fill the cluster, because its arrivals would not end."""
    asked = sum(pod.gpu_milli for pod in pods)
    if gpu_milli <= 0:
        raise TraceError("the nodes have no GPUs")
    if asked <= 0:
        raise TraceError("the pods ask for no GPUs: they would never fill the cluster")
    if (count := DEMAND * gpu_milli * len(pods) / asked) > ARRIVALS_MAX:
        raise TraceError(f"about {count:,.0f} pods would have to arrive to fill the GPUs: at most {ARRIVALS_MAX:,} may")


def arrivals(pods: Sequence[Pod], gpu_milli: int, seed: int) -> list[Pod]:
    """The pods in random order, then random ones again, until enough has been asked for."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    order = list(pods)
    chance.shuffle(order)
    asked = sum(pod.gpu_milli for pod in order)
    while (pod := chance.choice(pods)) and asked + pod.gpu_milli <= DEMAND * gpu_milli:
        asked += pod.gpu_milli
        order.append(pod)
    return order


# Policies.


class TracePolicy(Protocol):
    def arrived(self, shape: Shape) -> None: ...

    def scores(self, shape: Shape) -> Floats: ...

    def devices(self, row: int, shape: Shape) -> TakenCapacity: ...

    def placed(self, row: int, shape: Shape) -> None: ...


class Ours:
    """The scheduler's own policy for an allocation without inter-pod affinity."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._arrival_mix = ArrivalMix()
        self._views = NodeScoreCache(fleet, self._arrival_mix, NodeFilters(fleet))

    def arrived(self, shape: Shape) -> None:
        self._arrival_mix.learn(shape)

    def scores(self, shape: Shape) -> Floats:
        return self._views.of(shape).score

    def devices(self, row: int, shape: Shape) -> TakenCapacity:
        return choose_devices(self._fleet, self._fleet.now, row, shape, self._arrival_mix)

    def placed(self, row: int, shape: Shape) -> None:
        """Do nothing: the fleet's columns hold all state."""


def policy_of(name: str, fleet: Fleet, seed: int) -> TracePolicy:
    if name == OURS:
        return Ours(fleet)
    chance = random.Random(seed)  # noqa: S311 - not a secret
    return Rival(RIVALS[name](fleet, chance), fleet)


# A replay.


@dataclass(slots=True)
class Replay:
    """One seed's run: the part of the GPUs in use, by the percentage of them asked for so far."""

    gpu_milli: int
    asked: int = 0
    used: int = 0
    dropped: int = 0
    by_percent: dict[int, list[float]] = field(default_factory=dict)

    def note(self) -> None:
        percent = round(100 * self.asked / self.gpu_milli)
        self.by_percent.setdefault(percent, []).append(round(100 * self.used / self.gpu_milli, 2))

    def allocated_at(self, percent: int) -> float | None:
        """The mean while so much had been asked for; a single large pod may step over a percentage, so look beside."""
        for percents in ((percent,), (percent - 1, percent + 1)):
            values = [value for one in percents for value in self.by_percent.get(one, ())]
            if values:
                return sum(values) / len(values)
        return None


def replay(machines: Sequence[TraceNode], order: Sequence[Pod], policy: str, seed: int) -> Replay:
    fleet = Fleet()
    # By name, so that the first of equals is always the same one.
    for machine in sorted(machines, key=lambda machine: machine.name):
        fleet.put(machine.name, machine.allocatable, labels=machine.labels)
    scoring = policy_of(policy, fleet, seed)
    run = Replay(sum(machine.allocatable[GPU] for machine in machines))
    for pod in order:
        _arrive(run, fleet, scoring, pod)
        run.note()
    return run


def _arrive(run: Replay, fleet: Fleet, policy: TracePolicy, pod: Pod) -> None:
    run.asked += pod.gpu_milli
    policy.arrived(pod.shape)
    scores = policy.scores(pod.shape)
    row = int(scores.argmax())
    if scores[row] == NO:
        run.dropped += 1
        return
    fleet.now.take(row, fleet.need(pod.shape), policy.devices(row, pod.shape))
    policy.placed(row, pod.shape)
    run.used += pod.gpu_milli


def run(*, nodes: Path, pods: Path, seeds: Sequence[int], policy: str, log: Callable[[str], None]) -> dict[str, Any]:
    machines, listed = read_nodes(nodes), read_pods(pods)
    gpu_milli = sum(machine.allocatable[GPU] for machine in machines)
    require_arrivals(listed, gpu_milli)
    per_seed: list[dict[str, Any]] = []
    decisions, started = 0, time.perf_counter()
    for seed in seeds:
        order = arrivals(listed, gpu_milli, seed)
        result = replay(machines, order, policy, seed)
        decisions += len(order)
        figures = {f"alloc_at_{percent}": _rounded(result.allocated_at(percent)) for percent in REPORTED}
        per_seed.append({"seed": seed, **figures, "arrived": len(order), "dropped": result.dropped})
        log(f"seed {seed}  " + "  ".join(f"{percent}%: {figures[f'alloc_at_{percent}']}" for percent in REPORTED))
    seconds = time.perf_counter() - started
    return {
        "bench": "trace",
        "format": "openb",
        "policy": policy,
        "nodes": len(machines),
        "gpus": gpu_milli // WHOLE,
        "pods": len(listed),
        "seeds": list(seeds),
        **{f"alloc_at_{percent}": _mean(one[f"alloc_at_{percent}"] for one in per_seed) for percent in REPORTED},
        "per_seed": per_seed,
        "decisions_per_s": round(decisions / seconds),
        "seconds": round(seconds, 1),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 2) if known else None


def parse_seeds(text: str) -> list[int]:
    """`42`, `42,44` or `42-51`."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise ValueError(f"{text!r} is not a list of seeds: write 42, or 42,44, or 42-51")
        if int(last) - int(first) >= SEEDS_MAX - len(seeds):
            raise ValueError(f"at most {SEEDS_MAX} seeds are replayed")
        seeds.extend(range(int(first), int(last) + 1))
    return seeds
