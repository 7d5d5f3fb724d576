"""The `NodeAgent` service of the control plane: one heartbeat stream per node.

Each heartbeat is processed in this order:

1. Record it, which grants the run-lease and loads the claims of the allocations it names.
2. Report their statuses through the bind lane. Only committed reports are acknowledged. Reports for an older epoch, or
   for an allocation placed elsewhere, are acknowledged but not applied; if such work still runs, it is stopped.
3. Extend every lease that pays for work on the node. The answer grants the paid time.

While the database is unreachable, the stream stays open without an answer, and no report is lost.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from msgspec import Struct

from bursar.commands.command import Reply
from bursar.commands.credit.shortfall import granted_shortfall, note_of
from bursar.commands.nodes.liveness import EndLost
from bursar.commands.workloads.report import Report
from bursar.core.credit.lease import Grant
from bursar.core.nodes.liveness import LEASE_EXPIRED, WENT_WITH_ITS_NODE, Liveness
from bursar.core.objects.allocation import Phase
from bursar.core.objects.object import Origin
from bursar.core.values.address import may_name
from bursar.core.values.certificate import NodeIdentity
from bursar.core.values.names import dns_subdomain
from bursar.core.values.refusal import Code, Refusal, invalid
from bursar.core.values.replace import replace
from bursar.ops.credit.credit import note_shortfalls
from bursar.ops.credit.ledger import Extend
from bursar.ops.nodes.capacity import report_capacity, report_isolation
from bursar.ops.nodes.heartbeat import Heartbeat, HeartbeatHeard
from bursar.ops.nodes.node_ca import renew
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.ops.runtime.lane import Closed, Overloaded, put_all
from bursar.ops.runtime.runtime import Runtime
from bursar.ops.scheduling.placement import report
from bursar.rpc.codec import (
    ENDS,
    GRACE_SECONDS,
    PlacementReport,
    ReportedState,
    Said,
    end_directive,
    frozen_place,
    grant_message,
    load_document,
    order_of_place,
    phase_of_place,
    read_heartbeat,
    run_directive,
    short_place,
    stop_directive,
)
from bursar.rpc.hub import STOPPING, SUPERSEDED, AgentStream, Context, HeldPlacement, Hub, not_registered
from bursar.rpc.identity import identity_of, other_node, revoked
from bursar.rpc.late_usage import hear_last, measured_of
from bursar.rpc.lease_token import sign
from bursar.rpc.lease_transfer import follow_leases, is_fenced
from bursar.rpc.prepare import PreparingService
from bursar.rpc.problem import STATUS
from bursar.rpc.wipe import hear_wipes, is_wipe, wipe_wanted
from bursar.store.db.database import Unavailable
from bursar.store.nodes.heartbeat import NodeSession, ReportedPlacement, UsageRow, WantedPlace, WantedSet
from bursar.wire.kinds.node import node_key
from bursar.wire.scheduler.v1 import node_agent_pb2 as pb

log = structlog.get_logger()

T = TypeVar("T")

FIRST_SECONDS_MAX = 30.0
USAGE_SECONDS = 60.0
LOAD_SECONDS = 30.0
RETRY_SECONDS = 1.0
PASSING = (Unavailable, Overloaded)


class StreamRefused(Exception):
    """The stream ends with this refusal as its status."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.message)
        self.why = why


class AgentService(PreparingService):
    """The service. With `insecure` it requires no certificate and trusts the node name of the message."""

    def __init__(self, runtime: Runtime, hub: Hub, *, insecure: bool) -> None:
        self._runtime = runtime
        self._hub = hub
        self._insecure = insecure

    async def Heartbeat(self, _: object, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        stream: AgentStream | None = None
        try:
            identity = _accepted(identity_of(context, insecure=self._insecure))
            message = await _first(context)
            stream = AgentStream(_name(identity, message), uuid.uuid4().hex, context, _current_task())
            said = _accepted(read_heartbeat(message, stream.node))
            await self._hub.enter(stream)
            await _Conversation(self._runtime, self._hub, stream, identity).hold(said)
        except StreamRefused as error:
            await _abort(context, error.why)
        except Closed:
            await _abort(context, STOPPING)
        except asyncio.CancelledError:
            if stream is None or stream.ended is None:
                raise
            _current_task().uncancel()
            await _abort(context, stream.ended)
        finally:
            if stream is not None:
                self._hub.leave(stream)

    async def _elsewhere(self, _: object, context: Any) -> NoReturn:
        sentence = "the agent on the node serves this call; the control plane serves Heartbeat"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, sentence)
        raise AssertionError("abort does not return")

    BindAllocation = EvictAllocation = GetResourceSnapshot = ReadLog = _elsewhere  # type: ignore[assignment]


