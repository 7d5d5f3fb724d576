"""Tune Python's cyclic garbage collector for a long-lived heap."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """Freeze the objects loaded at the start, and collect less often: most other objects die young."""
    gc.unfreeze()  # in case of an earlier call
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
