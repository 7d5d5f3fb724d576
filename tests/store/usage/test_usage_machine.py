"""Hours against a plain model: whatever begins, ends and is entered in whatever order, every window is right to the
second, and equal to what every record says."""

import asyncio
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Step
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from bursar.core.credit.price import Price
from bursar.core.quota.tenant_tree import Tenant, Tree, subtree
from bursar.core.usage.usage_levels import DAY, EVERYBODY, HOUR, Tariff, UsageBegan, UsageEnded, Used, hours
from bursar.ops.usage.usage_rollup import STRIDE, BudgetUse, Past, load_budgets, roll
from bursar.store.credit import price as price_store
from bursar.store.db.database import Database
from bursar.store.usage import usage_levels as store
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database
from support.usage.plain_hours import Interval, used

SOAK = bool(os.environ.get("BURSAR_SOAK"))
GPU = "nvidia.com/gpu"
START = int(datetime(2026, 3, 1, 10, 17, 23, tzinfo=UTC).timestamp())
TENANTS, USERS, NODES = ("physics", "biology"), ("physics/ada", "biology/bob", "-"), ("n1", "n2")
AMOUNTS = (
    {GPU: 4000, "cpu": 16000, "memory": 3 << 34, "nodes": 500},
    {"cpu": 250, "nodes": 4},
    {GPU: 8000, "nodes": 1000},
)
# Both within an hour, across hours and days, and exactly on their edges.
TIMES = st.one_of(st.sampled_from([0, 1, 59, 600, HOUR, DAY]), st.integers(0, 2 * HOUR), st.integers(0, 3 * DAY))
TREE = Tree({"physics": Tenant("physics"), "biology": Tenant("biology", parent="physics")})
EMPTY = "TRUNCATE object, usage_open, usage_record, usage_step, usage_level, usage_hour, usage_day, price"
OLD = START - 100 * DAY
PUT = """
INSERT INTO object (kind, namespace, name, uid, tenant, revision, labels, fields, doc)
VALUES ($1, '', $2, $2, '', 1, '{}', '{}', $3)
    ON CONFLICT (kind, namespace, name) DO UPDATE SET doc = excluded.doc
"""
RESET = "UPDATE usage_rolled SET at = 'epoch', hours_from = '-infinity', records_from = '-infinity'"


def moment(at: int) -> datetime:
    return datetime.fromtimestamp(at, UTC)


