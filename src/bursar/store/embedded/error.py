"""The one error of the embedded PostgreSQL."""


class EmbeddedError(Exception):
    """The embedded PostgreSQL cannot run. Says what is wrong and, always, what to do next."""

    def __init__(self, problem: str, next_step: str) -> None:
        super().__init__(f"{problem}\n{next_step}")
        self.problem = problem
        self.next_step = next_step