class HeartbeatOutcome(Struct):
    """The result of a heartbeat's reports: acknowledged ends, and placements that must not run here."""

    acknowledged: list[PlacementReport]
    strangers: list[PlacementReport]


class _Conversation:
    """One stream, heartbeat by heartbeat."""

    def __init__(self, runtime: Runtime, hub: Hub, stream: AgentStream, identity: NodeIdentity | None) -> None:
        self._runtime = runtime
        self._hub = hub
        self._stream = stream
        self._identity = identity
        self._seq = 0
        self._load_at = -LOAD_SECONDS
        self._capacity: Mapping[str, str] = {}  # reported capacity, not recorded yet
        self._isolation: tuple[str, str] | None = None  # reported isolation, not recorded yet

    async def hold(self, said: Said) -> None:
        """Answer heartbeats until the agent ends the stream."""
        await self._reply(said, first=True)
        while isinstance(message := await self._stream.context.read(), pb.HeartbeatRequest):
            _accepted(other_node(NodeIdentity(self._stream.node, 0), message.node_id))
            said = _accepted(read_heartbeat(message, self._stream.node))
            await self._reply(said)

    async def _reply(self, said: Said, *, first: bool = False) -> None:
        stream = self._stream
        if said.seq <= self._seq:
            raise StreamRefused(invalid(f"heartbeat {said.seq} came after heartbeat {self._seq}: seq must increase"))
        self._seq = said.seq
        patience = self._hub.patience
        wipes = [one for one in said.statuses if is_wipe(one)]
        reports = {**stream.unsaid, **{one.place: one for one in said.statuses if not is_wipe(one)}}
        stream.unsaid = {}
        whole = stream.whole_due
        # The recorded time includes the kill grace: shorter settings later do not shorten what was granted.
        alive_seconds = patience.run_lease_seconds + patience.kill_grace_seconds
        heard = await self._heard(said, reports.values(), alive_seconds, first=first, whole=whole)
        if first:
            stream.began, stream.nonce, stream.features = heard.began, said.nonce, said.features
            self._hub.take_over(stream)
        self._hub.heard(stream.node, heard.standing)
        self._capacity, self._isolation = said.capacity or self._capacity, said.isolation or self._isolation
        await self._say_capacity()
        wiped = await hear_wipes(self._runtime, stream.node, wipes)
        # A node that was lost may still run reassigned work: it gets its whole wanted set with its run-lease.
        wanted = await self._wanted() if whole or heard.standing != Liveness.READY else None
        claims = heard.claims if wanted is None else _claims(wanted, reports.values(), stream.node)
        outcome = await self._report(reports.values(), claims)
        acknowledged = [*await hear_last(self._runtime, stream, outcome.acknowledged, claims), *wiped]
        answer = pb.HeartbeatResponse(
            seq=said.seq,
            lease_duration_seconds=patience.run_lease_seconds,
            kill_grace_seconds=patience.kill_grace_seconds,
            beat_seconds=patience.heartbeat_seconds,
            acknowledgements=[pb.Acknowledgement(allocation_id=one.uid, epoch=one.epoch) for one in acknowledged],
            directives=[_stranger(one) for one in outcome.strangers],
            certificate=await self._renewed(said.certificate_request),
        )
        if wanted is not None:
            self._tell_all(answer, wanted, {one.place for one in outcome.acknowledged})
        paid = await self._pay(answer)
        await sign(self._runtime, stream, answer)
        await stream.answer(answer, since=None if wanted is None else wanted.revision)
        await self._note_shortfalls(paid)

    # The heartbeat itself.

    async def _heard(
        self, said: Said, reports: Iterable[PlacementReport], lease_seconds: int, *, first: bool, whole: bool
    ) -> HeartbeatHeard:
        stream = self._stream
        generation = self._identity.generation if self._identity is not None else 0
        seen = NodeSession(stream.node, stream.session, generation, lease_seconds, self._address(said), said.agent)
        asked = () if whole else tuple({one.uid: None for one in reports if self._matters(one)})
        heartbeat = Heartbeat(seen, first, asked, self._usages(reports), self._load(said))
        heard = await _until_there(lambda: self._runtime.heartbeating.submit(heartbeat))
        if heard is None:
            raise StreamRefused(await _until_there(self._why_not))
        return heard

    def _address(self, said: Said) -> str:
        """The address of the agent's server. A loopback address is accepted only from a loopback stream: no node may
        make the server call itself."""
        if not said.address or may_name(said.address, self._stream.context.peer()):
            return said.address
        why = "it is a loopback address, but the stream comes from another machine"
        log.warning(
            "agent_address_refused", message="the address that a node advertises is not called",
            node=self._stream.node, address=said.address, error=why,
        )  # fmt: skip
        return ""

    async def _why_not(self) -> Refusal:
        if refusal := await revoked(self._runtime.database, self._identity):
            return refusal
        there = await object_ops.get(self._runtime, node_key(self._stream.node))
        return not_registered(self._stream.node) if isinstance(there, Refusal) else SUPERSEDED

    def _matters(self, one: PlacementReport) -> bool:
        """Whether a status says more than the usage of a placement that is known to run."""
        place = self._stream.places.get(one.uid)
        if place is None or place.epoch != one.epoch or one.state in ENDS:
            return True
        return one.state is ReportedState.RUNNING and (not place.running or one.frozen != place.frozen)

    def _usages(self, reports: Iterable[PlacementReport]) -> tuple[UsageRow, ...]:
        """The usage rows to save: of each end, and of running placements once a minute."""
        at = asyncio.get_running_loop().time()
        rows: list[UsageRow] = []
        for one in reports:
            place = self._stream.places.get(one.uid)
            if one.usage is None:
                continue
            if one.state in ENDS or place is None or at - place.measured_at >= USAGE_SECONDS:
                rows.append(one.usage)
                if place is not None:
                    place.measured_at = at
        return tuple(rows)

    def _load(self, said: Said) -> bytes:
        """The node's load, to be recorded every LOAD_SECONDS."""
        at = asyncio.get_running_loop().time()
        if said.load is None or at - self._load_at < LOAD_SECONDS:
            return b""
        self._load_at = at
        return load_document(said.load)

    async def _say_capacity(self) -> None:
        if not self._capacity and not self._isolation:
            return
        runtime, node, reply = self._runtime, self._stream.node, None
        try:
            if self._capacity:
                reply = await report_capacity(runtime, node, self._capacity, self._stream.features)
            if self._isolation and not isinstance(reply, Refusal):
                reply = await report_isolation(runtime, node, *self._isolation)
        except PASSING:
            return  # the next heartbeat tries again
        if isinstance(reply, Refusal):
            log.warning(
                "node_status_rejected", message="the status that a node reports was rejected",
                node=node, error=reply.message,
            )  # fmt: skip
        self._capacity, self._isolation = {}, None

    async def _renewed(self, request: bytes) -> bytes:
        """A new certificate, if one was requested and can be signed now; an agent that gets none asks again."""
        if not request or self._identity is None:
            return b""
        try:
            issued = await renew(self._runtime.database, self._identity, request)
        except PASSING:
            return b""
        if isinstance(issued, Refusal):
            log.warning(
                "certificate_renewal_failed", message="a node's certificate was not renewed",
                node=self._stream.node, error=issued.message,
            )  # fmt: skip
            return b""
        return issued.certificate

    # Reports.

    async def _report(
        self, reports: Iterable[PlacementReport], claims: Mapping[str, ReportedPlacement]
    ) -> HeartbeatOutcome:
        """Report the statuses of placements on this node; the others are settled without a report."""
        outcome = HeartbeatOutcome([], [])
        commands: list[tuple[PlacementReport, ReportedPlacement, Report]] = []
        for one in reports:
            claim = claims.get(one.uid)
            if claim is None and not self._matters(one):
                continue
            if claim is None or claim.epoch != one.epoch:
                self._of_the_past(one, outcome)
            elif one.state in ENDS or self._is_news(one, claim):
                commands.append((one, claim, _command(self._stream.node, one, claim)))
            else:
                self._place(claim).running |= one.state is ReportedState.RUNNING
        if not commands:
            return outcome
        replies = await asyncio.gather(
            *(report(self._runtime, command) for _, _, command in commands), return_exceptions=True
        )
        for (one, claim, _), reply in zip(commands, replies, strict=True):
            self._settle(one, claim, reply, outcome)
        return outcome

    def _is_news(self, one: PlacementReport, claim: ReportedPlacement) -> bool:
        """Whether it started to run, was frozen, or resumed."""
        runs = one.state is ReportedState.RUNNING
        return runs and (claim.phase == Phase.SCHEDULED or one.frozen != self._place(claim).frozen)

    def _settle(
        self, one: PlacementReport, claim: ReportedPlacement, reply: Reply | BaseException, outcome: HeartbeatOutcome
    ) -> None:
        if isinstance(reply, PASSING):
            self._stream.unsaid[one.place] = one
        elif isinstance(reply, BaseException):
            # Logged by the lane. The agent repeats ends; that a placement ran follows from its end.
            return
        elif one.state in ENDS or (isinstance(reply, Refusal) and reply.code is not Code.IMMUTABLE):
            self._of_the_past(one, outcome)
        else:
            place = self._place(claim)
            place.running, place.frozen = True, one.frozen

    def _of_the_past(self, one: PlacementReport, outcome: HeartbeatOutcome) -> None:
        """A status of a placement that is not, or no longer, placed here: acknowledge an end, stop a live one."""
        place = self._stream.places.get(one.uid)
        if place is not None and place.epoch == one.epoch:
            del self._stream.places[one.uid]
        (outcome.acknowledged if one.state in ENDS else outcome.strangers).append(one)

    def _place(self, claim: ReportedPlacement | WantedPlace) -> HeldPlacement:
        place = self._stream.places.get(claim.uid)
        if place is None or place.epoch != claim.epoch:
            known = claim if isinstance(claim, ReportedPlacement) else _claim(claim, self._stream.node)
            place = HeldPlacement(claim.key, claim.epoch, lease=claim.lease, frozen=known.frozen, short=known.short)
            self._stream.places[claim.uid] = place
        return place

    # Paid time.

    async def _pay(self, answer: pb.HeartbeatResponse) -> list[tuple[str, HeldPlacement, Grant]]:
        """Extend all leases of paid placements on the node together. A lease that cannot be extended now, because the
        database is unreachable or overloaded, keeps the time it was granted before; the others are granted all the
        same."""
        stream = self._stream
        paid = [(uid, place) for uid, place in stream.places.items() if place.lease and not self._has_ended(uid, place)]
        if not paid:
            return []
        seq = stream.next_number()
        asked = [Extend(place.lease, seq, place.running) for _, place in paid]
        grants = await put_all(self._runtime.extending, asked)
        freeze_seconds = self._hub.credits.throttle_seconds_max
        fenced = [uid for (uid, _), grant in zip(paid, grants, strict=True) if is_fenced(grant)]
        moved = await follow_leases(self._runtime, stream, fenced) if fenced else ()
        for (uid, place), grant in zip(paid, grants, strict=True):
            if isinstance(grant, BaseException) or uid in moved:
                continue  # it was logged, or the next heartbeat tries again
            if isinstance(grant, Refusal) and grant.code is Code.STALE:
                stream.skip_numbers()
            elif message := grant_message(uid, place.epoch, grant, freeze_seconds):
                answer.leases.append(message)
        answered = zip(paid, grants, strict=True)
        return [(uid, place, grant) for (uid, place), grant in answered if isinstance(grant, Grant)]

    async def _note_shortfalls(self, paid: Sequence[tuple[str, HeldPlacement, Grant]]) -> None:
        """Record changed shortfalls: paid time that ends, or that is granted again. A later heartbeat records what
        cannot be recorded now."""
        node, news = self._stream.node, []
        for uid, place, grant in paid:
            if (short := granted_shortfall(grant)) != place.short:
                news.append((place, note_of(place.key, uid, node, place.epoch, short)))
        replies = await note_shortfalls(self._runtime, [note for _, note in news])
        for (place, note), reply in zip(news, replies, strict=True):
            if not isinstance(reply, Refusal | BaseException):
                place.short = note.short

    def _has_ended(self, uid: str, place: HeldPlacement) -> bool:
        """Whether its end was reported but could not be recorded yet."""
        said = self._stream.unsaid.get((uid, place.epoch))
        return said is not None and said.state in ENDS

    # The wanted set.

    async def _wanted(self) -> WantedSet:
        self._stream.begin_whole()
        return await _until_there(lambda: self._runtime.recalling.submit(self._stream.node))

    def _tell_all(self, answer: pb.HeartbeatResponse, wanted: WantedSet, past: set[tuple[str, int]]) -> None:
        """Add the whole wanted set to an answer, without placements acknowledged in it: they would start again."""
        answer.complete = True
        if wipe := wipe_wanted(wanted.claim):
            self._stream.wiping = True
            answer.directives.append(wipe)
        known, self._stream.places = self._stream.places, {}
        for one in wanted.places:
            if (one.uid, one.epoch) in past:
                continue
            if directive := self._directive(one):
                answer.directives.append(directive)
            else:
                answer.complete = False  # a complete set stops every placement that it does not name
            place = known.get(one.uid)
            if place is not None and place.epoch == one.epoch:
                self._stream.places[one.uid] = place
            else:
                self._place(one)

    def _directive(self, one: WantedPlace) -> pb.SchedulingDirective | None:
        """The directive of a placement; None if it cannot be built, which must not withhold the others."""
        try:
            order = order_of_place(one)
            self._hub.spread(order.uid, order.nodes)
            if not one.wanted:
                return stop_directive(order, now())
            return run_directive(order, self._stream.node, self._hub.patience.kill_grace_seconds)
        except Exception:
            log.exception(
                "directive_failed",
                message="a directive for a node cannot be built",
                node=self._stream.node,
                key=one.key,
            )
        return None if one.wanted else end_directive(one.uid, one.epoch, "", "", grace_seconds=GRACE_SECONDS)


