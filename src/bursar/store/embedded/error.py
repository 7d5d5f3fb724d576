"""The error type of the embedded PostgreSQL."""


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot run. The error says why, and what to do next."""

    def __init__(self, problem: str, next_step: str) -> None:
        super().__init__(f"{problem}\n{next_step}")
        self.problem = problem
        self.next_step = next_step
