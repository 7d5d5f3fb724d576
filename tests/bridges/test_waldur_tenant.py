"""Limits of a tenant of Waldur's while it is paused, downscaled, changed and opened again, in any order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.bridges.waldur_tenant import KEPT, SHUT, STATE, ResourceState, change, state_of, whole
from bursar.core.values.patch import merge

HELD: dict[ResourceState, dict[str, int]] = {
    ResourceState.OPEN: {},
    ResourceState.PAUSED: dict(SHUT),
    ResourceState.TERMINATED: dict(SHUT),
    ResourceState.DOWNSCALED: {"allocations": 1, "nodes": 2},
}
LIMITS = st.dictionaries(st.sampled_from(["allocations", "nodes", "gpu", "gpu_hours"]), st.integers(0, 50), max_size=3)


def tenant(limits: dict[str, int]) -> dict[str, Any]:
    spec = {"limits": {name: str(value) for name, value in limits.items()}, "weight": 2}
    return {"metadata": {"name": "physics", "resourceVersion": "7", "labels": {"a": "b"}}, "spec": spec}


@given(
    before=st.dictionaries(st.sampled_from(["allocations", "nodes", "cpu"]), st.integers(0, 50)),
    steps=st.lists(st.one_of(st.sampled_from(ResourceState), LIMITS), max_size=12),
)
def test_what_is_held_down_holds_and_what_was_agreed_comes_back(
    before: dict[str, int], steps: list[ResourceState | dict[str, int]]
) -> None:
    document: Any = tenant(before)
    agreed, budget, state = dict(before), None, ResourceState.OPEN
    for step in steps:
        wanted: dict[str, int] = {} if isinstance(step, ResourceState) else step
        state = step if isinstance(step, ResourceState) else state
        agreed.update({name: value for name, value in wanted.items() if name != "gpu_hours"})
        budget = wanted.get("gpu_hours", budget)
        document = merge(document, change(document, state=state, held=HELD[state], wanted=wanted))
        limits = {name: int(value) for name, value in document["spec"]["limits"].items()}
        assert limits == {**agreed, **HELD[state]}
        assert (state_of(document), document["spec"].get("gpuHoursBudget")) == (state, budget)
    document = merge(document, change(document, state=ResourceState.OPEN, held={}))
    assert {name: int(value) for name, value in document["spec"]["limits"].items()} == agreed
    assert {STATE, KEPT}.isdisjoint(document["metadata"].get("annotations") or {})
    assert (document["spec"]["weight"], document["metadata"]["labels"]) == (2, {"a": "b"})


def test_a_change_is_of_what_was_seen() -> None:
    assert change(tenant({}), state=ResourceState.OPEN, held={})["metadata"]["resourceVersion"] == "7"


@pytest.mark.parametrize(("value", "factor", "ours"), [(100, 0.29, 29), (3, 0.5, 1), (7, 1, 7), (1000, 0.0058, 5)])
def test_units_are_converted_without_losing_one_to_fractions(value: int, factor: float, ours: int) -> None:
    assert whole(value, factor) == ours


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_limits_that_were_kept_and_cannot_be_read_are_not_guessed_at(text: str) -> None:
    document = tenant({"nodes": 3})
    document["metadata"]["annotations"] = {KEPT: text, STATE: "paused"}
    with pytest.raises(ValueError, match=KEPT):
        change(document, state=ResourceState.OPEN, held={})
