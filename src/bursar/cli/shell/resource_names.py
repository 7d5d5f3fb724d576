"""Checks of resource names in prices and limits: a name under which nothing is ever counted is refused."""

from __future__ import annotations

import click

from bursar.cli.shell.problem import USAGE, Problem

COUNTED = ("cpu", "memory", "ephemeral-storage")  # beside devices, which have a prefix, and huge pages
GPUS = ("gpu", "gpus")

force_option = click.option("--force", is_flag=True, help="Accept an unknown resource name.")


def check_priced(resource: str, *, force: bool) -> None:
    """Refuse an unknown resource: a price that has begun cannot be removed."""
    known = "/" in resource or resource in COUNTED or resource.startswith("hugepages-")
    if not (known or force):
        raise Problem(f"unknown resource {resource!r}", _help(resource), USAGE)


def check_limited(dimension: str, *, force: bool) -> None:
    """Refuse `gpu`: any name may be a dimension, but users who write this one mean nvidia.com/gpu."""
    if dimension in GPUS and not force:
        raise Problem(f"{dimension} limits no device", _help(dimension), USAGE)


def _help(name: str) -> str:
    if name in GPUS:
        return "use the full name, such as nvidia.com/gpu; --force accepts this one"
    return f"resources are devices, such as nvidia.com/gpu, and {', '.join(COUNTED)}; --force accepts any name"