# The caller.


async def _first(context: Context) -> pb.HeartbeatRequest:
    try:
        async with asyncio.timeout(FIRST_SECONDS_MAX):
            message = await context.read()
    except TimeoutError:
        raise StreamRefused(Refusal(Code.TIMEOUT, f"no heartbeat came within {FIRST_SECONDS_MAX:.0f} s")) from None
    if not isinstance(message, pb.HeartbeatRequest):
        raise StreamRefused(invalid("the stream ended before its first heartbeat"))
    return message


def _accepted(said: T | Refusal) -> T:
    if isinstance(said, Refusal):
        raise StreamRefused(said)
    return said


def _name(identity: NodeIdentity | None, message: pb.HeartbeatRequest) -> str:
    if identity is not None:
        _accepted(other_node(identity, message.node_id))
        return identity.node
    if faults := dns_subdomain(message.node_id):
        raise StreamRefused(invalid(f"node_id {faults[0]}"))
    return message.node_id


# Claims and commands.


def _claims(wanted: WantedSet, reports: Iterable[PlacementReport], node: str) -> dict[str, ReportedPlacement]:
    """The claims of the reported placements, from the wanted set."""
    asked = {one.uid for one in reports}
    return {one.uid: _claim(one, node) for one in wanted.places if one.uid in asked}


