"""Plurals and lists of names in messages: `1 node`, `2 nodes`, `2 nodes: gpu-7, gpu-8`."""

from __future__ import annotations

from collections.abc import Sequence

NAMED_MAX = 8  # names that a sentence lists


def counted(number: int | str, what: str, plural: str = "") -> str:
    """Format a count: `1 node`, `2 nodes`, `1.5 credits`; `plural` is for irregular ones, as in `2 entries`."""
    return f"{number} {what}" if str(number) == "1" else f"{number} {plural or f'{what}s'}"


def listed(names: Sequence[str], what: str) -> str:
    """Format names: `gpu-7` for one; `2 nodes: gpu-7, gpu-8` for several, of which the first are named."""
    if len(names) == 1:
        return names[0]
    more = ", …" if len(names) > NAMED_MAX else ""
    return f"{counted(len(names), what)}: {', '.join(names[:NAMED_MAX])}{more}"
