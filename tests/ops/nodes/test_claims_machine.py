"""Claims against a plain model: whatever is claimed, used, given back and wiped in whatever order."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from bursar.core.nodes.node_claim import ClaimState
from bursar.core.objects.allocation import Phase
from bursar.core.values.refusal import Refusal
from bursar.ops.nodes import claim as ops
from bursar.store.nodes import node as node_store
from bursar.wire.kinds.node import TRACELESS, WIPES
from support.nodes.claims import allow, claim, joins, origin, release, submit
from support.runtime.postgres import PostgresServer
from support.runtime.runtime import bind, code, end, namespace, node, tenant
from support.runtime.state_machines import SOAK, RuntimeMachine, follow
from support.usage.hourly import assert_hours_agree

PEOPLE = ("physics/ann", "physics/bob", "history/eve")
FEATURES = {"n1": (TRACELESS,), "n2": (WIPES,), "n3": ()}  # of the agents: n3 leaves traces, and nothing wipes it
NODES = tuple(FEATURES)
people, nodes = st.sampled_from(PEOPLE), st.sampled_from(NODES)


@dataclass
class Held:
    holder: str
    state: ClaimState = ClaimState.HELD
    attempt: int = 0
    released: bool = False

    @property
    def prepares(self) -> bool:
        return self.state is not ClaimState.HELD and not self.released


@dataclass
class Model:
    pool: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    placed: dict[str, tuple[str, str]] = field(default_factory=dict)  # work → (its user, its node)
    dirty: set[str] = field(default_factory=set)

    def users_on(self, name: str) -> set[str]:
        return {user for user, where in self.placed.values() if where == name}

    def claim(self, name: str, who: str) -> str:
        now = self.held.get(name)
        if now is not None:
            return "ok" if not now.released and now.holder == who else "conflict"
        if self.users_on(name) - {who}:
            return "in_use"
        if name in self.dirty and (self.users_on(name) or WIPES not in FEATURES[name]):
            return "conflict"
        return "ok" if len(self.held) < self.pool else "quota_exceeded"

    def release(self, name: str, who: str) -> str:
        now = self.held.get(name)
        if now is None:
            return "conflict"
        if now.holder != who:
            return "forbidden"
        return "in_use" if now.state is ClaimState.HELD and self.users_on(name) else "ok"

    def bind(self, name: str, who: str, sensitive: bool) -> str:
        now = self.held.get(name)
        fits = not sensitive if now is None else now.state is ClaimState.HELD and now.holder == who
        return "ok" if fits else "stale"


class Claims(RuntimeMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.made = 0

    @initialize(size=st.integers(0, 3))
    def furnish(self, size: int) -> None:
        async def make() -> None:
            for name in ("physics", "history"):
                await tenant(self.runtime, name)
                await namespace(self.runtime, name, name)
            for name in NODES:
                await node(self.runtime, name, gpu=64)
                await joins(self.runtime, name, *FEATURES[name])

        self.runner.run(make())
        self.resize(size)

    @rule(size=st.integers(0, 3))
    def resize(self, size: int) -> None:
        self.runner.run(allow(self.runtime, size))
        self.model.pool = size

    @rule(name=nodes, who=people)
    def claim(self, name: str, who: str) -> None:
        expected = self.model.claim(name, who)
        assert code(self.runner.run(claim(self.runtime, name, who))) == expected
        if expected == "ok":
            first = Held(who, ClaimState.WIPING, 1) if name in self.model.dirty else Held(who)
            self.model.held.setdefault(name, first)

    @rule(name=nodes, who=people)
    def release(self, name: str, who: str) -> None:
        expected = self.model.release(name, who)
        assert code(self.runner.run(release(self.runtime, name, who))) == expected
        if expected == "ok" and self.model.held[name].prepares:
            del self.model.held[name]
        elif expected == "ok" and self.model.held[name].state is ClaimState.HELD:
            self.model.held[name] = Held(who, ClaimState.WIPING, 1, released=True)

    @rule(name=nodes, fails=st.booleans(), late=st.booleans())
    def hear_of_a_wipe(self, name: str, fails: bool, late: bool) -> None:
        """The node's own word; `late` is of an attempt that is not the last."""
        now = self.model.held.get(name)
        if now is None:
            return
        claim_id = self.runner.run(self._claims())[name][0]
        attempt = now.attempt + (1 if late else 0)
        said = ops.end_wipe(
            self.runtime, name, origin(name, "wiped"), claim_id=claim_id, attempt=attempt, failed="x" if fails else ""
        )
        assert not isinstance(self.runner.run(said), Refusal)
        if now.state is ClaimState.WIPING and not late:
            if fails:
                now.state = ClaimState.WIPE_FAILED
            else:
                self._wiped(name, now)

    def _wiped(self, name: str, now: Held) -> None:
        self.model.dirty.discard(name)
        del self.model.held[name]
        if now.prepares:
            self.model.held[name] = Held(now.holder)

    @rule(name=nodes)
    def wipe_again(self, name: str) -> None:
        now = self.model.held.get(name)
        released = now is not None and now.state is not ClaimState.HELD
        reply = self.runner.run(ops.wipe_node(self.runtime, name, origin("admin", "wipe")))
        assert code(reply) == ("ok" if released else "conflict")
        if now is not None and now.state is ClaimState.WIPE_FAILED:
            now.state, now.attempt = ClaimState.WIPING, now.attempt + 1

    @rule(name=nodes)
    def confirm(self, name: str) -> None:
        now = self.model.held.get(name)
        expected = "conflict" if now is None or now.state is ClaimState.HELD else "ok"
        if now is None and name in self.model.dirty:
            expected = "in_use" if self.model.users_on(name) else "ok"
        assert code(self.runner.run(ops.end_wipe(self.runtime, name, origin("admin", "wiped")))) == expected
        if expected == "ok" and now is None:
            self.model.dirty.discard(name)
        elif expected == "ok" and now is not None:
            self._wiped(name, now)

    @rule(name=nodes, who=people, sensitive=st.booleans(), starts=st.booleans())
    def place(self, name: str, who: str, sensitive: bool, starts: bool) -> None:
        space, work = who.partition("/")[0], f"w{self.made}"
        self.made += 1
        expected = self.model.bind(name, who, sensitive)

        async def act() -> str:
            await submit(self.runtime, space, work, who, sensitive=sensitive)
            found = code(await bind(self.runtime, space, work, name))
            if found == "ok" and starts:
                await end(self.runtime, space, work, Phase.RUNNING)
            return found

        assert self.runner.run(act()) == expected
        if expected == "ok":
            self.model.placed[work] = (who, name)
            self.model.dirty |= {name} - {"n1"}

    @rule(which=st.integers(0, 5))
    def finish(self, which: int) -> None:
        if self.model.placed:
            work = sorted(self.model.placed)[which % len(self.model.placed)]
            who, _ = self.model.placed.pop(work)
            assert code(self.runner.run(end(self.runtime, who.partition("/")[0], work))) == "ok"

    async def _claims(self) -> dict[str, tuple[str, str, ClaimState, int]]:
        async with self.runtime.database.reader() as db:
            capacities = await node_store.load_claimed(db)
        return {
            name: (capacity.claim.id, capacity.claim.holder, capacity.claim.state, capacity.claim.attempt)
            for name, capacity in capacities.items()
            if capacity.claim is not None
        }

    async def _soiled(self) -> set[str]:
        async with self.runtime.database.reader() as db:
            return {name for name, capacity in (await node_store.load(db, NODES)).items() if capacity.dirty}

    async def _metered(self) -> dict[str, str]:
        """The claims that count as used, by node."""
        async with self.runtime.database.reader() as db:
            rows = await db.fetch("SELECT node, username FROM usage_open WHERE uid LIKE 'claim-%'")
        return {row["node"]: row["username"] for row in rows}

    @invariant()
    def claims_are_what_the_model_says(self) -> None:
        found = {name: rest[1:] for name, rest in self.runner.run(self._claims()).items()}
        assert found == {name: (one.holder, one.state, one.attempt) for name, one in self.model.held.items()}
        assert self.runner.run(self._soiled()) == self.model.dirty

    @invariant()
    def a_claim_counts_while_it_is_held_and_work_on_it_does_not(self) -> None:
        held = {name: one.holder for name, one in self.model.held.items() if one.state is ClaimState.HELD}
        assert self.runner.run(self._metered()) == held
        self.runner.run(assert_hours_agree(self.runtime))


def test_claims_follow_the_model_whatever_is_done(embedded_postgres: PostgresServer, database_template: str) -> None:
    examples, steps = (200, 50) if SOAK else (10, 25)
    follow(Claims, embedded_postgres, database_template, examples=examples, steps=steps)