@dataclass
class Model:
    """Everything that ever ran, and what was asked for it."""

    clock: int = START
    ran: list[tuple[UsageBegan, int]] = field(default_factory=list)
    runs: dict[tuple[str, str], UsageBegan] = field(default_factory=dict)
    prices: list[Price] = field(default_factory=list)

    def expected(self, tenant: str, user: str, begin: int, end: int) -> dict[tuple[str, str], Used]:
        found: dict[tuple[str, str], list[Interval]] = {}
        for began, ended in [*self.ran, *((one, self.clock + 10 * DAY) for one in self.runs.values())]:
            if began.tenant == tenant and user in (EVERYBODY, began.user):
                for resource, amount in began.amounts.items():
                    metered = (resource, began.klass if "/" in resource else "")
                    found.setdefault(metered, []).append(Interval(amount, began.at, ended))
        return {
            metered: Used(total, self._cost(metered, history, begin, end))
            for metered, history in found.items()
            if (total := used(history, begin, end))
        }

    def _cost(self, metered: tuple[str, str], history: list[Interval], begin: int, end: int) -> int:
        tariff, spent = self._tariff(*metered), 0
        for one in history:
            first, last = max(begin, one.begin), min(end, end if one.end is None else one.end)
            spent += one.amount * tariff.cost(first, last) if first < last else 0
        return spent

    def _tariff(self, resource: str, klass: str) -> Tariff:
        """The price of the class once there is one, else that of the resource."""
        of = [one for one in self.prices if one.resource == resource and one.klass in ("", klass)]
        begins = sorted({one.effective_from for one in of})
        rates = []
        for at in begins:
            begun = [one for one in of if one.effective_from <= at]
            own = [one for one in begun if one.klass == klass] or begun
            rates.append(max(own, key=lambda one: one.effective_from).per_second)
        return Tariff(tuple(at // 1_000_000 for at in begins), tuple(rates))


class Hours(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.runner = asyncio.Runner()
        self.database = self.run(Database.open(self.url))
        self.serial = 0
        self.days = 1
        self.past = Past()

    def run(self, awaited: Any) -> Any:
        return self.runner.run(awaited)

    def teardown(self) -> None:
        self.run(self.database.close())
        self.runner.close()

    async def _do(self, *statements: str) -> None:
        async with self.database.reader() as db:
            for one in statements:
                await db.execute(one)

    async def _save(self, *what: Any) -> None:
        async with self.database.reader() as db, db.transaction():
            await store.save(db, *what)

    @initialize()
    def empty(self) -> None:
        self.run(self._do(EMPTY, RESET))
        for tenant in TENANTS:
            self._found(tenant, OLD)
        self.set_period(1)

    def _found(self, tenant: str, at: int) -> None:
        made = {"name": tenant, "creationTimestamp": f"{moment(at):%Y-%m-%dT%H:%M:%SZ}"}
        self.run(self._put("Tenant", tenant, {"metadata": made, "spec": {"gpuHoursBudget": 10}}))

    async def _put(self, kind: str, name: str, document: dict[str, Any]) -> None:
        async with self.database.reader() as db:
            await db.execute(PUT, kind, name, msgspec.json.encode(document))

    @rule(days=st.integers(1, 3))
    def set_period(self, days: int) -> None:
        self.days = days
        spec = {"scheduling": {"budgetPeriodDays": days}}
        self.run(self._put("Settings", "system", {"metadata": {"name": "system"}, "spec": spec}))

    def _began(self, node: str, tenant: str, user: str, amounts: dict[str, int], klass: str, late: int) -> UsageBegan:
        self.serial += 1
        at = self.model.clock - late
        return UsageBegan(f"u{self.serial}", node, self.serial, tenant, user, "ns", "work", amounts, klass, at)

    work = st.tuples(
        st.sampled_from(NODES), st.sampled_from(TENANTS), st.sampled_from(USERS), st.sampled_from(AMOUNTS),
        st.sampled_from(["", "h100"]), st.sampled_from([0, 0, 1, 4000]),
    )  # fmt: skip

    @rule(several=st.lists(work, min_size=1, max_size=3))
    def begin(self, several: list[Any]) -> None:
        begun = [self._began(*one) for one in several]
        self.run(self._save(begun, []))
        self.model.runs |= {(one.node, one.uid): one for one in begun}

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), back=st.sampled_from([0, 0, 5]))
    def end(self, data: st.DataObject, back: int) -> None:
        began = self._any(data)
        at = self.model.clock - back
        self.run(self._save([], [UsageEnded(began.uid, began.node, at, "Succeeded")]))
        del self.model.runs[began.node, began.uid]
        self.model.ran.append((began, max(at, began.at)))

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data())
    def requeue_at_once(self, data: st.DataObject) -> None:
        """It ends and begins again on the same node in one batch, and a short run lies between."""
        before = self._any(data)
        key, now = (before.node, before.uid), self.model.clock
        short = UsageBegan(
            *key[::-1], before.epoch + 1, "biology", "-", "ns", "work", {GPU: 1000, "nodes": 1}, "", now - 3
        )
        again = UsageBegan(*key[::-1], before.epoch + 2, before.tenant, "-", "ns", "work", AMOUNTS[1], "", now)
        spent = [(short, UsageEnded(before.uid, before.node, now, "Failed"))]
        self.run(self._save([again], [UsageEnded(before.uid, before.node, now, "Pending", "Preempted")], spent))
        self.model.ran += [(before, max(now, before.at)), (short, now)]
        self.model.runs[key] = again

    @rule()
    def end_what_never_began(self) -> None:
        self.run(self._save([], [UsageEnded("ghost", "n1", self.model.clock, "Failed")]))

    def _any(self, data: st.DataObject) -> UsageBegan:
        return self.model.runs[data.draw(st.sampled_from(sorted(self.model.runs)))]

    @rule(seconds=TIMES)
    def pass_time(self, seconds: int) -> None:
        self.model.clock += seconds

    @rule(size=st.sampled_from([HOUR, HOUR, DAY]))
    def pass_time_to_an_edge(self, size: int) -> None:
        self.model.clock += -self.model.clock % size

    @rule(behind=st.sampled_from([0, 0, 3, 2000]), steps_max=st.sampled_from([1, 3, 1000]), turns=st.integers(1, 3))
    def roll(self, behind: int, steps_max: int, turns: int) -> None:
        for _ in range(turns):
            self.run(roll(self.database, moment(self.model.clock - behind), steps_max=steps_max))

    @rule(resource=st.sampled_from([GPU, "memory"]), klass=st.sampled_from(["", "h100"]), rate=st.integers(0, 10**9),
          ahead=st.sampled_from([0, 7, HOUR, DAY]))  # fmt: skip
    def set_price(self, resource: str, klass: str, rate: int, ahead: int) -> None:
        klass = klass if resource == GPU else ""
        price = Price(resource, klass, rate, (self.model.clock + ahead) * 1_000_000)
        if not any((one.resource, one.klass, one.effective_from) == (resource, klass, price.effective_from)
                   for one in self.model.prices):  # fmt: skip
            self.run(self._add(price))
            self.model.prices.append(price)

    async def _add(self, price: Price) -> None:
        async with self.database.reader() as db:
            await price_store.add(db, [(price, "test")])

    @rule(ago=TIMES)
    def forget_hours(self, ago: int) -> None:
        async def forget() -> None:
            async with self.database.reader() as db:
                await store.forget_hours(db, moment(self.model.clock - ago))

        self.run(forget())

    @rule(ago=TIMES, lasts=st.one_of(st.none(), TIMES))
    def ask(self, ago: int, lasts: int | None) -> None:
        begin = self.model.clock - ago
        end = self.model.clock if lasts is None else min(self.model.clock, begin + lasts)
        self.run(self._compare(begin, end))

    @rule(before=st.integers(1, HOUR - 1), hours=st.sampled_from([0, 0, 1, 24]))
    def ask_from_before_an_edge(self, before: int, hours: int) -> None:
        self.run(self._compare(self.model.clock - self.model.clock % HOUR - hours * HOUR - before, self.model.clock))

    async def _compare(self, begin: int, end: int) -> None:
        window = (moment(begin), moment(end))
        async with self.database.reader() as db:
            now = moment(self.model.clock)
            whole = await store.load_window(db, TENANTS, *window, now=now)
            users = await store.load_user_window(db, None, TENANTS, *window, now=now)
            hers = await store.load_user_window(db, USERS[0], None, *window, now=now)
            assert hers == {whose: found for whose, found in users.items() if whose[1] == USERS[0]}
            for tenant in TENANTS:
                expected = self.model.expected(tenant, EVERYBODY, begin, end)
                assert _plain(whole[tenant]) == expected, (tenant, begin, end)
                assert _plain(await store.recompute(db, tenant, *window)) == expected
                for user in USERS:
                    expected = self.model.expected(tenant, user, begin, end)
                    assert _plain(users.get((tenant, user), {})) == expected, (tenant, user)
                    assert _plain(await store.recompute(db, tenant, *window, user=user)) == expected
            current = {
                metered: one.current for tenant in TENANTS for metered, one in whole[tenant].items() if one.current
            }
        if end == self.model.clock and begin < START - DAY:
            now_running = [one.amounts.get("cpu", 0) for one in self.model.runs.values()]
            assert sum(v for (resource, _), v in current.items() if resource == "cpu") <= sum(now_running)

    moments = st.lists(st.one_of(st.integers(-2, 2), st.integers(-STRIDE, STRIDE)), min_size=2, max_size=3)

    @rule(data=st.data(), after=moments, is_entered=st.sampled_from([True, True, False]))
    def budgets(self, data: st.DataObject, after: list[int], is_entered: bool) -> None:
        """At times when the window begins at about a time at which something happened."""
        self._enter(is_entered)
        about = self._about(data)
        for seconds in after:
            self.run(self._compare_budgets(max(self.model.clock, about + seconds), {}))

    @rule(data=st.data(), after=moments, since=st.integers(-STRIDE, STRIDE), name=st.sampled_from(TENANTS))
    def budgets_of_the_young(self, data: st.DataObject, after: list[int], since: int, name: str) -> None:
        """One that was created at about the time at which the window begins."""
        self._enter(True)
        about = self._about(data)
        created = about - self.days * DAY + since
        self._found(name, created)
        for seconds in after:
            self.run(self._compare_budgets(max(self.model.clock, about + seconds), {name: created}))
        self._found(name, OLD)

    def _enter(self, is_entered: bool) -> None:
        while is_entered and self.run(roll(self.database, moment(self.model.clock))):
            pass

    def _about(self, data: st.DataObject) -> int:
        ran = [at for began, ended in self.model.ran for at in (began.at, ended)]
        times = {self.model.clock, *ran, *(one.at for one in self.model.runs.values())}
        return max(self.model.clock, data.draw(st.sampled_from(sorted(times))) + self.days * DAY)

    async def _compare_budgets(self, now: int, created: dict[str, int]) -> None:
        """With what was kept from the last time, and without, it is what every record says of just this window."""
        begin = now - self.days * DAY
        expected = {}
        async with self.database.reader() as db:
            told = await load_budgets(db, TREE, moment(now), past=self.past)
            assert told == await load_budgets(db, TREE, datetime.fromtimestamp(now + 0.75, UTC))
            for name in TENANTS:
                totals = {GPU: 0, "nodes": 0}
                for tenant in subtree(TREE, name):
                    since = max(begin, created.get(tenant, begin))
                    found = _plain(await store.recompute(db, tenant, moment(since), moment(now)))
                    assert found == self.model.expected(tenant, EVERYBODY, since, now)
                    for (resource, _), one in found.items():
                        totals[resource] = totals.get(resource, 0) + one.total
                expected[name] = BudgetUse(hours(totals[GPU]), hours(totals["nodes"]))
        assert told == expected, (begin, now, created)

    @rule(days=st.integers(0, 5), grain=st.sampled_from(["hour", "day"]), user=st.sampled_from(USERS))
    def series(self, days: int, grain: Any, user: str) -> None:
        self.run(self._compare_series(days, grain, user if grain == "day" else EVERYBODY))

    async def _compare_series(self, days: int, grain: Any, user: str) -> None:
        """Each hour or day is a window of its own."""
        size, now = (DAY if grain == "day" else HOUR), self.model.clock
        begin = now - days * DAY
        begin -= begin % size
        async with self.database.reader() as db:
            kept = await db.fetchval("SELECT greatest(hours_from, 'epoch') FROM usage_rolled")
            if grain == "hour":
                begin = max(begin, -(-int(kept.timestamp()) // HOUR) * HOUR)
            several = await store.load_series(
                db, TENANTS, moment(begin), moment(now + 1), grain, user=user, now=moment(now)
            )
            for tenant in TENANTS:
                alone = await store.load_series(
                    db, [tenant], moment(begin), moment(now + 1), grain, user=user, now=moment(now)
                )
                assert alone == {tenant: several[tenant]}
            rows = several["physics"]
        for at in range(begin, now + 1, size):
            found = {(one.resource, one.klass): Used(one.total, one.cost) for one in rows if one.at == moment(at)}
            expected = self.model.expected("physics", user, at, min(at + size, now))
            assert {metered: one for metered, one in found.items() if one != Used()} == expected
        peaks = [one.peak for one in rows]
        assert all(peak >= 0 for peak in peaks)


def _plain(found: dict[tuple[str, str], Used]) -> dict[tuple[str, str], Used]:
    """Without peak and present level, and what was not used in the window."""
    return {metered: Used(one.total, one.cost) for metered, one in found.items() if one.total or one.cost}


async def test_windows_are_right_to_the_second(embedded_postgres: PostgresServer, database_template: str) -> None:
    name = await clone_database(embedded_postgres, database_template)

    class Mine(Hours):
        url = _url(embedded_postgres, name)

    limits = settings(
        max_examples=400 if SOAK else 40,
        stateful_step_count=60 if SOAK else 25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Step.explicit, Step.generate, Step.shrink],
    )
    try:
        await asyncio.to_thread(run_state_machine_as_test, Mine, settings=limits)
    finally:
        await drop_database(embedded_postgres, name)
