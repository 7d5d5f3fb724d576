"""What becomes of an allocation when the last of its nodes has spoken."""

import pytest

from bursar.core.nodes.eviction import STOPPABLE, ended_as
from bursar.core.objects.allocation import NEXT, Phase

SUCCEEDED, FAILED, CANCELLED, PENDING = Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.PENDING


@pytest.mark.parametrize(
    ("last", "earlier", "evicted", "deleted", "becomes"),
    [
        # Left alone, it is what its nodes say; one failure is enough.
        (SUCCEEDED, (), False, False, SUCCEEDED),
        (SUCCEEDED, (SUCCEEDED,), False, False, SUCCEEDED),
        (SUCCEEDED, (FAILED,), False, False, FAILED),
        (CANCELLED, (), False, False, CANCELLED),
        (PENDING, (), False, False, PENDING),
        (PENDING, (FAILED,), False, False, FAILED),
        # Evicted, it waits again, unless it had succeeded everywhere.
        (CANCELLED, (), True, False, PENDING),
        (FAILED, (), True, False, PENDING),
        (PENDING, (), True, False, PENDING),
        (SUCCEEDED, (), True, False, SUCCEEDED),
        (SUCCEEDED, (SUCCEEDED,), True, False, SUCCEEDED),
        (SUCCEEDED, (CANCELLED,), True, False, PENDING),
        (SUCCEEDED, (FAILED,), True, False, PENDING),
        # Deleted, it ends, whatever else was wanted.
        (CANCELLED, (), True, True, CANCELLED),
        (PENDING, (), True, True, CANCELLED),
        (PENDING, (), False, True, CANCELLED),
        (FAILED, (), True, True, FAILED),
        (SUCCEEDED, (), False, True, SUCCEEDED),
    ],
)
def test_what_it_becomes(last: Phase, earlier: tuple[Phase, ...], evicted: bool, deleted: bool, becomes: Phase) -> None:
    assert ended_as(last, earlier, evicted=evicted, deleted=deleted) is becomes


def test_what_can_be_stopped_can_wait_again() -> None:
    assert {phase for phase in Phase if Phase.PENDING in NEXT[phase]} == set(STOPPABLE)
