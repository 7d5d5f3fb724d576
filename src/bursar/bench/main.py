"""`bursar bench`: figures from a real server on this machine; with --json one object, last."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

SECONDS_MAX = 3600.0


class FiniteRange(click.FloatRange):
    """A range of numbers. NaN is in none, but compares as neither below nor above, so click lets it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


@click.group()
def bench() -> None:
    """Measure, on this machine, now."""


@bench.command()
@click.option(
    "--seconds", default=10.0, show_default=True, type=FiniteRange(0.1, SECONDS_MAX),
    help="How long each part is measured.",
)  # fmt: skip
@click.option(
    "--watchers", default=1000, show_default=True, type=click.IntRange(1, 20_000), help="Watches open in the fan-out."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def api(seconds: float, watchers: int, as_json: bool) -> None:
    """Submit, get, list, patch and watch against a bare answer of the same server."""
    from bursar.bench.api import run

    _report(run(seconds=seconds, watchers=watchers, log=_say), as_json)


@bench.command()
@click.option("--seconds", default=5.0, show_default=True, type=FiniteRange(0.1, 3600), help="Of each part.")
@click.option("--list-mb", default=41, show_default=True, type=click.IntRange(1, 400), help="Length of each list.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def abuse(as_json: bool, **options: Any) -> None:
    """What a tenant's requests take beside half-open connections, and watches and lists that nobody reads."""
    from bursar.bench.abuse import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@click.option("--nodes", default=5000, show_default=True, type=click.IntRange(1, 100_000), help="How many nodes.")
@click.option(
    "--allocations", default=20_000, show_default=True, type=click.IntRange(1, 1_000_000), help="How many to place."
)
@click.option(
    "--mix",
    default="basic",
    show_default=True,
    type=click.Choice(["basic", "affinity", "spread", "gang", "preempt"]),
    help="What they ask for.",
)
@click.option(
    "--singles", default=300, show_default=True, type=click.IntRange(1), help="Submissions measured one at a time."
)
@click.option("--growth", is_flag=True, help="Decide on 1,000, 5,000 and 20,000 nodes as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def schedule(as_json: bool, **options: Any) -> None:
    """Decisions and durable placements a second, and the time from submission to placement."""
    from bursar.bench.schedule import TooMuch, run

    try:
        _report(run(log=_say, **options), as_json)
    except TooMuch as fault:
        raise click.UsageError(str(fault)) from None


@bench.command()
@click.option("--agents", default=5000, show_default=True, type=click.IntRange(1, 9999), help="How many agents.")
@click.option(
    "--beat",
    "heartbeat",
    default=5.0,
    show_default=True,
    type=FiniteRange(0.01, SECONDS_MAX),
    help="Seconds between beats.",
)
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    type=FiniteRange(1, SECONDS_MAX),
    help="How long each part lasts.",
)
@click.option("--secure", default=200, show_default=True, type=click.IntRange(0, 9999), help="Agents in the mTLS part.")
@click.option(
    "--binds", default=200, show_default=True, type=click.IntRange(1, 100_000), help="Allocations bound meanwhile."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def agents(as_json: bool, **options: Any) -> None:
    """Heartbeats of many agents over gRPC, what each costs the server, and how fast it is told what to run."""
    from bursar.bench.agents import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@click.option(
    "--jobs", default=10_000, show_default=True, type=click.IntRange(2, 1_000_000), help="How many run and are paid."
)
@click.option(
    "--delta", default=5.0, show_default=True, type=FiniteRange(0.01, SECONDS_MAX), help="Seconds between beats."
)
@click.option(
    "--seconds",
    default=15.0,
    show_default=True,
    type=FiniteRange(1, SECONDS_MAX),
    help="How long each part lasts.",
)
@click.option("--accounts", default=100, show_default=True, type=click.IntRange(1), help="How many pay for them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def leases(as_json: bool, **options: Any) -> None:
    """Leases extended at the pace of beats and flat out, against one transaction per extension."""
    from bursar.bench.leases import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@click.option("--records", default=10_000_000, show_default=True, type=click.IntRange(100), help="Of a year.")
@click.option("--tenants", default=50, show_default=True, type=click.IntRange(1, 9999), help="Whose they are.")
@click.option("--users", default=20, show_default=True, type=click.IntRange(1), help="Of each tenant.")
@click.option("--reports", default=50, show_default=True, type=click.IntRange(1), help="How many are measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def usage(as_json: bool, **options: Any) -> None:
    """A year's report of a tenant and of a user, against adding up the tenant's records."""
    from bursar.bench.usage import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@click.option("--format", "layout", default="openb", show_default=True, type=click.Choice(["openb"]))
@click.option("--nodes", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV file.")
@click.option("--pods", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV file.")
@click.option("--seeds", default="42-51", show_default=True, help="Orders of arrival: 42, or 42,44, or 42-51.")
@click.option("--policy", default="fragmentation", show_default=True, help="Ours, or a published one: bestfit, fgd …")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")
def trace(layout: str, nodes: Path, pods: Path, seeds: str, policy: str, as_json: bool) -> None:
    """How many of a recorded cluster's GPUs are put to use by its workload, beside the published policies."""
    from bursar.bench.trace import POLICIES, parse_seeds, run

    if policy not in POLICIES:
        raise click.BadParameter(f"choose one of {', '.join(POLICIES)}", param_hint="--policy")
    try:
        chosen = parse_seeds(seeds)
    except ValueError as fault:
        raise click.BadParameter(str(fault), param_hint="--seeds") from None
    figures = run(nodes=nodes, pods=pods, seeds=chosen, policy=policy, log=_say)
    figures["format"], figures["cores"] = layout, os.cpu_count()
    if as_json:
        print(json.dumps(figures))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(main: Any, as_json: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures: dict[str, Any] = runner.run(main)
    figures["cores"] = os.cpu_count()
    if as_json:
        print(json.dumps(figures))
