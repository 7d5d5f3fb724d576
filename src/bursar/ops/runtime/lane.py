"""The lane: a small generic batcher.

One batch is in flight; the next takes the commands that were queued meanwhile. There are no timers: an idle lane adds
no delay, and a busy one commits hundreds of operations at once. A lane with more than one runner starts another batch
beside the first once a full one is queued: its reads that need none of the same locks overlap with the other's
decisions. Correctness never depends on the lane. It is bounded, in commands and in bytes, and fair between tenants: a
batch takes commands from the tenants round robin, and a full lane sheds from the longest queue, or from the heaviest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from bursar.commands.command import Command, Reply
from bursar.core.values.refusal import Code, Refusal
from bursar.ops.runtime import metrics
from bursar.store.db.database import Unavailable

C = TypeVar("C")
A = TypeVar("A")
C_in = TypeVar("C_in", contravariant=True)
A_in = TypeVar("A_in", contravariant=True)
A_out = TypeVar("A_out")

log = structlog.get_logger()

# Locks are held while a batch is decided and saved, so batches shrink when that takes much longer than it should. The
# limit is generous: in a busy process most of a batch's time is spent waiting, and smaller batches make that worse.
HOLD_SECONDS = 0.1
BATCH_MIN = 64
BYTES_MAX = 64 << 20
FEED_MAX = 2048  # commands of a plan that are queued at once


class Overloaded(Exception):
    """The lane is full: the command was not taken, and nothing happened."""

    def __init__(self, lane: str, retry_after_seconds: int) -> None:
        super().__init__(f"{lane} is overloaded; try again in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class Closed(Exception):
    """The lane is shutting down."""


class _Answer(Protocol[A_in]):
    """The receiver of an answer: a future, or a part of one. It is done when the caller has left."""

    def done(self) -> bool: ...
    def set_result(self, result: A_in, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class _Together(Generic[A]):
    """The answers to many commands: the future completes once all have come."""

    __slots__ = ("_answers", "_left", "future")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[A | BaseException]] = loop.create_future()
        self._answers: dict[int, A | BaseException] = {}
        self._left = count

    def tell(self, place: int, answer: A | BaseException) -> None:
        self._answers[place] = answer
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result([self._answers[one] for one in range(len(self._answers))])


class _Part(Generic[A]):
    __slots__ = ("_place", "_together")

    def __init__(self, together: _Together[A], place: int) -> None:
        self._together, self._place = together, place

    def done(self) -> bool:
        return self._together.future.done()

    def set_result(self, result: A, /) -> None:
        self._together.tell(self._place, result)

    def set_exception(self, exception: BaseException, /) -> None:
        self._together.tell(self._place, exception)


@dataclass(slots=True)
class _Entry(Generic[C, A]):
    command: C
    tenant: str
    queued_at: float
    answer: _Answer[A]
    weight: int = 0


RunBatch = Callable[[Sequence[C]], Awaitable[Sequence[A]]]


class Taking(Protocol[C_in, A_out]):
    """A lane, or several that share the load."""

    def put(self, command: C_in, tenant: str = "") -> asyncio.Future[A_out]: ...


async def put_all(lane: Taking[C, A], commands: Sequence[C], tenant: str = "") -> list[A | BaseException]:
    """Queue all commands, and wait for all their answers. A command that was shed or failed is answered by its
    exception, and the others are still waited for."""
    return await asyncio.gather(*(_put(lane, one, tenant) for one in commands), return_exceptions=True)


def _put(lane: Taking[C, A], command: C, tenant: str) -> asyncio.Future[A]:
    try:
        return lane.put(command, tenant)
    except (Overloaded, Closed) as error:
        refused: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused


def raise_first(answers: Sequence[A | BaseException]) -> list[A]:
    """All answers, or the first exception among them."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


