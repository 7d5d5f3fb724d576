"""Asking the leader: questions go through the database, so that it may be on any machine and needs no port of its own.

Those who ask at the same time share one statement, and one connection that listens for answers. A notification is a
hint: answers are also looked for now and then. Where nobody leads nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from bursar.core.scheduling.explain.explain_types import ExplainAnswer, Figures, Glimpse, Holding, SimulatedOutcome
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.lane import Lane, Overloaded
from bursar.store.db.database import AWAY, Connection, Database
from bursar.store.scheduling import leader_query as store
from bursar.wire.to_scheduler.ask import PriorityClassView

log = structlog.get_logger()

T = TypeVar("T")

ANSWER_SECONDS_MAX = 5.0
GLIMPSE_SECONDS_MAX = 0.2
BOOST_SECONDS_MAX = 1.0
# After a leader was silent, nobody who only wanted a glimpse waits for it again before this.
SILENCE_SECONDS = 5.0
GLIMPSES_PER_SECOND = 100
POLL_SECONDS = 0.25
WAITING_MAX = 2048


# Questions.


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """Why an allocation waits."""

    uid: str


class InUse(msgspec.Struct, tag="in-use", frozen=True):
    """How an allocation that is placed stands."""

    uid: str


class LookQuestion(msgspec.Struct, tag="look", frozen=True):
    """Where an allocation stands, and when it may start; of a job the one that waits longest. Who has just committed it
    says with which `revision`: the leader may not have heard of it yet."""

    uid: str = ""
    namespace: str = ""
    job: str = ""
    revision: int = 0


class BoostedQuestion(msgspec.Struct, tag="boosted", frozen=True):
    """Where the allocations of a job would stand with this priority."""

    namespace: str
    job: str
    priority: int


class Draft(msgspec.Struct, frozen=True):
    """An allocation that is not there."""

    uid: str
    tenant: str
    labels: dict[str, str]
    doc: msgspec.Raw
    user: str = ""  # who would submit it


class Simulate(msgspec.Struct, tag="simulate", frozen=True):
    """What would become of these if they were submitted together."""

    drafts: list[Draft]
    priorities: dict[str, PriorityClassView]


class Count(msgspec.Struct, tag="count", frozen=True):
    """The scheduler in numbers."""


Question = Explain | InUse | LookQuestion | BoostedQuestion | Simulate | Count


class LeaderAnswer(msgspec.Struct, frozen=True):
    """What the leader says; `error` where it could not."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


encode = msgspec.json.Encoder().encode
decode_question = msgspec.json.Decoder(Question).decode
_decode_answer = msgspec.json.Decoder(LeaderAnswer).decode
_decode_explanation: Callable[[bytes], ExplainAnswer | None] = msgspec.json.Decoder(ExplainAnswer | None).decode
_decode_holding: Callable[[bytes], Holding | None] = msgspec.json.Decoder(Holding | None).decode
_decode_glimpse: Callable[[bytes], Glimpse | None] = msgspec.json.Decoder(Glimpse | None).decode
_decode_position: Callable[[bytes], int | None] = msgspec.json.Decoder(int | None).decode
_decode_outlooks: Callable[[bytes], list[SimulatedOutcome]] = msgspec.json.Decoder(list[SimulatedOutcome]).decode
_decode_figures: Callable[[bytes], Figures] = msgspec.json.Decoder(Figures).decode

NO_LEADER = Refusal(
    Code.UNAVAILABLE,
    "no scheduler leads at the moment, and only it can answer this",
    "Try again in a few seconds; if that does not help, see whether `bursar controller` runs.",
    retry_after_seconds=2,
)
SILENT = Refusal(
    Code.UNAVAILABLE,
    f"the scheduler did not answer within {ANSWER_SECONDS_MAX:g} s",
    "Try again in a few seconds: it may be busy, or another is just taking over.",
    retry_after_seconds=2,
)


