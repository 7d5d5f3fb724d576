"""Python's collector of circular garbage, told how this process lives."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """What was loaded at the start lives for ever, and most of the rest dies young: look for circles less often."""
    gc.unfreeze()  # should this not be the first time
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
