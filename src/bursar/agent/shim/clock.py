"""CLOCK_BOOTTIME, the clock of all deadlines on a node: agent, shims and stream use the same one.

It advances while the machine sleeps. A lease that ended meanwhile has expired on waking, as the control plane assumes.
On a clock that sleeps, work could run twice: here and where it was placed next.
"""

from __future__ import annotations

import time


def boot_seconds() -> float:
    """Seconds since boot, including suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