def _claim(one: WantedPlace, node: str) -> ReportedPlacement:
    recorded = frozen_place(one, node), short_place(one, node)
    return ReportedPlacement(one.key, one.uid, one.epoch, one.gang, phase_of_place(one), one.lease, *recorded)


def _command(node: str, one: PlacementReport, claim: ReportedPlacement) -> Report:
    if one.state is ReportedState.STOPPED and one.reason == LEASE_EXPIRED:
        # The node was disconnected beyond its run-lease and stopped the work: it is requeued if it asks for that.
        return _end_lost(node, one, claim)
    if one.state in (ReportedState.FAILED, ReportedState.STOPPED) and one.reason in WENT_WITH_ITS_NODE:
        # The node failed, for however short a time: the work is requeued if it asks for that.
        return replace(_end_lost(node, one, claim), reason=one.reason, only_leased=True)
    return Report(
        key=claim.key,
        uid=one.uid,
        origin=Origin(f"node:{node}", "report"),
        phase=ENDS.get(one.state, Phase.RUNNING),
        node=node,
        epoch=one.epoch,
        stopped=one.state is ReportedState.STOPPED,
        reason=one.reason if one.state in ENDS else "",
        message=one.message if one.state in ENDS else "",
        exit_code=one.exit_code if one.state in ENDS else None,
        gang=claim.gang,
        measured=measured_of(one),
        frozen=one.frozen if one.state is ReportedState.RUNNING else None,
    )


def _end_lost(node: str, one: PlacementReport, claim: ReportedPlacement) -> EndLost:
    return EndLost(
        key=claim.key, uid=one.uid, origin=Origin(f"node:{node}", "report", one.reason), node=node, epoch=one.epoch,
        message=one.message, exit_code=one.exit_code, gang=claim.gang, confirmed=True, measured=measured_of(one),
    )  # fmt: skip


def _stranger(one: PlacementReport) -> pb.SchedulingDirective:
    return end_directive(one.uid, one.epoch, "NotPlacedHere", "it is not placed on this node, or not in this epoch")


async def _until_there(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until the database answers: the caller has no alternative."""
    while True:
        try:
            return await ask()
        except PASSING:
            await asyncio.sleep(RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311


async def _abort(context: Context, why: Refusal) -> None:
    await context.abort(STATUS[why.code], f"{why.message}. {why.hint}".rstrip(". "))


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "gRPC serves every call in a task"
    return task
