"""Names of resources that somebody sets a price or a limit for: one that nothing is ever counted under is refused."""

from __future__ import annotations

import click

from bursar.cli.shell.problem import USAGE, Problem

COUNTED = ("cpu", "memory", "ephemeral-storage")  # beside devices, which have a prefix, and huge pages
GPUS = ("gpu", "gpus")

force_option = click.option(
    "--force", is_flag=True, help="Also under a name that nothing is known to be counted under."
)


def check_priced(resource: str, *, force: bool) -> None:
    """What has begun cannot be taken back: a price under a wrong name would stay for ever."""
    known = "/" in resource or resource in COUNTED or resource.startswith("hugepages-")
    if not (known or force):
        raise Problem(f"nothing is known to be counted as {resource!r}", _help(resource), USAGE)


def check_limited(dimension: str, *, force: bool) -> None:
    """Any name may be a dimension, but not this one: it is what people call something else."""
    if dimension in GPUS and not force:
        raise Problem(f"{dimension} limits no device", _help(dimension), USAGE)


def _help(name: str) -> str:
    if name in GPUS:
        return "a GPU is called by its whole name, as nvidia.com/gpu; --force takes this one all the same"
    return f"resources are devices, as nvidia.com/gpu, and {', '.join(COUNTED)}; --force takes this one all the same"
