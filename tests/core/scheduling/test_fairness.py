"""Fairness over time: under contention every tenant ends up with its share, however long others have waited."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest

from bursar.core.scheduling.cycle.fair_queue import PROFILES, Factors, FairQueue, score, waiting_factor
from bursar.core.scheduling.state.fair_share import ShareOf, Shares

DAY = 86_400


@dataclass
class Pool:
    """A cluster of 400 GPUs with jobs of one to four GPUs that end at random; the backlog never ends."""

    tenants: Mapping[str, ShareOf]
    waits: Mapping[str, float]  # for how long each tenant's backlog has waited
    size: int = 400
    running: list[tuple[str, int]] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(7))

    def held(self) -> dict[str, int]:
        found = dict.fromkeys(self.waits, 0)
        for tenant, gpus in self.running:
            found[tenant] += gpus
        return found

    def tick(self) -> None:
        self.running = [job for job in self.running if self.random.random() > 0.05]
        held = self.held()
        free = self.size - sum(held.values())
        used = {tenant: {"gpu": gpus} for tenant, gpus in held.items()}
        shares = Shares(self.tenants, {"gpu": self.size}, used, list(self.waits))
        line: FairQueue[tuple[str, int]] = FairQueue(shares)
        for tenant, wait in self.waits.items():
            for number in range(free):
                factors = Factors(0.5, waiting_factor(wait), shares.deficit(tenant), 0.5, 0.5, 0.5, 0.5, 0.5, 1.0)
                job = (tenant, self.random.randint(1, 4))
                line.push(tenant, score(PROFILES["default"], factors), f"{number:04}", job)
        while (taken := line.pop()) and taken[1] <= free:
            self.running.append(taken)
            shares.add(taken[0], [("gpu", taken[1])])
            free -= taken[1]

    def average(self, ticks: int = 150) -> dict[str, float]:
        """What each held of what all held, after the first fill has been forgotten."""
        total = dict.fromkeys(self.waits, 0)
        for number in range(ticks):
            self.tick()
            if number >= 50:
                for tenant, gpus in self.held().items():
                    total[tenant] += gpus
        return {tenant: held / sum(total.values()) for tenant, held in total.items()}


def weighted(**weights: float) -> dict[str, ShareOf]:
    return {name: ShareOf(name, weight=weight) for name, weight in weights.items()}


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param({"a": 60, "b": 60, "c": 60}, id="all have waited equally long"),
        pytest.param({"a": 60, "b": 3600, "c": 30 * DAY}, id="the smallest has waited longest"),
        pytest.param({"a": 30 * DAY, "b": 0, "c": 60}, id="the largest has waited longest"),
    ],
)
def test_under_contention_everybody_gets_its_share(waits: dict[str, float]) -> None:
    held = Pool(weighted(a=50, b=30, c=20), waits).average()
    assert held == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, rel=0.05)


def test_explicit_targets_are_kept_as_well_as_weights() -> None:
    tenants = {"a": ShareOf("a", target=0.5), "b": ShareOf("b", target=0.3), "c": ShareOf("c")}
    held = Pool(tenants, {"a": 0, "b": 60, "c": 30 * DAY}).average()
    assert held == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, rel=0.05)


def test_shares_hold_at_every_level_of_the_tree() -> None:
    tenants = {
        **weighted(x=50, y=50),
        "x1": ShareOf("x1", "x", weight=70),
        "x2": ShareOf("x2", "x", weight=30),
        "y1": ShareOf("y1", "y", weight=30),
        "y2": ShareOf("y2", "y", weight=70),
    }
    held = Pool(tenants, {"x1": 0, "x2": 30 * DAY, "y1": 60, "y2": 3600}).average()
    assert held == pytest.approx({"x1": 0.35, "x2": 0.15, "y1": 0.15, "y2": 0.35}, rel=0.05)


def test_the_share_of_an_idle_tenant_is_divided_among_the_rest() -> None:
    held = Pool(weighted(a=50, b=30, c=20), {"b": 0, "c": 30 * DAY}).average()
    assert held == pytest.approx({"b": 0.6, "c": 0.4}, rel=0.05)


def test_the_share_of_an_idle_child_stays_in_its_family() -> None:
    tenants = {**weighted(x=50, y=50), "x1": ShareOf("x1", "x", weight=70), "x2": ShareOf("x2", "x", weight=30)}
    held = Pool(tenants, {"x2": 30 * DAY, "y": 0}).average()
    assert held == pytest.approx({"x2": 0.5, "y": 0.5}, rel=0.05)


def test_a_burst_allowance_takes_nothing_from_others_while_they_want_it() -> None:
    tenants = {"a": ShareOf("a", target=0.5, burst=3.0), "b": ShareOf("b", target=0.5)}
    held = Pool(tenants, {"a": 30 * DAY, "b": 0}).average()
    assert held == pytest.approx({"a": 0.5, "b": 0.5}, rel=0.05)