class Lane(Generic[C, A]):
    """A batcher of commands. Each of `runs` commits a batch of commands and returns their answers, in order. `weigh` is
    the number of bytes that a queued command holds."""

    def __init__(
        self,
        name: str,
        *runs: RunBatch[C, A],
        capacity: int = 4096,
        batch_max: int = 256,
        weigh: Callable[[C], int] | None = None,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self.name = name
        self._runs = runs
        self._free = list(reversed(runs))
        self._capacity = capacity
        self._batch_max = batch_max
        self._batch_limit = batch_max
        self._weigh = weigh
        self._bytes_max = bytes_max
        self._queues: dict[str, deque[_Entry[C, A]]] = {}
        self._weights: dict[str, int] = {}  # bytes in each queue
        self._weight = 0
        self._turns: deque[str] = deque()
        self._size = 0
        self._batch_seconds = 0.01
        self._sizes = metrics.LANE_BATCH.labels(name)
        self._waits = metrics.LANE_WAIT.labels(name)
        self._seconds = metrics.LANE_SECONDS.labels(name)
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    async def submit(self, command: C, tenant: str = "") -> A:
        """Queue a command and wait until it is decided and committed."""
        return await self.put(command, tenant)

    def put(self, command: C, tenant: str = "") -> asyncio.Future[A]:
        """Queue a command; its future completes when it is decided and committed."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._put(command, tenant, answer)
        return answer

    def put_together(self, commands: Sequence[tuple[C, str]]) -> asyncio.Future[list[A | BaseException]]:
        """Queue many commands, each with its tenant; their answers come together. A command that was shed or failed is
        answered by its exception, and the others are still waited for."""
        together: _Together[A] = _Together(len(commands), asyncio.get_running_loop())
        for place, (command, tenant) in enumerate(commands):
            part = _Part(together, place)
            try:
                self._put(command, tenant, part)
            except (Overloaded, Closed) as error:
                part.set_exception(error)
        if not commands:
            together.future.set_result([])
        return together.future

    def _put(self, command: C, tenant: str, answer: _Answer[A]) -> None:
        if self._closed:
            raise Closed(f"{self.name} is shutting down")
        weight = self._weigh(command) if self._weigh is not None else 0
        if self._size >= self._capacity:
            self._shed(tenant)
        if self._weight + weight > self._bytes_max:
            self._shed_weight(tenant, weight)
        loop = asyncio.get_running_loop()
        self._push(_Entry(command, tenant, loop.time(), answer, weight))
        busy = len(self._runs) - len(self._free)
        if self._free and (not busy or self._size >= self._batch_limit * (busy + 1)):
            self._start(loop)

    async def close(self) -> None:
        """Accept no more commands, and finish the queued ones."""
        self._closed = True
        await asyncio.gather(*self._workers, return_exceptions=True)

    @property
    def size(self) -> int:
        return self._size

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        worker = loop.create_task(self._work(self._free.pop()), name=f"lane-{self.name}")
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    def _push(self, entry: _Entry[C, A]) -> None:
        queue = self._queues.get(entry.tenant)
        if queue is None:
            queue = self._queues[entry.tenant] = deque()
            self._turns.append(entry.tenant)
        queue.append(entry)
        self._weights[entry.tenant] = self._weights.get(entry.tenant, 0) + entry.weight
        self._weight += entry.weight
        self._size += 1

    def _shed(self, tenant: str) -> None:
        """Refuse the newest command of the longest queue, which may be the command that just came."""
        longest = max(self._queues, key=lambda name: len(self._queues[name]))
        mine = len(self._queues.get(tenant, ()))
        if mine >= len(self._queues[longest]) - 1:
            raise self._overloaded()
        self._refuse_newest(longest)

    def _shed_weight(self, tenant: str, weight: int) -> None:
        """Refuse commands of the heaviest queue, counting the new command, until its bytes fit."""
        mine = self._weights.get(tenant, 0) + weight
        while self._weight and self._weight + weight > self._bytes_max:
            heaviest = max(self._weights, key=lambda name: self._weights[name])
            if mine >= self._weights[heaviest]:
                raise self._overloaded()
            self._refuse_newest(heaviest)

    def _refuse_newest(self, tenant: str) -> None:
        victim = self._queues[tenant].pop()
        self._put_down(victim)
        if not self._queues[tenant]:
            self._turns.remove(tenant)
            self._forget(tenant)
        if not victim.answer.done():
            victim.answer.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        metrics.LANE_SHED.labels(self.name).inc()
        return Overloaded(self.name, self._retry_after_seconds())

    def _put_down(self, entry: _Entry[C, A]) -> None:
        self._size -= 1
        self._weight -= entry.weight
        self._weights[entry.tenant] -= entry.weight

    def _forget(self, tenant: str) -> None:
        del self._queues[tenant]
        del self._weights[tenant]

    def _retry_after_seconds(self) -> int:
        batches = self._size / max(1, self._batch_limit)
        return max(1, min(30, round(batches * self._batch_seconds)))

    def _take(self) -> list[_Entry[C, A]]:
        """Take a batch, round robin over the tenants. Commands whose callers have left are dropped."""
        batch: list[_Entry[C, A]] = []
        while self._turns and len(batch) < self._batch_limit:
            tenant = self._turns.popleft()
            queue = self._queues[tenant]
            entry = queue.popleft()
            self._put_down(entry)
            if queue:
                self._turns.append(tenant)
            else:
                self._forget(tenant)
            if not entry.answer.done():
                batch.append(entry)
        return batch

    async def _work(self, run: RunBatch[C, A]) -> None:
        try:
            while batch := self._take():
                await self._answer(run, batch)
        finally:
            self._free.append(run)

    async def _answer(self, run: RunBatch[C, A], batch: Sequence[_Entry[C, A]]) -> None:
        started = asyncio.get_running_loop().time()
        self._sizes.observe(len(batch))
        # The longest wait of the batch: its first command is the oldest.
        self._waits.observe(started - batch[0].queued_at)
        answers = await self._isolate(run, [entry.command for entry in batch], fresh=True)
        for entry, answer in zip(batch, answers, strict=True):
            if entry.answer.done():
                continue
            if isinstance(answer, BaseException):
                entry.answer.set_exception(answer)
            else:
                entry.answer.set_result(answer)
        self._adapt(len(batch), asyncio.get_running_loop().time() - started)

    def _adapt(self, size: int, seconds: float) -> None:
        self._batch_seconds += 0.2 * (seconds - self._batch_seconds)
        self._seconds.observe(seconds)
        # With another batch running, half of the time is spent waiting for the other's locks.
        if seconds > HOLD_SECONDS * (len(self._runs) - len(self._free)):
            self._batch_limit = max(min(BATCH_MIN, self._batch_max), self._batch_limit * 3 // 4)
        elif size == self._batch_limit:
            self._batch_limit = min(self._batch_max, self._batch_limit + BATCH_MIN)

    async def _isolate(self, run: RunBatch[C, A], commands: list[C], *, fresh: bool) -> list[A | BaseException]:
        """Run a batch. After an unexpected failure it is retried whole, then in halves, so that one command that always
        fails does not fail the others."""
        try:
            answers: list[A | BaseException] = list(await run(commands))
            assert len(answers) == len(commands), f"{len(answers)} answers to {len(commands)} commands"
            return answers
        except Unavailable as error:
            return [error] * len(commands)
        except Exception as error:
            log.warning(
                "batch_failed", message="a batch failed unexpectedly", lane=self.name, size=len(commands),
                error=repr(error),
            )  # fmt: skip
            if fresh and len(commands) > 1:
                return await self._isolate(run, commands, fresh=False)
            if len(commands) == 1:
                name = type(commands[0]).__name__
                log.exception("command_failed", message="a command failed unexpectedly", lane=self.name, command=name)
                return [error]
        middle = len(commands) // 2
        left = await self._isolate(run, commands[:middle], fresh=False)
        return left + await self._isolate(run, commands[middle:], fresh=False)


# The commands of a plan: all of them, in order, without shedding the commands of other callers.


async def feed(lane: Lane[Command, Reply], commands: Sequence[Command]) -> list[Reply]:
    """Put many commands into a lane, in their order, and wait for all their answers; a full lane refuses."""
    replies: list[Reply] = []
    for start in range(0, len(commands), FEED_MAX):
        some = [(command, command.key.namespace) for command in commands[start : start + FEED_MAX]]
        replies += [_reply(answer) for answer in await lane.put_together(some)]
    return replies


def _reply(answer: Reply | BaseException) -> Reply:
    if not isinstance(answer, BaseException):
        return answer
    if isinstance(answer, Overloaded):
        return Refusal(Code.OVERLOADED, str(answer), retry_after_seconds=answer.retry_after_seconds)
    raise answer
