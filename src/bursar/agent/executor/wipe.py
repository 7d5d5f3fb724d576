"""How a node is wiped that was claimed for sensitive work and given back: by a hook of the site's own.

It runs like a command that was placed here, under a shim and in the journal: an agent that dies meanwhile learns how it
ended, and no attempt is made twice. But it runs as the agent itself, and not as whom tenants' commands run as.

The agent's own part comes first: what commands have left with it, their output above all, is gone before the hook
begins (`leavings.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bursar.agent.machine.types import Run

WIPE_SECONDS = 3600
GRACE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Wipe:
    """A command for the shell; it finds the node and the claim in BURSAR_NODE and BURSAR_CLAIM. Without one nothing is
    ever wiped, and whoever asks for it is told so."""

    hook: str = ""
    seconds_max: int = WIPE_SECONDS

    def of(self, wanted: Run) -> Run:
        """What is run when a node is to be wiped."""
        if not self.hook:
            return wanted
        command = ("/bin/sh", "-c", self.hook)
        return replace(wanted, command=command, ttl_seconds=self.seconds_max, grace_seconds=GRACE_SECONDS)


NO_WIPE = Wipe()
