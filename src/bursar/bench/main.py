"""`bursar bench`: benchmarks of a real server on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import uvloop

from bursar.cli.shell.finite_range import FiniteRange

Option = Callable[[Callable[..., None]], Callable[..., None]]

SECONDS_MAX = 3600.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last.")


def count_option(name: str, default: int, help_text: str, *, least: int = 1, most: int | None = None) -> Option:
    return click.option(name, default=default, show_default=True, type=click.IntRange(least, most), help=help_text)


def seconds_option(*names: str, default: float, least: float, help_text: str = "Duration of each part.") -> Option:
    kind = FiniteRange(least, SECONDS_MAX)
    return click.option(*names, default=default, show_default=True, type=kind, help=help_text)


@click.group()
def bench() -> None:
    """Run benchmarks."""


@bench.command()
@seconds_option("--seconds", default=10.0, least=0.1)
@count_option("--watchers", 1000, "Watches open in the fan-out.", most=20_000)
@json_option
def api(seconds: float, watchers: int, as_json: bool) -> None:
    """Measure requests and watches of the API against a bare answer of the same server."""
    from bursar.bench.api import run

    _report(run(seconds=seconds, watchers=watchers, log=_say), as_json)


@bench.command()
@seconds_option("--seconds", default=5.0, least=0.1)
@count_option("--list-mb", 41, "Length of each list.", most=400)
@json_option
def abuse(as_json: bool, **options: Any) -> None:
    """Measure a tenant's requests beside half-open connections and unread watches and lists."""
    from bursar.bench.abuse import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@count_option("--nodes", 5000, "Number of nodes.", most=100_000)
@count_option("--allocations", 20_000, "Allocations to place.", most=1_000_000)
@click.option(
    "--mix",
    default="basic",
    show_default=True,
    type=click.Choice(["basic", "affinity", "spread", "gang", "preempt"]),
    help="Their requests.",
)
@count_option("--singles", 300, "Submissions measured one at a time.", most=100_000)
@click.option("--growth", is_flag=True, help="Decide on 1,000, 5,000 and 20,000 nodes as well.")
@json_option
def schedule(as_json: bool, **options: Any) -> None:
    """Measure decisions and placements per second, and the time from submission to placement."""
    from bursar.bench.schedule import TooMuch, run

    try:
        _report(run(log=_say, **options), as_json)
    except TooMuch as fault:
        raise click.UsageError(str(fault)) from None


@bench.command()
@count_option("--agents", 5000, "Number of agents.", most=9999)
@seconds_option("--heartbeat", default=5.0, least=0.01, help_text="Seconds between heartbeats.")
@seconds_option("--seconds", default=20.0, least=1)
@count_option("--secure", 200, "Agents in the mTLS part.", least=0, most=9999)
@count_option("--binds", 200, "Allocations bound meanwhile.", most=100_000)
@json_option
def agents(as_json: bool, **options: Any) -> None:
    """Measure heartbeats of many agents over gRPC, their cost, and the latency of directives."""
    from bursar.bench.agents import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@count_option("--jobs", 10_000, "Number of paid jobs.", least=2, most=1_000_000)
@seconds_option("--delta", default=5.0, least=0.01, help_text="Seconds between heartbeats.")
@seconds_option("--seconds", default=15.0, least=1)
@count_option("--accounts", 100, "Number of accounts.", most=10_000)
@json_option
def leases(as_json: bool, **options: Any) -> None:
    """Measure lease extensions against one transaction per extension."""
    from bursar.bench.leases import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@count_option("--requests", 10_000, "Number of pending requests.", most=1_000_000)
@count_option("--tenants", 100, "Number of tenants.", most=9999)
@count_option("--raises", 20, "Limits to raise, of one tenant after another.", most=9999)
@json_option
def approvals(as_json: bool, **options: Any) -> None:
    """Measure the decisions of one quota service, and the time from a higher limit to the approvals."""
    from bursar.bench.approvals import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@count_option("--records", 10_000_000, "Records of a year.", least=100, most=1_000_000_000)
@count_option("--tenants", 50, "Number of tenants.", most=9999)
@count_option("--users", 20, "Users per tenant.", most=10_000)
@count_option("--reports", 50, "Reports to measure.", most=100_000)
@json_option
def usage(as_json: bool, **options: Any) -> None:
    """Measure a year's usage reports against adding up a tenant's records."""
    from bursar.bench.usage import run

    _report(run(log=_say, **options), as_json)


@bench.command()
@click.option("--format", "layout", default="openb", show_default=True, type=click.Choice(["openb"]))
@click.option("--nodes", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV file.")
@click.option("--pods", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="CSV file.")
@click.option("--seeds", default="42-51", show_default=True, help="Orders of arrival: 42, or 42,44, or 42-51.")
@click.option("--policy", default="fragmentation", show_default=True, help="Ours, or a published one: bestfit, fgd …")
@json_option
def trace(layout: str, nodes: Path, pods: Path, seeds: str, policy: str, as_json: bool) -> None:
    """Replay a recorded workload, and compare GPU utilization with published policies."""
    from bursar.bench.trace import POLICIES, TraceError, parse_seeds, run

    if policy not in POLICIES:
        raise click.BadParameter(f"choose one of {', '.join(POLICIES)}", param_hint="--policy")
    try:
        chosen = parse_seeds(seeds)
    except ValueError as fault:
        raise click.BadParameter(str(fault), param_hint="--seeds") from None
    try:
        figures = run(nodes=nodes, pods=pods, seeds=chosen, policy=policy, log=_say)
    except TraceError as fault:
        raise click.UsageError(str(fault)) from None
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
