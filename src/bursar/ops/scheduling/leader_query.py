"""Questions to the leader go through the database, so that it may run anywhere and needs no port.

Concurrent questions share one statement, and one connection that listens for answers. A notification is only a hint:
answers are also polled for. Without a leader, a question is refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
import structlog

from bursar.core.scheduling.explain.explain_types import (
    ExplainAnswer,
    Figures,
    Holding,
    QueueEstimate,
    SimulatedOutcome,
)
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime.lane import Lane, Overloaded
from bursar.store.db.database import AWAY, Connection, Database
from bursar.store.scheduling import leader_query as store
from bursar.wire.to_scheduler.ask import PriorityClassView

log = structlog.get_logger()

T = TypeVar("T")

ANSWER_SECONDS_MAX = 5.0
ESTIMATE_SECONDS_MAX = 0.2
BOOST_SECONDS_MAX = 1.0
# After a leader did not answer, optional answers are not waited for again within this time.
SILENCE_SECONDS = 5.0
ESTIMATES_PER_SECOND = 100
POLL_SECONDS = 0.25
WAITING_MAX = 2048


# Questions.


class Explain(msgspec.Struct, tag="explain", frozen=True):
    """Asks why an allocation is pending."""

    uid: str


class InUse(msgspec.Struct, tag="in-use", frozen=True):
    """Asks for the share and burst mark of a placed allocation."""

    uid: str


class LookQuestion(msgspec.Struct, tag="look", frozen=True):
    """Asks for an allocation's queue position and estimated start; of a job, for those of its oldest pending member. A
    caller that has just committed it gives the `revision`, which the leader may not have read yet."""

    uid: str = ""
    namespace: str = ""
    job: str = ""
    revision: int = 0


class BoostedQuestion(msgspec.Struct, tag="boosted", frozen=True):
    """Asks for the queue position of a job's allocations with this priority."""

    namespace: str
    job: str
    priority: int


class Draft(msgspec.Struct, frozen=True):
    """A hypothetical allocation."""

    uid: str
    tenant: str
    labels: dict[str, str]
    doc: msgspec.Raw
    user: str = ""  # who would submit it


class Simulate(msgspec.Struct, tag="simulate", frozen=True):
    """Asks for the outcome of submitting these together."""

    drafts: list[Draft]
    priorities: dict[str, PriorityClassView]


class Count(msgspec.Struct, tag="count", frozen=True):
    """Asks for the scheduler's statistics."""


Question = Explain | InUse | LookQuestion | BoostedQuestion | Simulate | Count


class LeaderAnswer(msgspec.Struct, frozen=True):
    """The leader's answer, or `error` if it failed."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""


encode = msgspec.json.Encoder().encode
decode_question = msgspec.json.Decoder(Question).decode
_decode_answer = msgspec.json.Decoder(LeaderAnswer).decode
_decode_explanation: Callable[[bytes], ExplainAnswer | None] = msgspec.json.Decoder(ExplainAnswer | None).decode
_decode_holding: Callable[[bytes], Holding | None] = msgspec.json.Decoder(Holding | None).decode
_decode_estimate: Callable[[bytes], QueueEstimate | None] = msgspec.json.Decoder(QueueEstimate | None).decode
_decode_position: Callable[[bytes], int | None] = msgspec.json.Decoder(int | None).decode
_decode_outcomes: Callable[[bytes], list[SimulatedOutcome]] = msgspec.json.Decoder(list[SimulatedOutcome]).decode
_decode_figures: Callable[[bytes], Figures] = msgspec.json.Decoder(Figures).decode

NO_LEADER = Refusal(
    Code.UNAVAILABLE,
    "no scheduler is active at the moment, and only the scheduler can answer this",
    "Try again in a few seconds; if that does not help, check that `bursar controller` runs.",
    retry_after_seconds=2,
)
SILENT = Refusal(
    Code.UNAVAILABLE,
    f"the scheduler did not answer within {ANSWER_SECONDS_MAX:g} s",
    "Try again in a few seconds: it may be busy, or a new leader may be taking over.",
    retry_after_seconds=2,
)


class LeaderQueries:
    """The questions of one process to the leader."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lane: Lane[bytes, int | None] = Lane("inquiry", self._put, capacity=WAITING_MAX, batch_max=64)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._given_up: list[int] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._silent_until = float("-inf")
        self._estimates_since = float("-inf")
        self._estimates = 0

    async def ask(self, question: Question, seconds: float = ANSWER_SECONDS_MAX) -> bytes | Refusal:
        """The leader's answer as JSON, or a refusal."""
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

    async def estimate(self, look: LookQuestion) -> QueueEstimate | None:
        """The position and estimate of one object, rate limited so that reads stay fast."""
        now = asyncio.get_running_loop().time()
        if now - self._estimates_since >= 1.0:
            self._estimates_since, self._estimates = now, 0
        self._estimates += 1
        if self._estimates > ESTIMATES_PER_SECOND:
            return None
        return await self._optional(look, _decode_estimate, ESTIMATE_SECONDS_MAX)

    async def boosted(self, namespace: str, job: str, priority: int) -> int | None:
        """The position that a job would have with this priority."""
        return await self._optional(BoostedQuestion(namespace, job, priority), _decode_position, BOOST_SECONDS_MAX)

    async def holding(self, uid: str) -> Holding | None:
        return await self._optional(InUse(uid), _decode_holding, BOOST_SECONDS_MAX)

    async def _optional(self, question: Question, decode: Callable[[bytes], T | None], seconds: float) -> T | None:
        """An optional answer: after the leader did not answer, it is skipped for a while."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._silent_until:
            return None
        try:
            found = await self._asked(question, decode, seconds)
        except AWAY:
            return None
        if isinstance(found, Refusal):
            self._silent_until = max(self._silent_until, loop.time() + SILENCE_SECONDS)
            return None
        return found

    async def explain(self, uid: str) -> ExplainAnswer | Refusal | None:
        return await self._asked(Explain(uid), _decode_explanation)

    async def simulate(self, question: Simulate) -> list[SimulatedOutcome] | Refusal:
        return await self._asked(question, _decode_outcomes)

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
        """Withdraw a question whose caller has left."""
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
        # It may be answered already, and a loss of the connection is not noticed while no question is open.
        self._wake.set()
        return await future

    # Answers.

    def _told(self, payload: str) -> None:
        if any(int(word) in self._waiting for word in payload.split(",")):
            self._wake.set()

    async def _listen(self) -> None:
        """Wait for answers and deliver them, for ever, also through database outages."""
        db: Connection | None = None
        try:
            while True:
                try:
                    if db is None or db.is_closed():
                        db = await self._database.connect()
                        await db.add_listener(store.ANSWERED, lambda *told: self._told(told[3]))
                    await self._collect(db)
                except AWAY as error:
                    log.info("queries_wait", message="questions to the leader wait for the database", error=repr(error))
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
