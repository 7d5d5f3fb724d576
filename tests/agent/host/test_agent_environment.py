"""The variables of a command."""

import pytest

from bursar.agent.host.environment import environment, user
from bursar.agent.machine.types import Run

JOB = ("BURSAR_JOB", "BURSAR_JOB_INDEX", "JOB_COMPLETION_INDEX")


@pytest.mark.parametrize(
    ("job", "index", "told"),
    [("sweep", 3, ("sweep", "3", "3")), ("sweep", None, ("sweep", "", "")), ("", None, (None, None, None))],
)
def test_a_command_of_a_job_learns_its_job_and_its_index(
    job: str, index: int | None, told: tuple[str | None, ...]
) -> None:
    run = Run("alloc-1", 1, "lab", "sweep-3", command=("true",), job=job, job_index=index)
    env = environment(run, "n1", user(), {})
    assert tuple(env.get(name) for name in JOB) == told


def test_nobody_gives_their_work_another_job() -> None:
    run = Run("alloc-1", 1, "lab", "sweep-3", env={"BURSAR_JOB_INDEX": "7"}, job="sweep", job_index=3)
    assert environment(run, "n1", user(), {})["BURSAR_JOB_INDEX"] == "3"
