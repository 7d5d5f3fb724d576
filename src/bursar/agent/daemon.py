"""The agent: a machine that decides, a shell that acts, a stream and a door to speak through.

It holds nothing that would be lost with it. What runs, runs under shims; what was said and what ended lies on the disk.
So it stops by simply ending, and whatever runs goes on, unless it is told to stop that too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from bursar.agent.control.codec import NO_LOAD, TRACELESS, WIPES, HeartbeatAnswer, OutgoingHeartbeat
from bursar.agent.control.prepare import Ask
from bursar.agent.control.server import Snapshot
from bursar.agent.executor.executor import Event, Executor, ExecutorSettings, hear
from bursar.agent.executor.placement_dir import boot_id
from bursar.agent.executor.wipe import NO_WIPE, Wipe
from bursar.agent.host.probe import Probe
from bursar.agent.host.sandbox import Sandbox
from bursar.agent.machine.lease_token import Trust
from bursar.agent.machine.paid_window import window
from bursar.agent.machine.state import Instruction, Machine
from bursar.agent.machine.types import ENDED, Directive, LeaseGrant, Place, PlacementState, PlacementStatus, Run, Stop
from bursar.agent.shim.clock import boot_seconds

log = structlog.get_logger()

MEASURE_SECONDS = 5.0
CLOCK_SECONDS = 2.0
LOOK_SECONDS = 60.0
USAGE_SECONDS = 60.0  # how often it is told what everything has used so far
FIRST_LOOK_SECONDS_MAX = 2.0  # at what is in use: the first beat waits for no longer
DRAIN_GRACE_SECONDS = 30
DRAIN_SECONDS_MAX = 60.0
STOPPING = "NodeStopping"
NOT_BELIEVED = "what runs here is stopped when its paid time is over; the next beat may bring a token that is right"


class Daemon:
    """Speaks for the node on the stream, and answers for it at the door."""

    def __init__(
        self,
        name: str,
        folder: Path,
        probe: Probe,
        *,
        settings: ExecutorSettings | None = None,
        wipe: Wipe = NO_WIPE,
        clock: Callable[[], float] = boot_seconds,
    ) -> None:
        self.name = name
        self._probe = probe
        self._wipe = wipe
        self._clock = clock
        self._machine = Machine()
        self._trust = Trust(name)
        self._distrusted_at = -math.inf  # when it was last told that something was not believed
        self._shell = Executor(folder, name, self._happened, settings=settings)
        self._sandbox = (settings or ExecutorSettings()).sandbox
        self._load = NO_LOAD
        self._capacity: Mapping[str, str] = probe.inventory().capacity
        self._capacity_told: Mapping[str, str] = {}
        self._poke: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()  # what is due, and when, may be another
        self._draining = False
        self._empty = asyncio.Event()  # while draining: nothing runs any more, and every end is acknowledged
        self._usage_at = -math.inf
        self._looked_at = clock()
        self.address = ""

    # Life.

    async def open(self) -> None:
        """Find what an earlier life left, and what is in use: the first beat tells both."""
        cgroups = self._shell.cgroups
        log.info("how limits are kept", cgroups=cgroups.version, why=cgroups.message)
        if self._sandbox.isolates:
            log.info("tenants are isolated from each other", by=self._sandbox.binary)
        else:
            log.warning("tenants are not isolated from each other", why=self._sandbox.why)
        self._do(await self._shell.open(self._machine))
        if left := self._machine.inventory():
            log.info("found what was here before", placements=len(left))
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS_MAX):
                await self._weigh()

    def ask_with(self, ask: Ask) -> None:
        """Whom to ask what commands need before they are started."""
        self._shell.ask = ask

    async def run(self, poke: Callable[[], None]) -> None:
        """Until it is cancelled. `poke` is called when there is news."""
        self._poke = poke
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time(), name="agent-time")
            group.create_task(self._measure(), name="agent-measure")
            if self._sandbox.isolates:
                group.create_task(self._shell.guard_disk(), name="agent-disk")

    async def drain(self) -> None:
        """Stop everything, and wait until that is done and known, within reason."""
        self._draining = True
        live = [one for one in self._machine.inventory() if one.state not in ENDED]
        log.info("stopping what runs here", placements=len(live))
        message = "the node's agent was told to stop what runs here"
        self._tell([Stop(*one.place, DRAIN_GRACE_SECONDS, STOPPING, message) for one in live])
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS_MAX):
                await self._empty.wait()
        if left := len(self._machine.inventory()):
            log.warning("not everything has ended, or is known to have", placements=left)

    async def close(self) -> None:
        await self._shell.close()

    async def _keep_time(self) -> None:
        while True:
            next_at = self._machine.next_at
            with suppress(TimeoutError):
                wait = max(0.0, next_at - self._clock())
                # Timers stand still while the machine sleeps, and our clock does not.
                async with asyncio.timeout(None if next_at == math.inf else min(wait, CLOCK_SECONDS)):
                    await self._changed.wait()
            self._changed.clear()
            if due := self._machine.due(self._clock()):
                self._do(due)
                self._poke()

    async def _measure(self) -> None:
        while True:
            await self._weigh()
            try:
                self._machine.measured(await self._shell.usages())
                await self._look()
            except OSError:
                log.exception("what runs here could not be measured")
            await asyncio.sleep(MEASURE_SECONDS)

    async def _weigh(self) -> None:
        """What is in use. What cannot be told is as it was told last, and keeps nothing from running."""
        try:
            self._load = await asyncio.to_thread(self._probe.load)
        except OSError:
            log.exception("the node could not be measured")

    async def _look(self) -> None:
        """Now and then: what a node has may change while it runs, as when a GPU is lost."""
        if self._clock() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._clock()
        found = await asyncio.to_thread(self._probe.inventory)
        if found.capacity != self._capacity:
            log.warning("the node's capacity has changed", before=dict(self._capacity), now=found.capacity)
            self._capacity = found.capacity
            self._poke()

    # What happens.

    def _happened(self, event: Event) -> None:
        self._do(hear(self._machine, event))
        self._poke()

    def _do(self, instructions: Iterable[Instruction]) -> None:
        self._shell.execute(instructions)
        self._changed.set()
        if self._draining and not self._machine.inventory():
            self._empty.set()

    # For the stream.

    def heartbeat(self, *, first: bool) -> OutgoingHeartbeat:
        news, capacity = self._machine.news(), self._capacity
        is_told = capacity == self._capacity_told and not first
        self._capacity_told = capacity
        statuses = self._machine.inventory() if first else [*news, *self._used(news)]
        return OutgoingHeartbeat(
            statuses=statuses,
            inventory=first,
            load=self._load,
            capacity={} if is_told else capacity,
            address=self.address if first else "",
            nonce=self._trust.begin() if first else "",
            isolation=self._sandbox.named if first else "",
            isolation_message=self._sandbox.why if first else "",
            features=features_of(self._sandbox, self._wipe) if first else (),
        )

    def _used(self, news: Sequence[PlacementStatus]) -> list[PlacementStatus]:
        """What runs and was not named already, now and then: its use grows without being news."""
        if self._clock() - self._usage_at < USAGE_SECONDS:
            return []
        self._usage_at = self._clock()
        named = {one.place for one in news}
        return [
            one for one in self._machine.inventory() if one.state is PlacementState.RUNNING and one.place not in named
        ]

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        """The node's lease first: what is wanted may need it to start. But a new one is not for what has outlived its
        own, as when all of us stood still: that may run elsewhere by now. What is paid for must be known by then."""
        if sent_at is not None:
            self._do(self._machine.due(self._clock()))
            self._do(self._machine.granted(answer.lease_seconds, sent_at, answer.kill_grace_seconds))
        if answer.directives or answer.complete:
            self._tell(answer.directives, complete=answer.complete)
        if sent_at is not None and answer.leases:
            self._do(self._machine.paid(self._believed(answer, sent_at), sent_at))
            self._poke_for_news()
        if answer.acknowledged:
            self._do(self._machine.acknowledged(answer.acknowledged))

    def _believed(self, answer: HeartbeatAnswer, sent_at: float) -> Mapping[Place, LeaseGrant]:
        """What is signed of what was granted. It is in the journal before anything runs on it."""
        self._trust.learn(answer.signing_keys)
        believed = self._trust.believe(answer.leases, answer.lease_token, answer.seq)
        if believed.why and self._clock() - self._distrusted_at > LOOK_SECONDS:
            self._distrusted_at = self._clock()
            log.warning("paid time was granted that is not believed", why=believed.why, next=NOT_BELIEVED)
        if believed.signed:
            used = {one.place: one.usage.seconds for one in self._machine.inventory()}
            token, grants, signed = answer.lease_token, believed.grants, believed.signed
            self._shell.keep(window(boot_id(), token, sent_at, grants, signed, used))
        return believed.grants

    def _poke_for_news(self) -> None:
        if self._machine.has_news:
            self._poke()

    def _tell(self, directives: Sequence[Directive], *, complete: bool = False) -> None:
        wanted = [self._wipe.of(one) if isinstance(one, Run) and one.wipe else one for one in directives]
        done = self._machine.tell(wanted, self._clock(), complete=complete)
        self._do(done)
        if directives or done:
            self._poke()

    # For the door.

    def tell(self, directive: Directive) -> None:
        self._tell([directive])

    def snapshot(self) -> Snapshot:
        return Snapshot(self._capacity, self._load, self._machine.inventory(), self._shell.cgroups.version)

    def log(self, place: Place) -> tuple[Path, Callable[[], bool]] | None:
        folder = self._shell.log(*place)
        return None if folder is None else (folder, lambda: self._has_ended(place))

    def _has_ended(self, place: Place) -> bool:
        """What the machine does not hold any more has ended, too."""
        uid, epoch = place
        return not any(
            one.uid == uid and epoch in (0, one.epoch) and one.state not in ENDED for one in self._machine.inventory()
        )


def features_of(sandbox: Sandbox, wipe: Wipe) -> tuple[str, ...]:
    """The properties of an agent that bear on who may use its node."""
    return (*((TRACELESS,) if sandbox.is_traceless else ()), *((WIPES,) if wipe.hook else ()))
