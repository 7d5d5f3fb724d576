"""Numbers and names in sentences."""

import pytest

from bursar.core.values.wording import counted, listed


@pytest.mark.parametrize(
    ("number", "words", "told"),
    [
        (1, ("node",), "1 node"),
        (0, ("node",), "0 nodes"),
        (2, ("entry", "entries"), "2 entries"),
        ("1", ("credit",), "1 credit"),
        ("1.5", ("credit",), "1.5 credits"),
    ],
)
def test_one_is_singular(number: int | str, words: tuple[str, ...], told: str) -> None:
    assert counted(number, *words) == told


def test_the_first_of_many_are_named() -> None:
    assert listed(["n0"], "node") == "n0"
    assert listed(["n0", "n1"], "node") == "2 nodes: n0, n1"
    assert listed([f"n{index}" for index in range(9)], "node") == "9 nodes: n0, n1, n2, n3, n4, n5, n6, n7, …"
