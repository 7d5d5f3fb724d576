"""The ledger against a plain model: whatever is done in whatever order and at whatever time, to the last nanocredit."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec.structs import replace

from bursar.commands.credit.credit import CloseLeaseCommand, ExtendLeaseCommand, OpenLease, PutAccount, PutPrice
from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Owner
from bursar.core.credit.lease import Grant, Mode
from bursar.core.values.money import MICROS, NANO
from bursar.ops.credit import credit, ledger
from bursar.ops.credit.ledger import Extend, ledger_key
from bursar.store.credit import ledger as store
from support.credit.ledgers import GPU, START, assert_books_balance, pass_time, stop_clock
from support.runtime.postgres import PostgresServer
from support.runtime.runtime import code
from support.runtime.state_machines import SOAK, RuntimeMachine, follow

POOL, ANN = Owner("default"), Owner("default", "ann")
DAY = 86400 * MICROS
AHEAD = 600 * MICROS
HALF = MICROS // 2

# Times are halves of seconds and prices are even, so that no cost has a fraction: fractions are tested where they are
# cut off, and here nothing may be lost.
TIMES = st.sampled_from([0, HALF, 5 * MICROS, 7 * MICROS, 16 * MICROS, 60 * MICROS, 3600 * MICROS, DAY])
BACK = st.sampled_from([-HALF, -3 * MICROS, -20 * MICROS])
AMOUNTS = st.sampled_from([2, NANO // 10, NANO, 3 * NANO, 50 * NANO])
PRICES = st.sampled_from([0, 2, NANO // 100, NANO // 50, NANO])


@dataclass
class Pot:
    """An account: what came and went, and its limits."""

    posted: int = 0
    status: str = "active"
    credit_limit: int = 0
    gpus_max: int | None = None
    daily_cap: int | None = None
    stop_at_cap: bool = False
    spend_rate_max: int | None = None
    spend_burst: int = 0
    tokens: int = 0
    tokens_at: int = 0
    day: int = 0
    day_posted: int = 0

    def free_tokens(self, now: int) -> int:
        grown = (self.spend_rate_max or 0) * max(0, now - self.tokens_at) // MICROS
        return min(self.spend_burst, self.tokens + grown)

    def spend_tokens(self, amount: int, now: int) -> None:
        if self.spend_rate_max is not None and amount > 0:
            self.tokens, self.tokens_at = self.free_tokens(now) - amount, max(now, self.tokens_at)

    def spent_on(self, now: int) -> int:
        return self.day_posted if self.day == now // DAY else 0

    def take(self, amount: int, now: int) -> None:
        if amount:
            self.posted -= amount
            self.day_posted, self.day = self.spent_on(now) + amount, now // DAY


@dataclass
class Paid:
    """A lease: the time that was posted, piece by piece, and the time that is paid ahead, each with its rate."""

    owner: Owner
    gpus: int
    window: int
    mode: Mode
    posted_to: int
    ahead: list[tuple[int, int]]  # rate, how long
    pieces: list[tuple[int, int]] = field(default_factory=list)
    posted: int = 0
    seq: int = 0
    final: str = ""

    @property
    def paid_to(self) -> int:
        return self.posted_to + sum(length for _, length in self.ahead)

    @property
    def held(self) -> int:
        return sum(rate * length // MICROS for rate, length in self.ahead)

    def rate_at(self, now: int) -> int:
        end, rate = self.posted_to, self.pieces[-1][0] if self.pieces else 0
        for rate, length in self.ahead:
            end += length
            if now < end:
                return rate
        return rate

    def post(self, pot: Pot, now: int) -> None:
        while self.ahead and now > self.posted_to:
            rate, length = self.ahead.pop(0)
            some = min(length, now - self.posted_to)
            if some < length:
                self.ahead.insert(0, (rate, length - some))
            self.pieces.append((rate, some))
            self.posted, self.posted_to = self.posted + rate * some // MICROS, self.posted_to + some
            pot.take(rate * some // MICROS, now)

    def set_back(self, now: int) -> None:
        """The clock has gone back by more than a window: what is paid ahead counts from now on."""
        if self.posted_to - now > self.window:
            self.posted_to = now

    def cost_of(self, micros: int) -> int:
        total = 0
        rate = 0
        for rate, length in (*self.pieces, *self.ahead):
            some = min(length, micros)
            total, micros = total + rate * some // MICROS, micros - some
        return total + rate * micros // MICROS  # beyond what was paid, at the last rate


class Ledger(RuntimeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pots: dict[Owner, Pot] = {}
        self.leases: dict[int, Paid] = {}
        self.closed: list[int] = []
        self.prices: list[tuple[int, int]] = []
        self.now = START
        self.requests = 0
        self.written_off = 0

    @initialize()
    def build(self) -> None:
        self.run(stop_clock(self.runtime))
        self.price(NANO // 100, 0)
        self.top_up(POOL, 50 * NANO, repeats=0)
        assert code(self.run(credit.put_account(self.runtime, PutAccount(whose=ANN, changes={})))) == "ok"
        self.pots[ANN] = Pot()
        self.top_up(ANN, 3 * NANO, repeats=1)

    # Money.

    @rule(owner=st.sampled_from([POOL, ANN]), amount=AMOUNTS, repeats=st.integers(0, 2))
    def top_up(self, owner: Owner, amount: int, repeats: int) -> None:
        """However often the same request comes, it is one."""
        self.requests += 1
        claim = ledger_key("default", "topup", f"r{self.requests}", str(amount))
        replies = [
            self.run(credit.top_up(self.runtime, owner, amount, actor="user:test", idempotency_key=claim))
            for _ in range(1 + repeats)
        ]
        assert [reply.replayed for reply in replies] == [False] + [True] * repeats
        assert all(replace(reply, replayed=False) == replies[0] for reply in replies)
        self.pots.setdefault(owner, Pot()).posted += amount
        assert replies[0].account.posted == self.pots[owner].posted
        other = ledger_key("default", "topup", f"r{self.requests}", "another body")
        reused = self.run(credit.top_up(self.runtime, owner, amount + 1, actor="user:test", idempotency_key=other))
        assert code(reused) == "request_id_reused"

    @rule(owner=st.sampled_from([POOL, ANN]), amount=AMOUNTS)
    def refund(self, owner: Owner, amount: int) -> None:
        reply = self.run(credit.refund(self.runtime, owner, amount, actor="user:test", reason="goodwill"))
        assert code(reply) == "ok"
        self.pots[owner].posted += amount

    @rule(owner=st.sampled_from([POOL, ANN]), amount=AMOUNTS, sign=st.sampled_from([1, -1]))
    def adjust(self, owner: Owner, amount: int, sign: int) -> None:
        reply = self.run(credit.adjust(self.runtime, owner, sign * amount, actor="user:test", reason="mistake"))
        pot = self.pots[owner]
        if sign > 0:
            assert code(reply) == "ok"
            pot.posted += amount
        elif amount > self.available(owner):
            assert code(reply) == "insufficient_credit"
        else:
            assert code(reply) == "ok"
            pot.posted -= amount

    # Time, prices and limits.

    @rule(micros=TIMES | BACK)
    def pass_time(self, micros: int) -> None:
        self.run(pass_time(self.runtime, micros))
        self.now += micros

    @rule(per_second=PRICES, later=st.sampled_from([0, 10 * MICROS]))
    def price(self, per_second: int, later: int) -> None:
        begin = self.now + later
        command = PutPrice(resource=GPU, klass="h100", per_second=per_second, effective_from=begin, actor="user:test")
        known, begin = dict(self.prices), max(begin, self.now)
        reply = self.run(credit.put_price(self.runtime, command))
        if known.get(begin, per_second) != per_second:
            assert code(reply) == "already_exists"
        else:
            assert code(reply) == "ok"
            self.prices = sorted({*self.prices, (begin, per_second)})

    @rule(per_second=PRICES, ago=st.sampled_from([1, 60 * MICROS]))
    def price_of_a_moment_ago(self, per_second: int, ago: int) -> None:
        """It begins now: the same as one that is to begin now."""
        self.price(per_second, -ago)

    @rule()
    def price_of_yesterday(self) -> None:
        begin = self.now - 60 * MICROS - 1
        command = PutPrice(resource=GPU, klass="h100", per_second=1, effective_from=begin, actor="user:test")
        assert code(self.run(credit.put_price(self.runtime, command))) == "unprocessable"

    @rule(
        owner=st.sampled_from([POOL, ANN]),
        changes=st.fixed_dictionaries(
            {},
            optional={
                "status": st.sampled_from(["active", "active", "suspended"]),
                "credit_limit": st.sampled_from([0, NANO, 10 * NANO]),
                "gpus_max": st.sampled_from([None, 0, 4000, 8000]),
                "daily_cap": st.sampled_from([None, NANO, 20 * NANO]),
                "stop_at_cap": st.booleans(),
                "spend_rate_max": st.sampled_from([None, 2, NANO // 50, NANO]),
                "spend_burst": st.sampled_from([0, NANO, 5 * NANO]),
            },
        ),
    )
    def limit(self, owner: Owner, changes: dict[str, Any]) -> None:
        reply = self.run(credit.put_account(self.runtime, PutAccount(whose=owner, changes=changes)))
        pot = self.pots[owner]
        if pot.posted - self.held(owner) + changes.get("credit_limit", pot.credit_limit) < 0:
            assert code(reply) == "insufficient_credit"
            return
        assert code(reply) == "ok"
        tokens, before = pot.free_tokens(self.now), pot.spend_rate_max
        for name, value in changes.items():
            setattr(pot, name, value)
        if pot.spend_rate_max is not None:
            pot.tokens = min(tokens, pot.spend_burst) if before is not None else pot.spend_burst
            pot.tokens_at = self.now

    # Leases.

    @rule(
        owner=st.sampled_from([POOL, ANN]),
        gpus=st.sampled_from([1, 4]),
        window=st.sampled_from([MICROS, 15 * MICROS, 120 * MICROS]),
        mode=st.sampled_from(list(Mode)),
    )
    def open(self, owner: Owner, gpus: int, window: int, mode: Mode) -> None:
        command = OpenLease(whose=owner, job="job", amounts={GPU: 1000 * gpus}, klass="h100", window=window, mode=mode)
        reply = self.run(credit.open_lease(self.runtime, command))
        pot, rate = self.pots[owner], self.rate(gpus)
        if rate is None:
            assert code(reply) == "unpriced"
            return
        need = rate * window // MICROS
        expected = self.refusal(owner, need, need, gpus=1000 * gpus, day=True)
        assert code(reply) == (expected or "ok"), reply
        if isinstance(reply, Receipt):
            assert reply.lease is not None
            pot.spend_tokens(need, self.now)
            self.leases[reply.lease.id] = Paid(owner, gpus, window, mode, self.now, [(rate, window)])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), step=st.sampled_from([1, 1, 1, 1, 5, 0, -1]), repeats=st.integers(0, 1))
    def heartbeat(self, data: st.DataObject, step: int, repeats: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        one = self.leases[number]
        before, seq = one.seq, one.seq + step
        answers = self.run(ledger.extend(self.runtime, [Extend(number, seq)] * (1 + repeats)))
        if seq < before:
            assert {code(answer) for answer in answers} == {"stale"}
            return
        one.set_back(self.now)
        if step > 0 and not (one.mode is Mode.RESERVE and one.paid_to - self.now > one.window // 2 and not one.final):
            one.seq = seq
            self.extended(one, max(self.now, one.posted_to) + one.window)
        left = max(0, one.paid_to - self.now)
        expected = Grant(number, one.paid_to, left, bool(one.final), one.final, one.rate_at(self.now))
        assert answers == [expected] * len(answers)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), delta=st.sampled_from([MICROS, 30 * MICROS, 900 * MICROS]))
    def extend(self, data: st.DataObject, delta: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        one = self.leases[number]
        command = ExtendLeaseCommand(number=number, delta=delta, ahead_max=AHEAD)
        reply = self.run(credit.extend_lease(self.runtime, command))
        one.set_back(self.now)
        latest, final = max(self.now + AHEAD, one.paid_to), one.final
        refused = self.extended(one, min(max(self.now, one.paid_to) + delta, latest))
        assert code(reply) == (refused or "ok")
        if refused:
            one.final = final  # They asked for too much, and may ask for less.
        else:
            assert reply.grant.paid_until == one.paid_to

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), measured=st.sampled_from([None, None, 0, 5 * MICROS, 50 * MICROS, DAY]))
    def close(self, data: st.DataObject, measured: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        one = self.leases.pop(number)
        pot = self.pots[one.owner]
        reply = self.run(credit.close_lease(self.runtime, CloseLeaseCommand(number=number, measured=measured)))
        assert code(reply) == "ok"
        if measured is None:
            one.post(pot, self.now)
        else:
            actual = one.cost_of(measured)
            # All that the lease held is free to pay with, and so is what the account has left.
            payable = min(actual - one.posted, one.held + max(0, self.available(one.owner) - one.held))
            if actual < one.posted:
                pot.posted += one.posted - actual
            else:
                pot.take(payable, self.now)
                self.written_off += actual - one.posted - payable
            one.posted = actual
        assert reply.lease.posted == one.posted
        self.closed.append(number)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def use_closed(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.closed))
        (answer,) = self.run(ledger.extend(self.runtime, [Extend(number, 10**6)]))
        assert code(answer) == "fenced"
        more = ExtendLeaseCommand(number=number, delta=MICROS, ahead_max=AHEAD)
        assert code(self.run(credit.extend_lease(self.runtime, more))) == "fenced"
        assert code(self.run(credit.close_lease(self.runtime, CloseLeaseCommand(number=number)))) == "ok"

    # How the model decides.

    def rate(self, gpus: int) -> int | None:
        begun = [per_second for begin, per_second in self.prices if begin <= self.now]
        return gpus * begun[-1] if begun else None

    def held(self, owner: Owner) -> int:
        return sum(one.held for one in self.leases.values() if one.owner == owner)

    def available(self, owner: Owner) -> int:
        return self.pots[owner].posted - self.held(owner) + self.pots[owner].credit_limit

    def refusal(self, owner: Owner, more: int, tokens: int, *, gpus: int = 0, day: bool) -> str:
        """The first limit that would be exceeded."""
        pot = self.pots[owner]
        used = sum(1000 * one.gpus for one in self.leases.values() if one.owner == owner)
        if pot.status != "active":
            return "account_inactive"
        if pot.gpus_max is not None and gpus and used + gpus > pot.gpus_max:
            return "concurrency_exceeded"
        spent = pot.spent_on(self.now) + self.held(owner)
        if day and pot.daily_cap is not None and more > 0 and spent + more > pot.daily_cap:
            return "daily_cap_exceeded"
        if pot.spend_rate_max is not None and tokens > 0 and tokens > pot.free_tokens(self.now):
            return "spend_rate_exceeded"
        return "insufficient_credit" if more > 0 and more > self.available(owner) else ""

    def extended(self, one: Paid, until: int) -> str:
        """Post what has passed, and pay until then; or why not."""
        pot = self.pots[one.owner]
        one.post(pot, self.now)
        rate = self.rate(one.gpus)
        if rate is None:
            one.final = "unpriced"
            return one.final
        added = max(0, until - max(one.paid_to, self.now))
        more = rate * added // MICROS
        one.final = self.refusal(one.owner, more, more, day=pot.stop_at_cap)
        if not one.final:
            one.posted_to = max(self.now, one.posted_to)
            one.ahead += [(rate, added)] if added else []
            pot.spend_tokens(more, self.now)
        return one.final

    # What must always hold.

    @invariant()
    def the_books_are_what_the_model_says(self) -> None:
        if not self.pots:
            return
        self.run(assert_books_balance(self.runtime))
        accounts = {Owner(one.tenant, one.user): one for one in self.run(self.accounts())}
        for owner, pot in self.pots.items():
            found = accounts[owner]
            assert (found.posted, found.held) == (pot.posted, self.held(owner))
            assert found.available == self.available(owner) >= 0
            if pot.spend_rate_max is not None:
                assert (found.tokens, found.tokens_at) == (pot.tokens, pot.tokens_at)
        assert self.run(self.sum_written_off()) == self.written_off

    async def accounts(self) -> Any:
        async with self.runtime.database.reader() as db:
            return await store.list_accounts(db)

    async def sum_written_off(self) -> int:
        async with self.runtime.database.reader() as db:
            return int(await db.fetchval("SELECT coalesce(sum(amount), 0) FROM entry WHERE debit = 3"))


def test_the_ledger_follows_the_model_whatever_is_done(
    embedded_postgres: PostgresServer, database_template: str
) -> None:
    examples, steps = (400, 60) if SOAK else (15, 40)
    follow(Ledger, embedded_postgres, database_template, examples=examples, steps=steps)