class LeaderQueries:
    """One process's questions to the leader."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lane: Lane[bytes, int | None] = Lane("inquiry", self._put, capacity=WAITING_MAX, batch_max=64)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._given_up: list[int] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._silent_until = float("-inf")
        self._glances_since = float("-inf")
        self._glances = 0

    async def ask(self, question: Question, seconds: float = ANSWER_SECONDS_MAX) -> bytes | Refusal:
        """The leader's answer as JSON, or why there is none."""
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._listen(), name="inquiries")
        putting: asyncio.Future[int | None] | None = None
        number: int | None = None
        try:
            async with asyncio.timeout(seconds):
                putting = self._lane.put(encode(question))
                number = await asyncio.shield(putting)
                if number is None:
                    return NO_LEADER
                raw = await self._answer_to(number)
        except TimeoutError:
            self._silent_until = loop.time() + SILENCE_SECONDS
            return SILENT
        except Overloaded as error:
            return Refusal(Code.OVERLOADED, str(error), retry_after_seconds=error.retry_after_seconds)
        finally:
            if number is not None and self._waiting.pop(number, None) is not None:
                self._give_up(number)
            elif putting is not None and not putting.done():
                putting.add_done_callback(self._put_too_late)
        self._silent_until = float("-inf")
        answer = _decode_answer(raw)
        if answer.error:
            return Refusal(Code.UNAVAILABLE, f"the scheduler could not answer: {answer.error}", retry_after_seconds=2)
        return bytes(answer.result)

    async def glimpse(self, look: LookQuestion) -> Glimpse | None:
        """A glance that may fail, and then costs next to nothing; so many a second, so that reading stays quick."""
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            return None
        if now - self._glances_since >= 1.0:
            self._glances_since, self._glances = now, 0
        self._glances += 1
        if self._glances > GLIMPSES_PER_SECOND:
            return None
        try:
            found = await self._asked(look, _decode_glimpse, GLIMPSE_SECONDS_MAX)
        except AWAY:
            return None
        if isinstance(found, Refusal):
            self._silent_until = max(self._silent_until, asyncio.get_running_loop().time() + SILENCE_SECONDS)
            return None
        return found

    async def boosted(self, namespace: str, job: str, priority: int) -> int | None:
        """Where a job would stand; a glance as well."""
        if asyncio.get_running_loop().time() < self._silent_until:
            return None
        try:
            found = await self._asked(BoostedQuestion(namespace, job, priority), _decode_position, BOOST_SECONDS_MAX)
        except AWAY:
            return None
        return None if isinstance(found, Refusal) else found

    async def holding(self, uid: str) -> Holding | None:
        """A glance, too: what is placed has its place, whether anybody answers or not."""
        if asyncio.get_running_loop().time() < self._silent_until:
            return None
        try:
            found = await self._asked(InUse(uid), _decode_holding, BOOST_SECONDS_MAX)
        except AWAY:
            return None
        return None if isinstance(found, Refusal) else found

    async def explain(self, uid: str) -> ExplainAnswer | Refusal | None:
        return await self._asked(Explain(uid), _decode_explanation)

    async def simulate(self, question: Simulate) -> list[SimulatedOutcome] | Refusal:
        return await self._asked(question, _decode_outlooks)

    async def figures(self, seconds: float = ANSWER_SECONDS_MAX) -> Figures | Refusal:
        return await self._asked(Count(), _decode_figures, seconds)

    async def close(self) -> None:
        await self._lane.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _asked(
        self, question: Question, decode: Callable[[bytes], T], seconds: float = ANSWER_SECONDS_MAX
    ) -> T | Refusal:
        raw = await self.ask(question, seconds)
        return raw if isinstance(raw, Refusal) else decode(raw)

    # Asking.

    def _give_up(self, number: int) -> None:
        """Nobody waits for this answer any more: the question is withdrawn."""
        self._given_up.append(number)
        self._wake.set()

    def _put_too_late(self, putting: asyncio.Future[int | None]) -> None:
        if not putting.cancelled() and putting.exception() is None and (number := putting.result()) is not None:
            self._give_up(number)

    async def _put(self, questions: Sequence[bytes]) -> Sequence[int | None]:
        async with self._database.reader() as db:
            ids = await store.ask(db, questions)
        return ids or [None] * len(questions)

    async def _answer_to(self, number: int) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        # It may be answered already; and while nobody waited nobody saw whether the connection is still there.
        self._wake.set()
        return await future

    # Answers.

    def _told(self, payload: str) -> None:
        if any(int(word) in self._waiting for word in payload.split(",")):
            self._wake.set()

    async def _listen(self) -> None:
        """For ever: wait for word of answers, and hand them out. A database that is away is waited for."""
        db: Connection | None = None
        try:
            while True:
                try:
                    if db is None or db.is_closed():
                        db = await self._database.connect()
                        await db.add_listener(store.ANSWERED, lambda *told: self._told(told[3]))
                    await self._collect(db)
                except AWAY as error:
                    log.info("inquiries wait for the database", error=repr(error))
                    await asyncio.sleep(POLL_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self._waiting else None):
                        await self._wake.wait()
        finally:
            if db is not None and not db.is_closed():
                db.terminate()

    async def _collect(self, db: Connection) -> None:
        self._wake.clear()
        if self._given_up:
            numbers, self._given_up = self._given_up, []
            await store.withdraw(db, numbers)
        if not self._waiting:
            return
        for number, raw in (await store.collect(db, self._waiting)).items():
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result(raw)
