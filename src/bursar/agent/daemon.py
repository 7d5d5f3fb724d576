"""The agent daemon: it connects the state machine, the executor, the heartbeat stream and the agent's own server.

All its state is on disk and its commands run under shims. The agent may therefore end at any moment: running work
continues, unless the agent was started with --drain-on-stop.
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
USAGE_SECONDS = 60.0  # between two usage reports of all running placements
FIRST_LOOK_SECONDS_MAX = 2.0  # the first heartbeat waits no longer for the load
DRAIN_GRACE_SECONDS = 30
DRAIN_SECONDS_MAX = 60.0
STOPPING = "NodeStopping"
NOT_BELIEVED = "prepaid work stops when its paid time ends, unless a later heartbeat brings a valid token"


class Daemon:
    """The node, for the heartbeat stream and for the agent's server."""

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
        self._distrusted_at = -math.inf  # when a rejected lease token was last logged
        self._executor = Executor(folder, name, self._happened, settings=settings)
        self._sandbox = (settings or ExecutorSettings()).sandbox
        self._load = NO_LOAD
        self._capacity: Mapping[str, str] = probe.inventory().capacity
        self._capacity_told: Mapping[str, str] = {}
        self._poke: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()  # the next timer may have changed
        self._draining = False
        self._empty = asyncio.Event()  # while draining: nothing runs, and every end is acknowledged
        self._usage_at = -math.inf
        self._looked_at = clock()
        self.address = ""

    # Life.

    async def open(self) -> None:
        """Adopt the placements of the previous agent process and measure the load, for the first heartbeat."""
        cgroups = self._executor.cgroups
        log.info(
            "cgroups_probed",
            message="resource limits use this cgroup version",
            cgroups=cgroups.version,
            reason=cgroups.message,
        )
        if self._sandbox.isolates:
            log.info("sandbox_enabled", message="tenants are isolated from each other", by=self._sandbox.binary)
        else:
            log.warning(
                "sandbox_unavailable", message="tenants are not isolated from each other", reason=self._sandbox.why
            )
        self._do(await self._executor.open(self._machine))
        if left := self._machine.inventory():
            log.info(
                "placements_adopted", message="placements of the previous agent process continue", placements=len(left)
            )
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS_MAX):
                await self._weigh()

    def ask_with(self, ask: Ask) -> None:
        """Set the call that prepares commands before they start."""
        self._executor.ask = ask

    async def run(self, poke: Callable[[], None]) -> None:
        """Run until cancelled. `poke` is called when there is news."""
        self._poke = poke
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time(), name="agent-time")
            group.create_task(self._measure(), name="agent-measure")
            if self._sandbox.isolates:
                group.create_task(self._executor.guard_disk(), name="agent-disk")

    async def drain(self) -> None:
        """Stop every placement, and wait until all have ended and the ends are acknowledged, within a time limit."""
        self._draining = True
        live = [one for one in self._machine.inventory() if one.state not in ENDED]
        log.info("drain_started", message="stopping every placement on this node", placements=len(live))
        message = "the node's agent is stopping all work on its node"
        self._tell([Stop(*one.place, DRAIN_GRACE_SECONDS, STOPPING, message) for one in live])
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS_MAX):
                await self._empty.wait()
        if left := len(self._machine.inventory()):
            log.warning(
                "drain_incomplete", message="placements did not end in time, or their end is not acknowledged yet",
                placements=left,
            )  # fmt: skip

    async def close(self) -> None:
        await self._executor.close()

    async def _keep_time(self) -> None:
        while True:
            next_at = self._machine.next_at
            with suppress(TimeoutError):
                wait = max(0.0, next_at - self._clock())
                # Timers stop while the machine sleeps; CLOCK_BOOTTIME does not.
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
                self._machine.measured(await self._executor.usages())
                await self._look()
            except OSError:
                log.exception("usage_measurement_failed", message="the usage of placements cannot be measured")
            await asyncio.sleep(MEASURE_SECONDS)

    async def _weigh(self) -> None:
        """Measure the load. If that fails, the last measurement stays."""
        try:
            self._load = await asyncio.to_thread(self._probe.load)
        except OSError:
            log.exception("load_measurement_failed", message="the load of the node cannot be measured")

    async def _look(self) -> None:
        """Look at the capacity once a minute: it may change while the node runs, as when a GPU is lost."""
        if self._clock() - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = self._clock()
        found = await asyncio.to_thread(self._probe.inventory)
        if found.capacity != self._capacity:
            log.warning(
                "capacity_changed",
                message="the node's capacity has changed",
                before=dict(self._capacity),
                now=found.capacity,
            )
            self._capacity = found.capacity
            self._poke()

    # Events and instructions.

    def _happened(self, event: Event) -> None:
        self._do(hear(self._machine, event))
        self._poke()

    def _do(self, instructions: Iterable[Instruction]) -> None:
        self._executor.execute(instructions)
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
        """Running placements that `news` does not name, once a minute: their usage grows without a state change."""
        if self._clock() - self._usage_at < USAGE_SECONDS:
            return []
        self._usage_at = self._clock()
        named = {one.place for one in news}
        return [
            one for one in self._machine.inventory() if one.state is PlacementState.RUNNING and one.place not in named
        ]

    def hear(self, answer: HeartbeatAnswer, sent_at: float | None) -> None:
        """Apply an answer. The run-lease comes first: directives may need it to start. Before that, expired placements
        end: a new run-lease must not revive work that may already run elsewhere, as after a suspend. Paid time comes
        after the directives, which name its placements."""
        if sent_at is not None:
            self._do(self._machine.due(self._clock()))
            self._do(self._machine.granted(answer.lease_seconds, sent_at, answer.kill_grace_seconds))
        if answer.directives or answer.complete:
            self._tell(answer.directives, complete=answer.complete)
        if sent_at is not None and answer.leases:
            self._do(self._machine.paid(self._verified(answer, sent_at), sent_at))
            if self._machine.has_news:
                self._poke()
        if answer.acknowledged:
            self._do(self._machine.acknowledged(answer.acknowledged))

    def _verified(self, answer: HeartbeatAnswer, sent_at: float) -> Mapping[Place, LeaseGrant]:
        """The grants that a valid token signs. They are journaled before anything runs on them."""
        self._trust.learn(answer.signing_keys)
        verified = self._trust.believe(answer.leases, answer.lease_token, answer.seq)
        if verified.why and self._clock() - self._distrusted_at > LOOK_SECONDS:
            self._distrusted_at = self._clock()
            log.warning(
                "lease_token_rejected", message="a lease token cannot be verified: its grants are ignored",
                error=verified.why, next=NOT_BELIEVED,
            )  # fmt: skip
        if verified.signed:
            used = {one.place: one.usage.seconds for one in self._machine.inventory()}
            token, grants, signed = answer.lease_token, verified.grants, verified.signed
            self._executor.keep(window(boot_id(), token, sent_at, grants, signed, used))
        return verified.grants

    def _tell(self, directives: Sequence[Directive], *, complete: bool = False) -> None:
        wanted = [self._wipe.of(one) if isinstance(one, Run) and one.wipe else one for one in directives]
        done = self._machine.tell(wanted, self._clock(), complete=complete)
        self._do(done)
        if directives or done:
            self._poke()

    # For the agent's server.

    def tell(self, directive: Directive) -> None:
        self._tell([directive])

    def snapshot(self) -> Snapshot:
        return Snapshot(self._capacity, self._load, self._machine.inventory(), self._executor.cgroups.version)

    def log(self, place: Place) -> tuple[Path, Callable[[], bool]] | None:
        folder = self._executor.log(*place)
        return None if folder is None else (folder, lambda: self._has_ended(place))

    def _has_ended(self, place: Place) -> bool:
        """A placement that the machine no longer holds has ended, too."""
        uid, epoch = place
        return not any(
            one.uid == uid and epoch in (0, one.epoch) and one.state not in ENDED for one in self._machine.inventory()
        )


def features_of(sandbox: Sandbox, wipe: Wipe) -> tuple[str, ...]:
    """The features of this agent that decide which work its node may run."""
    return (*((TRACELESS,) if sandbox.is_traceless else ()), *((WIPES,) if wipe.hook else ()))
