"""The mutation fuzz: good requests of every operation and role with parts of them broken, many at once.

Whatever is sent, the server answers with a designed refusal or does what was asked; no answer is a 500, nothing of
another tenant is told or changed, and other requests are served meanwhile.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

from support.api.callers import Caller, answering, assembled
from support.api.families import Marks, founded, prepare
from support.api.mutations import Mutant, mutate
from support.api.operations import Filled, Filler, operations
from support.api.raw_http import RawAnswer, Wire, ask_all
from support.api.site import Site, opened_site
from support.api.table_dumps import COUNTERS, Dump, changes, dump, none
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOAK = bool(os.environ.get("BURSAR_SOAK"))
SECONDS = 600.0 if SOAK else 20.0
REQUESTS_MIN = 1_500  # of each part, however slow the machine is: then every kind of answer is met
PLAIN_SECONDS_MAX = 10.0
SEED = int(os.environ.get("BURSAR_FUZZ_SEED", random.SystemRandom().randrange(2**32) if SOAK else 20))
# Wrong values of a map that lies deep, more than are held against a schema.
AMOUNTS: dict[str, list[Any]] = {str(number): [] for number in range(600)}
SPEC = {"template": {"spec": {"resources": {"requests": AMOUNTS}}}}
HEAVY = json.dumps({"metadata": {"name": "heavy"}, "spec": SPEC}).encode()
# Logs and standard input are on agents that are not there; questions to a leader may be too many at once.
NOT_NOW = frozenset({"getAllocationLog", "getPodLog", "explainAllocation", "explainJob", "simulateAllocations"})


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    caller: Caller
    filled: Filled
    mutant: Mutant
    answer: RawAnswer

    def __str__(self) -> str:
        sent = self.mutant.raw[:600].decode("utf-8", "backslashreplace")
        got = self.answer.body[:300].decode("utf-8", "replace")
        return f"seed {SEED}, {self.filled.operation.id} as {self.caller.name}: {self.answer.status} to {sent}: {got}"

    @property
    def is_designed(self) -> bool:
        """A request gets an answer below 500; bytes that are no request get one, or are hung up on."""
        status = self.answer.status
        if status == 503:
            return self.filled.operation.id in NOT_NOW
        return status < 500 and (status > 0 or not self.mutant.is_http)

    @property
    def says_why(self) -> bool:
        """A refusal is a Status with its own code and a message."""
        if not self.mutant.is_http or self.answer.status < 400 or self.mutant.raw.startswith(b"HEAD "):
            return True
        try:
            body = json.loads(self.answer.body)
        except ValueError:
            return False
        return bool(body.get("kind") == "Status" and body.get("code") == self.answer.status and body.get("message"))

    def leaks(self, fingerprints: Marks) -> list[str]:
        """Marks in the answer that its caller neither sent nor may be told."""
        if not self.mutant.is_http:
            return []
        told = fingerprints.in_(self.answer.head, self.answer.body) - fingerprints.in_(self.mutant.asked)
        return [text for text in told if not self.caller.may_be_told(fingerprints.known[text])]


@dataclass(slots=True)
class Fuzz:
    """Counts and faults of all exchanges, each judged as it comes, and the database before and after the tenants' part.

    Exchanges are not kept: ten minutes of them are many gigabytes.
    """

    fingerprints: Marks
    callers: list[Caller] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    sent: set[str] = field(default_factory=set)  # marks in requests
    undesigned: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    leaking: list[str] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    slowest_seconds: float = 0.0
    last_status: int = 0

    def judge(self, one: Exchange) -> None:
        self.statuses[one.answer.status] += 1
        self.sent |= self.fingerprints.in_(one.mutant.asked)
        if not one.is_designed:
            self.undesigned.append(str(one))
        if not one.says_why:
            self.unexplained.append(f"{one}: {one.answer.head!r}")
        if leaks := one.leaks(self.fingerprints):
            self.leaking.append(f"{one} tells {leaks}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzz(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Fuzz]:
    name = await clone_database(embedded_postgres, database_template)
    options: Any = {"requests_per_minute": 10**9, "grpc_address": "127.0.0.1:1"}
    async with opened_site(_url(embedded_postgres, name), **options) as site:
        fingerprints = Marks()
        await prepare(site)
        changing = ("tenant-admin", "user", "node", "approver", "system-admin", "service", "billing-admin")
        families = await asyncio.gather(*(founded(site, fingerprints) for _ in changing))
        for path in ("authority", "/.well-known/jwks.json"):
            assert (await site.get(path)).status == 200, "keys that are made when they are first asked for are there"
        callers = await assembled(site, dict(zip(changing, families, strict=True)), fingerprints)
        async with answering(site):
            yield await _fuzzed(site, fingerprints, callers)
    await drop_database(embedded_postgres, name)


async def _fuzzed(site: Site, fingerprints: Marks, callers: list[Caller]) -> Fuzz:
    """Tenants, nodes and strangers first, who may change nothing of others; then those who may change everything."""
    document = (await site.get("/openapi.json")).body
    chance, filler, every = random.Random(SEED), Filler(document), operations(document)
    tenants = [one for one in callers if not one.sees_everything]
    all_powerful = [one for one in callers if one.sees_everything]
    pulse = asyncio.create_task(_slowest(site))
    fuzz = Fuzz(fingerprints, callers, dumps=[await dump(site)])

    def heavy(those: list[Caller]) -> Iterator[tuple[Caller, Filled, Mutant]]:
        """The body that takes longest to refuse where a refusal is made at all, to every operation that takes one."""
        caller = next(one for one in those if one.role == "tenant-admin")
        for operation in (one for one in every if one.media == "application/json"):
            filled = replace(next(iter(filler.fill(operation, caller.family.own))), body=HEAVY)
            yield caller, filled, Mutant(filled.raw(caller.token))

    def mutants(those: list[Caller], seconds: float) -> Iterator[tuple[Caller, Filled, Mutant]]:
        end, sent = time.monotonic() + seconds, 0
        while time.monotonic() < end or sent < REQUESTS_MIN:
            sent += 1
            caller, operation = chance.choice(those), chance.choice(every)
            target = chance.choice(list(caller.family.targets.values()))
            filled = chance.choice(list(filler.fill(operation, target)))
            yield caller, filled, mutate(filled, caller.token, chance)

    async def ask(wire: Wire, one: tuple[Caller, Filled, Mutant]) -> None:
        caller, filled, mutant = one
        fuzz.judge(Exchange(caller, filled, mutant, await wire.ask(mutant.raw, end=not mutant.is_http)))

    await ask_all(site.url, heavy(tenants), ask)
    await ask_all(site.url, mutants(tenants, SECONDS * 0.7), ask)
    fuzz.dumps.append(await dump(site))
    await ask_all(site.url, mutants(all_powerful, SECONDS * 0.3), ask)
    pulse.cancel()
    [fuzz.slowest_seconds] = await asyncio.gather(pulse)
    fuzz.last_status = (await site.get("whoami")).status
    return fuzz


async def _slowest(site: Site) -> float:
    """Ask a plain question again and again; the longest that an answer took."""
    slowest = 0.0
    try:
        while True:
            begun = time.monotonic()
            assert (await site.get("/hello")).status == 200
            slowest = max(slowest, time.monotonic() - begun)
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return slowest


async def test_every_answer_is_designed(fuzz: Fuzz) -> None:
    assert fuzz.statuses.total() > 500, "it was tried"
    none(fuzz.undesigned)


async def test_every_refusal_says_why(fuzz: Fuzz) -> None:
    none(fuzz.unexplained)


async def test_both_refusals_and_successes_were_met(fuzz: Fuzz) -> None:
    """Else the mutations would be too wild to pass the first check, or too mild to be refused."""
    assert fuzz.statuses.keys() >= {200, 201, 400, 401, 403, 404, 422}, fuzz.statuses


async def test_tenants_change_nothing_of_others(fuzz: Fuzz) -> None:
    callers = [one for one in fuzz.callers if one.role and not one.sees_everything]
    owned = {
        text for text, mark in fuzz.fingerprints.known.items() if mark.public or any(one.owns(mark) for one in callers)
    }
    none(
        f"{table} {how}, of {others}: {row}"
        for table, how, row in changes(*fuzz.dumps)
        if table not in COUNTERS
        and (others := fuzz.fingerprints.in_(row.encode()) - owned - (fuzz.sent if how == "new" else set()))
    )


async def test_answers_tell_nothing_of_others(fuzz: Fuzz) -> None:
    none(fuzz.leaking)


async def test_the_server_goes_on(fuzz: Fuzz) -> None:
    """It answered others all the time, and answers at the end. The bound is far above what a busy machine takes: a body
    that stops the whole process is meant."""
    assert fuzz.last_status == 200
    assert 0 < fuzz.slowest_seconds < PLAIN_SECONDS_MAX
