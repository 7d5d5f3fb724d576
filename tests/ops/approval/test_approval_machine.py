"""Approvals against a plain model on real PostgreSQL: requests, growth, decisions, limits, ends and binds in any order.

Usage is above a limit after no commit, but where the limit was lowered; nothing that is not approved is ever bound;
counters, charges and the list of undecided requests are as the model says; and at the end whatever still fits is
approved, and nothing else.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from bursar.commands.command import Reply
from bursar.commands.lifecycle.dispatch import change_command
from bursar.core.objects.allocation import Phase
from bursar.core.objects.approval import NOTICE_SECONDS
from bursar.core.objects.object import Origin, Stored
from bursar.core.values.instant import timestamp
from bursar.ops.approval.decide import run_timer
from bursar.ops.objects import object as object_ops
from bursar.ops.runtime.clock import now
from bursar.wire.kinds.registry import BY_NAME
from support.approval.requests import claim, decide, gated, key
from support.runtime.postgres import PostgresServer, _url
from support.runtime.runtime import (
    allocation,
    assert_counters_equal_charges,
    bind,
    bind_unit,
    change,
    code,
    counters,
    create,
    delete,
    end,
    node,
    opened,
    tenant,
)
from support.runtime.state_machines import SOAK, RuntimeMachine, follow

CLAIM = BY_NAME["ResourceClaim"]
HOLD = "example.com/operator"
GATES = {"t1": ("quota",), "t2": ("manual", "quota")}
TENANTS = tuple(GATES)
APPROVERS = ("ann", "bob", "eve")
PENDING = "pending_requests"
PENDING_MAX = 12
HOSTS, CPU = "hosts", "cpu"
DIMENSIONS = (HOSTS, CPU)
WIDE = 10**6  # cpu of the node: only quotas keep work out

Amounts = dict[str, int]


# The model.


@dataclass
class One:
    """A request, or work that needs none. What it asks for is `due` while it, or its growth, is pending."""

    kind: str
    space: str
    name: str
    held: Amounts = field(default_factory=dict)
    due: Amounts | None = None
    state: str = "approved"
    passed: int = 0
    gang: str = ""
    width: int = 1
    bound: bool = False
    kept: bool = False  # by an operator's finalizer
    ending: bool = False
    until: bool = False

    @property
    def pending(self) -> bool:
        return self.due is not None

    @property
    def needed(self) -> Amounts:
        return {name: value * self.width for name, value in (self.due or {}).items()}


@dataclass
class Model:
    all: dict[tuple[str, str, str], One] = field(default_factory=dict)
    gangs: dict[tuple[str, str], bool] = field(default_factory=dict)  # whether it is charged
    limits: dict[str, Amounts] = field(default_factory=lambda: {name: {} for name in ("org", *TENANTS)})

    def add(self, one: One) -> None:
        self.all[one.kind, one.space, one.name] = one

    def of(self, *tenants: str) -> Iterator[One]:
        return (one for one in self.all.values() if one.space in tenants)

    def used(self, scope: str, dimension: str) -> tuple[int, int]:
        """(accepted, bound) of a tenant; the parent counts its subtree where it is limited."""
        below = TENANTS if dimension in self.limits["org"] else ()
        found = list(self.of(*below) if scope == "org" else self.of(scope))
        accepted = sum(one.held.get(dimension, 0) for one in found)
        bound = sum(one.held.get(dimension, 0) for one in found if one.bound or one.kind == "ResourceClaim")
        return accepted, bound

    def requests(self, tenant: str) -> int:
        return sum(one.pending for one in self.of(tenant))

    def fits(self, tenant: str, before: Amounts, after: Amounts) -> bool:
        """Whether a tenant may hold this instead of that."""
        for scope in (tenant, "org"):
            for dimension, hard in self.limits[scope].items():
                more = after.get(dimension, 0) - before.get(dimension, 0)
                if more > 0 and self.used(scope, dimension)[0] + more > hard:
                    return False
        return True

    def together(self, one: One) -> list[One]:
        """The objects decided with a request: of a gang, all members that are not charged yet."""
        if not one.gang:
            return [one]
        return [each for each in self.of(one.space) if each.gang == one.gang and each.pending]

    def members(self, space: str, gang: str) -> list[One]:
        return [one for one in self.of(space) if one.gang == gang and one.state in ("pending", "approved")]

    def complete(self, one: One) -> bool:
        return self.gangs.get((one.space, one.gang), False) or len(self.members(one.space, one.gang)) >= 2


def total(those: Iterable[Amounts]) -> Amounts:
    each = list(those)
    return {name: sum(one.get(name, 0) for one in each) for name in DIMENSIONS}


def grows(held: Amounts, wanted: Amounts) -> bool:
    return any(value > held.get(name, 0) for name, value in wanted.items())


# The machine.


AMOUNTS = st.fixed_dictionaries({HOSTS: st.integers(0, 4), CPU: st.integers(0, 4)})
LIMITS = st.one_of(
    st.just(Amounts()),
    st.fixed_dictionaries({HOSTS: st.sampled_from([0, 2, 4, 8])}),
    st.fixed_dictionaries({HOSTS: st.sampled_from([2, 4, 8, 12]), CPU: st.sampled_from([2, 4, 8, 12])}),
)
SPACES = st.sampled_from(TENANTS)


class Approvals(RuntimeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.names = 0
        self.before: dict[tuple[str, str], int] = {}
        self.other = opened(_url(self.server, self.database))
        self.rival = self.runner.run(self.other.__aenter__())

    def teardown(self) -> None:
        try:
            self.whatever_fits_is_approved()
        finally:
            self.runner.run(self.other.__aexit__())
            super().teardown()

    @initialize()
    def build(self) -> None:
        self.run(tenant(self.runtime, "org"))
        for name, gates in GATES.items():
            self.run(gated(self.runtime, name, gates, parent="org", limits={PENDING: PENDING_MAX}))
        self.run(node(self.runtime, "n1", cpu=WIDE))
        for space in TENANTS:
            self.claim(space, {HOSTS: 2, CPU: 1})
            self.work(space, 1)

    def name(self) -> str:
        self.names += 1
        return f"x{self.names}"

    # Requests.

    def ask(self, one: One, reply: Reply) -> None:
        """A new request: it is refused only if too many are undecided."""
        full = self.model.requests(one.space) >= PENDING_MAX
        assert code(reply) == ("quota_exceeded" if full else "ok"), reply
        if not full:
            one.state = "pending"
            self.model.add(one)

    @rule(space=SPACES, amounts=AMOUNTS)
    def claim(self, space: str, amounts: Amounts) -> None:
        name = self.name()
        self.ask(One("ResourceClaim", space, name, due=amounts), self.run(claim(self.runtime, space, name, **amounts)))

    @rule(space=SPACES, cpu=st.integers(0, 4))
    def work(self, space: str, cpu: int) -> None:
        name = self.name()
        reply = self.run(allocation(self.runtime, space, name, cpu=cpu))
        self.ask(One("Allocation", space, name, due={CPU: cpu}), reply)

    @rule(space=SPACES, gang=st.sampled_from(["g1", "g2"]), cpu=st.integers(1, 3))
    def join(self, space: str, gang: str, cpu: int) -> None:
        """A member of a gang of two; with it all members that await approval pass every gate again."""
        name, full = self.name(), self.model.requests(space) >= PENDING_MAX
        if not self.model.members(space, gang):
            self.model.gangs[space, gang] = False
        spec = {"gangScheduling": {"groupId": gang, "minMembers": 2}}
        one = One("Allocation", space, name, due={CPU: cpu}, gang=gang)
        self.ask(one, self.run(allocation(self.runtime, space, name, spec=spec, cpu=cpu)))
        if not full:
            for each in self.model.together(one):
                each.passed = 0

    @rule(space=SPACES, cpu=st.integers(1, 2), width=st.integers(1, 3))
    def job(self, space: str, cpu: int, width: int) -> None:
        name = self.name()
        template = {"spec": {"resources": {"requests": {"cpu": str(cpu)}}}}
        spec = {"parallelism": width, "completions": width, "template": template}
        reply = self.run(create(self.runtime, "Job", {"metadata": {"name": name, "namespace": space}, "spec": spec}))
        self.ask(One("Job", space, name, due={CPU: cpu}, width=width), reply)

    # Growth and shrinkage.

    def claims(self) -> list[One]:
        return [one for one in self.model.all.values() if one.kind == "ResourceClaim"]

    @precondition(lambda self: self.claims())
    @rule(data=st.data(), wanted=AMOUNTS)
    def resize(self, data: st.DataObject, wanted: Amounts) -> None:
        one = data.draw(st.sampled_from(self.claims()))
        reply = self.run(change(self.runtime, "ResourceClaim", one.space, one.name, resources=wanted))
        if one.ending and grows(one.held, wanted):
            assert code(reply) == "conflict"
            return
        holds = one.state == "approved"
        held = {name: min(value, wanted[name]) for name, value in one.held.items()} if holds else {}
        asks = not holds or grows(one.held, wanted)
        if asks and not one.pending and self.model.requests(one.space) >= PENDING_MAX:
            assert code(reply) == "quota_exceeded"
            return
        assert code(reply) == "ok", reply
        if not asks:
            one.held, one.due, one.passed = wanted, None, 0
            return
        if one.due is None or grows(one.due, wanted):
            one.passed = 0
        one.held, one.due = held, wanted
        if not holds:
            one.state = "pending"

    # Decisions.

    def open(self) -> list[One]:
        return [one for one in self.model.all.values() if one.pending]

    @precondition(lambda self: self.open())
    @rule(data=st.data(), by=st.sampled_from(APPROVERS), until=st.booleans())
    def approve(self, data: st.DataObject, by: str, until: bool) -> None:
        self.approve_one(data.draw(st.sampled_from(self.open())), by, until=until)

    def approve_one(self, one: One, by: str = "ann", *, until: bool = False) -> bool:
        gate = GATES[one.space][one.passed]
        ends = timestamp(now() + timedelta(days=30)) if until else ""
        reply = self.run(decide(self.runtime, one.kind, one.space, one.name, gate=gate, by=by, until=ends))
        if one.ending or (one.gang and not self.model.complete(one)):
            assert code(reply) == "conflict", reply
            return False
        together = self.model.together(one)
        if one.passed + 1 < len(GATES[one.space]):
            assert code(reply) == "ok", reply
            for each in together:
                each.passed += 1
            return True
        before, after = total(each.held for each in together), total(each.needed for each in together)
        fits = self.model.fits(one.space, before, after)
        assert code(reply) == ("ok" if fits else "quota_exceeded"), (reply, before, after)
        if fits:
            for each in together:
                self.admit(each, until=until)
        return fits

    def admit(self, one: One, *, until: bool) -> None:
        wanted = one.due or {}
        one.state, one.due, one.passed, one.until = "approved", None, 0, one.until or until
        if one.gang:
            self.model.gangs[one.space, one.gang] = True
        if one.kind != "Job":
            one.held = wanted
            return
        for index in range(one.width):
            self.model.add(One("Allocation", one.space, f"{one.name}-{index}", held=wanted))

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def deny(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.open()))
        gate = GATES[one.space][one.passed]
        reply = self.run(decide(self.runtime, one.kind, one.space, one.name, "deny", gate=gate, reason="no"))
        if one.ending:
            assert code(reply) == "conflict"
            return
        assert code(reply) == "ok", reply
        for each in self.model.together(one):
            self.refuse(each, "denied")

    def refuse(self, one: One, state: str) -> None:
        one.due, one.passed = None, 0
        if one.state == "pending":
            one.state = state

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def decide_at_a_wrong_gate(self, data: st.DataObject) -> None:
        """A later gate must wait, an earlier one is decided, and an unknown one is no gate."""
        one = data.draw(st.sampled_from(self.open()))
        for at, gate in enumerate((*GATES[one.space], "external:other")):
            if at != one.passed and not one.ending:
                reply = self.run(decide(self.runtime, one.kind, one.space, one.name, gate=gate))
                known = "already_decided" if at < one.passed else "conflict"
                assert code(reply) == (known if gate in GATES[one.space] else "unprocessable"), reply

    @precondition(lambda self: self.open())
    @rule(space=SPACES)
    def race(self, space: str) -> None:
        """Two services decide everything at the last gate at once: what fits is in, and once."""
        raced = [one for one in self.model.of(space) if one.pending and not one.ending and not one.gang]
        raced = [one for one in raced if one.passed + 1 == len(GATES[space])]

        async def rush() -> list[Reply]:
            return await asyncio.gather(
                *(
                    decide(who, one.kind, one.space, one.name, by=by)
                    for one in raced
                    for who, by in ((self.runtime, "ann"), (self.rival, "bob"))
                )
            )

        answers = [code(one) for one in self.run(rush())]
        for number, one in enumerate(raced):
            pair = sorted(answers[2 * number : 2 * number + 2])
            assert pair in (["already_decided", "ok"], ["quota_exceeded", "quota_exceeded"]), pair
            if "ok" in pair:
                self.admit(one, until=False)
        for one in raced:
            assert not (one.pending and self.model.fits(space, one.held, one.needed)), "it fits and was left"

    # Limits.

    @rule(scope=st.sampled_from(("org", *TENANTS)), limits=LIMITS)
    def limit(self, scope: str, limits: Amounts) -> None:
        every = limits if scope == "org" else limits | {PENDING: PENDING_MAX}
        assert code(self.run(change(self.runtime, "Tenant", "", scope, limits=every))) == "ok"
        self.model.limits[scope] = limits
        # A limit may be set below usage: from then on usage may only fall.
        self.before |= {(scope, dimension): self.model.used(scope, dimension)[0] for dimension in limits}

    # Time.

    def age(self, one: One, where: str) -> None:
        """Let a time of an approval pass."""
        past = timestamp(now() - timedelta(seconds=1))
        sql = """
            WITH aged AS (
                UPDATE object SET status = jsonb_set(status::jsonb, $4::text[], to_jsonb($5::text))::json,
                       fields = jsonb_set(fields, '{status.approval.due}', to_jsonb($5::text))
                 WHERE (kind, namespace, name) = ($1, $2, $3)
            )
            UPDATE approval SET due = $5 WHERE (kind, namespace, name) = ($1, $2, $3)
        """

        async def passes() -> None:
            async with self.runtime.database.reader() as db:
                await db.execute(sql, one.kind, one.space, one.name, where.split("."), past)

        self.run(passes())

    @precondition(lambda self: any(not one.gang and not one.ending for one in self.open()))
    @rule(data=st.data())
    def nobody_decides(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.open() if not one.gang and not one.ending]))
        self.age(one, "approval.pendingUntil" if one.state == "pending" else "approval.change.pendingUntil")
        assert code(self.run(run_timer(self.runtime, key(one.kind, one.space, one.name)))) == "ok"
        self.refuse(one, "expired")

    def lasting(self) -> list[One]:
        lasting = [one for one in self.claims() if one.until and one.state == "approved"]
        return [one for one in lasting if not one.kept and not one.pending]

    @precondition(lambda self: self.lasting())
    @rule(data=st.data())
    def an_approval_ends(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.lasting()))
        for _ in range(len(NOTICE_SECONDS) + 1):
            self.age(one, "approval.until")
            assert code(self.run(run_timer(self.runtime, key(one.kind, one.space, one.name)))) == "ok"
        one.held, one.state, one.until = {}, "expired", False

    # Work and operators.

    @precondition(lambda self: any(one.kind == "Allocation" for one in self.model.all.values()))
    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        """A scheduler that did not look whether it is approved."""
        one = data.draw(st.sampled_from([one for one in self.model.all.values() if one.kind == "Allocation"]))
        if one.state != "approved" or one.bound:
            assert code(self.run(bind(self.runtime, one.space, one.name, "n1"))) == "stale"
            return
        gang = self.model.members(one.space, one.gang) if one.gang else [one]
        unit = [each for each in gang if each.state == "approved" and not each.bound]
        reply = self.run(bind_unit(self.runtime, one.space, {each.name: ("n1",) for each in unit}))
        if len(unit) < min(2, len(gang)) and not any(each.bound for each in gang):
            assert code(reply) == "stale", reply
            return
        more = total(each.held for each in unit)
        full = any(
            more[name] and self.model.used(scope, name)[1] + more[name] > hard
            for scope in (one.space, "org")
            for name, hard in self.model.limits[scope].items()
        )
        assert code(reply) == ("quota_exceeded" if full else "ok"), reply
        for each in unit:
            each.bound = not full

    @precondition(lambda self: any(one.bound for one in self.model.all.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.model.all.values() if one.bound]))
        assert code(self.run(end(self.runtime, one.space, one.name, Phase.SUCCEEDED))) == "ok"
        one.held, one.bound, one.state = {}, False, "ended"

    @precondition(lambda self: self.claims())
    @rule(data=st.data(), keep=st.booleans())
    def operate(self, data: st.DataObject, keep: bool) -> None:
        """An operator takes a claim, or lets it go."""
        one = data.draw(st.sampled_from(self.claims()))
        if one.ending and keep:
            return

        def edit(before: Stored, document: dict[str, Any]) -> Any:
            document["metadata"]["finalizers"] = [HOLD] if keep else []
            wanted = msgspec.convert(document, CLAIM.type)
            return change_command(CLAIM, before, wanted, Origin("user:operator", "patch"), spec_changed=False)

        where = key("ResourceClaim", one.space, one.name)
        assert code(self.run(object_ops.change(self.runtime, where, edit, tenant=one.space))) == "ok"
        one.kept = keep
        if one.ending:
            del self.model.all[one.kind, one.space, one.name]

    def deletable(self) -> list[One]:
        """All but placed work, and jobs that have their allocations."""
        return [one for one in self.model.all.values() if not one.bound and (one.kind != "Job" or one.pending)]

    @precondition(lambda self: self.deletable())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.deletable()))
        assert code(self.run(delete(self.runtime, one.kind, one.space, one.name))) == "ok"
        if one.kept:
            held = one.held if one.state == "approved" else {}
            self.refuse(one, "expired")
            one.ending, one.held = True, held
        else:
            del self.model.all[one.kind, one.space, one.name]

    # What must always hold.

    def whatever_fits_is_approved(self) -> None:
        """A service that asks again and again has in the end approved all that fits; the rest does not."""
        progress = True
        while progress:
            progress = False
            for one in self.open():
                progress = (one.pending and self.approve_one(one)) or progress
        for one in self.open():
            together = self.model.together(one)
            before, after = total(each.held for each in together), total(each.needed for each in together)
            waits = one.ending or (one.gang and not self.model.complete(one))
            assert waits or not self.model.fits(one.space, before, after), f"{one} fits and waits"
        self.everything_is_as_the_model_says()

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        rows = self.run(counters(self.runtime))
        for scope in ("org", *TENANTS):
            for dimension in DIMENSIONS:
                counter = rows.get((f"tenant:{scope}", dimension))
                found = (counter.accepted // 1000, counter.bound // 1000) if counter else (0, 0)
                assert found == self.model.used(scope, dimension), (scope, dimension)
                hard = self.model.limits[scope].get(dimension)
                assert hard is None or found[0] <= max(hard, self.before.get((scope, dimension), 0)), "above its limit"
                self.before[scope, dimension] = found[0]
        for name in TENANTS:
            pending = rows.get((f"tenant:{name}", PENDING))
            assert (pending.accepted // 1000 if pending else 0) == self.model.requests(name)
        self.run(assert_counters_equal_charges(self.runtime))
        assert self.run(self.listed()) == {
            (one.kind, one.space, one.name): GATES[one.space][one.passed] for one in self.open()
        }
        assert self.run(self.placed()) == {(one.space, one.name) for one in self.model.all.values() if one.bound}

    async def listed(self) -> dict[tuple[str, str, str], str]:
        """The undecided requests, with the gates that are next."""
        async with self.runtime.database.reader() as db:
            rows = await db.fetch("SELECT kind, namespace, name, gate FROM approval WHERE gate <> ''")
        return {(row["kind"], row["namespace"], row["name"]): row["gate"] for row in rows}

    async def placed(self) -> set[tuple[str, str]]:
        async with self.runtime.database.reader() as db:
            return {(row["namespace"], row["name"]) for row in await db.fetch("SELECT namespace, name FROM placement")}


def test_approvals_follow_the_model_whatever_is_done(embedded_postgres: PostgresServer, database_template: str) -> None:
    examples, steps = (300, 60) if SOAK else (10, 30)
    follow(Approvals, embedded_postgres, database_template, examples=examples, steps=steps)
