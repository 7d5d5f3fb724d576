"""`bursar bench`: figures from a real server on this machine; with --json one object, last."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import click
import uvloop


@click.group()
def bench() -> None:
    """Measure, on this machine, now."""


@bench.command()
@click.option("--seconds", default=10.0, show_default=True, help="How long each part is measured.")
@click.option("--watchers", default=1000, show_default=True, help="Watches open during the fan-out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def api(seconds: float, watchers: int, as_json: bool) -> None:
    """Submit, get, list, patch and watch against a bare answer of the same server."""
    from bursar.bench.api import run

    _report(run(seconds=seconds, watchers=watchers, log=_say), as_json)


@bench.command()
@click.option("--nodes", default=5000, show_default=True, type=click.IntRange(1), help="How many nodes.")
@click.option("--allocations", default=20_000, show_default=True, type=click.IntRange(1), help="How many to place.")
@click.option(
    "--mix",
    default="basic",
    show_default=True,
    type=click.Choice(["basic", "affinity", "spread", "gang", "preempt"]),
    help="What they ask for.",
)
@click.option("--singles", default=300, show_default=True, help="Submissions measured one at a time.")
@click.option("--growth", is_flag=True, help="Decide on 1,000, 5,000 and 20,000 nodes as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def schedule(as_json: bool, **options: Any) -> None:
    """Decisions and durable placements a second, and the time from submission to placement."""
    from bursar.bench.schedule import run

    _report(run(log=_say, **options), as_json)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(main: Any, as_json: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures: dict[str, Any] = runner.run(main)
    figures["cores"] = os.cpu_count()
    if as_json:
        print(json.dumps(figures))
