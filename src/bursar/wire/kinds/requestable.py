"""The kinds whose new objects are requests that pass approval gates."""

from __future__ import annotations


def requestable_kinds() -> frozenset[str]:
    """Their names. The registry imports every kind, so it is imported when this is called."""
    from bursar.wire.kinds.registry import KINDS

    return frozenset(kind.name for kind in KINDS if kind.requestable)
