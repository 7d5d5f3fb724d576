"""Hypothesis' state machines with a runtime of their own, for comparison with a plain model."""

import asyncio
import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database
from support.runtime.runtime import opened

SOAK = bool(os.environ.get("BURSAR_SOAK"))


class RuntimeMachine(RuleBasedStateMachine):
    """Each run has a database of its own; `runtime` is there from the first rule on."""

    server: PostgresServer
    template: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = self.runner.run(clone_database(self.server, self.template))
        self.opened = opened(_url(self.server, self.database))
        self.runtime = self.runner.run(self.opened.__aenter__())

    def teardown(self) -> None:
        self.runner.run(self.opened.__aexit__())
        self.runner.run(drop_database(self.server, self.database))
        self.runner.close()

    def run(self, verb: Any) -> Any:
        return self.runner.run(verb)


def follow(machine: type[RuntimeMachine], server: PostgresServer, template: str, *, examples: int, steps: int) -> None:
    """Run a machine so many times, with so many steps each."""
    machine.server, machine.template = server, template
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            # A short run shows the first failure as it came; a long one has the time to make it small.
            phases=tuple(Phase) if SOAK else (Phase.explicit, Phase.reuse, Phase.generate),
            report_multiple_bugs=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
