"""What use costs: nothing is lost on the way to a bill, and its parts add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.credit.cost import PARTS, bill, breakdown, fraction, money, nano_of, part_of
from bursar.core.credit.price import GIB
from bursar.core.usage.usage_levels import Tariff
from bursar.core.values.money import NANO


@pytest.mark.parametrize(
    ("resource", "part"),
    [
        ("cpu", "cpu"),
        ("memory", "memory"),
        ("hugepages-2Mi", "memory"),
        ("nvidia.com/gpu", "gpu"),
        ("amd.com/gpu", "gpu"),
        ("ephemeral-storage", "storage"),
        ("example.com/fpga", "other"),
        ("nodes", "other"),
    ],
)
def test_each_resource_has_its_part_of_a_bill(resource: str, part: str) -> None:
    assert part_of(resource) == part


def test_a_gpu_for_an_hour_and_a_gib_for_a_day_cost_their_price() -> None:
    gpu = 1000 * Tariff((0,), (NANO // 1000,)).cost(0, 3600)
    memory = 4 * GIB * Tariff((0,), (1000,)).cost(0, 86_400)
    assert nano_of(fraction("nvidia.com/gpu", gpu)) == 36 * NANO // 10
    assert nano_of(fraction("memory", memory)) == 4 * 1000 * 86_400


def test_fractions_of_a_nanocredit_are_rounded_once_in_the_sum() -> None:
    third = fraction("cpu", 333)  # a third of a nanocredit, as thousandths
    assert [nano_of(third), nano_of(2 * third), nano_of(3 * third)] == [0, 1, 1]


def test_a_bill_names_every_part_and_other_only_where_there_is_something() -> None:
    assert set(breakdown([])) == set(PARTS)
    assert set(breakdown([("example.com/fpga", 1)])) == {*PARTS, "other"}
    assert set(breakdown([("nodes", 0)])) == set(PARTS)


@pytest.mark.parametrize(
    ("cents", "text"),
    [(0, "$0.00"), (5, "$0.05"), (1_245_000, "$12,450.00"), (123_456_789, "$1,234,567.89"), (-150, "-$1.50")],
)
def test_money_reads_as_people_write_it(cents: int, text: str) -> None:
    assert money(cents) == text


@pytest.mark.parametrize(("value", "cents"), [("1.00", 1250), ("0.5", 625), ("0", 0), ("2.50", 3125)])
def test_a_credit_is_worth_what_the_settings_say(value: str, cents: int) -> None:
    parts = breakdown([("cpu", 12_500 * NANO)])  # 12.5 credits
    assert bill(parts, value) == (cents, {"cpu": cents, "memory": 0, "gpu": 0, "storage": 0})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "nodes"]), st.integers(0, 10**18)
        )
    ),
    st.sampled_from(["1.00", "0.01", "0.333333333", "7"]),
)
def test_parts_add_up_to_the_whole_and_are_within_a_cent_of_what_they_are(
    costs: list[tuple[str, int]], value: str
) -> None:
    parts = breakdown(costs)
    whole, cents = bill(parts, value)
    assert sum(cents.values()) == whole
    for name, amount in parts.items():
        alone, _ = bill({name: amount}, value)
        assert abs(alone - cents[name]) <= 1
