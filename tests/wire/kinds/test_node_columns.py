"""What a table of nodes shows."""

import pytest

from bursar.core.quota.visibility import HIDDEN
from bursar.wire.kinds.node import NODE


@pytest.mark.parametrize(
    ("allocatable", "allocated", "expected"),
    [
        pytest.param("64Gi", "8Gi", "8Gi/64Gi", id="round amounts stay as they are"),
        pytest.param("24682416Ki", "32Gi", "32Gi/23.5Gi", id="odd ones are shown to a tenth of a GiB"),
        pytest.param("64Gi", None, "0/64Gi", id="nothing is given yet"),
    ],
)
def test_memory_is_shown_as_people_read_it(allocatable: str, allocated: str | None, expected: str) -> None:
    memory = next(one for one in NODE.columns if one.name == "Memory")
    given = {"allocated": {"memory": allocated}} if allocated else {}
    assert memory.value({"status": {"allocatable": {"memory": allocatable}, **given}}) == expected


def test_figures_that_the_reader_may_not_know_are_not_shown_as_none() -> None:
    gpus = next(one for one in NODE.columns if one.name == "GPU")
    shown = {"spec": {"tenants": [HIDDEN]}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
    assert gpus.value(shown) == "?/8"
