"""The wipe of a node between claims for sensitive work: the site's wipe hook, run as a placement.

The hook runs under a shim and in the journal, so a restarted agent learns how it ended and repeats no attempt. It runs
as the agent's own user, outside of any sandbox. Before it starts, the agent removes what it keeps of earlier commands,
above all their output (`log_retention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bursar.agent.machine.types import Run

WIPE_SECONDS = 3600
GRACE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Wipe:
    """The wipe hook, a shell command with BURSAR_NODE and BURSAR_CLAIM in its environment. Without a hook every wipe
    fails with the reason NoWipeHook."""

    hook: str = ""
    seconds_max: int = WIPE_SECONDS

    def of(self, wanted: Run) -> Run:
        """The run that a wipe directive becomes."""
        if not self.hook:
            return wanted
        command = ("/bin/sh", "-c", self.hook)
        return replace(wanted, command=command, ttl_seconds=self.seconds_max, grace_seconds=GRACE_SECONDS)


NO_WIPE = Wipe()
