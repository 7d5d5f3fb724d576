"""The clock of everything that has a deadline on a node: agent, shims and stream count by the same one.

It goes on while the machine sleeps. A lease that ended meanwhile is over when the machine wakes up, as the control
plane thinks it is; on a clock that sleeps too, work would go on beside its second life elsewhere.
"""

from __future__ import annotations

import time


def boot_seconds() -> float:
    """Since the machine was started, whether it was awake or not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
