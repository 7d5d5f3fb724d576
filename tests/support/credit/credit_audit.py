"""What must be true of credit when everything is whole again, read from the database and from the nodes' own files."""

import asyncio
import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bursar.agent.shim.clock import boot_seconds
from bursar.core.values.money import MICROS, cost
from bursar.ops.credit.seal import seal
from bursar.ops.runtime.runtime import Runtime
from support.credit.flaky_payers import Teller, paid_in
from support.credit.ledgers import assert_books_balance
from support.process.agents import Agent
from support.process.server import BURSAR, Server

SETTLE_SECONDS = 90.0

LEFT = """
SELECT (SELECT count(*) FROM lease) AS open,
       (SELECT count(*) FROM placement) AS placed,
       (SELECT count(*) FROM lease_ended WHERE reconciled_at IS NULL) AS unreconciled
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A placement as its shim has written it down."""

    began: float  # seconds, by the node's clock
    micros: int

    @property
    def ended_at(self) -> float:
        """By the wall clock of this machine, which is the database's as well."""
        return self.began + self.micros / MICROS + time.time() - boot_seconds()


def runs_of(agents: Iterable[Agent]) -> dict[tuple[str, int], Run]:
    """By allocation and epoch."""
    found: dict[tuple[str, int], Run] = {}
    for agent in agents:
        for folder in (agent.data / "work" / "placements").iterdir():
            if not (folder / "started").exists():
                continue
            uid, _, epoch = folder.name.rpartition(".")
            assert (uid, int(epoch)) not in found, f"{folder.name} ran on two nodes"
            found[uid, int(epoch)] = _run(folder)
    return found


def _run(folder: Path) -> Run:
    seconds = float(json.loads((folder / "status").read_bytes())["seconds"])
    return Run(float((folder / "started").read_bytes().split()[2]), round(seconds * MICROS))


async def await_settled(runtime: Runtime, agents: Iterable[Agent]) -> None:
    """Nothing is open, everything is reconciled, and what it cost is what ran."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        async with runtime.database.reader() as db:
            left = dict(await db.fetchrow(LEFT))
        wrong = [] if any(left.values()) else await _wrong_costs(runtime, runs_of(agents))
        if not any(left.values()) and not wrong:
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"not settled: {left}, {wrong}")


async def _wrong_costs(runtime: Runtime, runs: dict[tuple[str, int], Run]) -> list[str]:
    """Leases that cost anything but their rate for the time that their shim measured; what never began is free."""
    wrong = []
    for lease in await _ended(runtime):
        run = runs.get((lease["uid"], lease["epoch"]))
        true = cost(lease["rate"], run.micros) if run is not None else 0
        if lease["posted"] != true:
            wrong.append(f"{dict(lease)} cost {lease['posted']}, and ran for {true}: {run}")
    return wrong


async def _ended(runtime: Runtime) -> list[Any]:
    async with runtime.database.reader() as db:
        return list(await db.fetch("SELECT * FROM lease_ended WHERE uid <> '' ORDER BY id"))


async def audit(runtime: Runtime, agents: Iterable[Agent], teller: Teller, rate: int, unpaid_seconds: float) -> None:
    """Everything at once; `unpaid_seconds` is for how long anything may run without being paid. All is sealed then."""
    agents = list(agents)
    await await_settled(runtime, agents)
    await assert_books_balance(runtime)
    runs = runs_of(agents)
    leases = await _ended(runtime)
    assert {(one["uid"], one["epoch"]) for one in leases} >= set(runs), "something ran that no lease paid for"
    assert len({(one["uid"], one["epoch"]) for one in leases}) == len(leases), "something was paid for twice"
    for one in leases:
        assert one["rate"] == rate
        assert one["written_off"] <= cost(rate, round(unpaid_seconds * MICROS)), dict(one)
        if run := runs.get((one["uid"], one["epoch"])):
            assert run.ended_at <= one["paid_until"] / MICROS + unpaid_seconds, f"{dict(one)} ran unpaid: {run}"
    await _assert_each_request_once(runtime, teller)
    await _assert_balances(runtime, teller)
    await seal(runtime)


async def _assert_each_request_once(runtime: Runtime, teller: Teller) -> None:
    assert not teller.faults, "\n".join(teller.faults)
    async with runtime.database.reader() as db:
        entries = await db.fetch("SELECT type, request, amount, lease FROM entry WHERE request <> '' AND lease = 0")
        jobs = await db.fetch("SELECT job FROM lease_ended WHERE uid = ''")
    found = Counter(_name(row) for row in entries)
    assert found == Counter(dict.fromkeys(teller.done, 1))
    amounts = {_name(row): row["amount"] for row in entries}
    assert amounts == {request: abs(amount) for request, (_, amount) in teller.done.items()}
    assert Counter(row["job"] for row in jobs) == Counter(dict.fromkeys(teller.opened, 1))


def _name(row: Any) -> str:
    return f"{row['type']}s:{row['request']}"


async def _assert_balances(runtime: Runtime, teller: Teller) -> None:
    """What came in by request, less what leases cost."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT tenant, account.posted, held, coalesce(spent, 0)::bigint AS spent FROM account"
            "  LEFT JOIN (SELECT account AS id, sum(posted - written_off) AS spent FROM lease_ended GROUP BY account)"
            "         AS used USING (id)"
            " WHERE id >= 100"
        )
    came = paid_in(teller)
    assert {row["tenant"]: (row["posted"], row["held"]) for row in rows} == {
        row["tenant"]: (came[row["tenant"]] - row["spent"], 0) for row in rows
    }
    assert {row["tenant"] for row in rows} == set(came)


# Verifying, as anybody can.


def verify(server: Server) -> tuple[int, str]:
    """The exit code of `bursar ledger verify`, and what it said."""
    command = [str(BURSAR), "ledger", "verify"]
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr
