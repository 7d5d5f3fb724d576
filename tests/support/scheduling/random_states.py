"""Small worlds at random, with every kind of constraint, for properties."""

from typing import Any

from hypothesis import strategies as st

from bursar.core.nodes.node import WHOLE
from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Ask, Effect, InterPodTerm, Operator, Requirement, Spread, Taint, Toleration, Where
from bursar.core.quota.tenant_tree import ResourceQuota, Tenant
from bursar.core.scheduling.state.cluster_state import ClusterState
from support.scheduling.cluster_states import FPGA, GPU, HOST, NOW, RACK, ZONE, Machine, ask, labelled, limit, machine

TENANTS = {"n": "t", "m": "u"}  # by namespace
APPS = ("web", "db")
KEYS = (HOST, RACK, ZONE)


@st.composite
def machines(draw: st.DrawFn, most: int = 5) -> list[Machine]:
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=most, unique=True))
    return [draw(_machine(name)) for name in sorted(names)]


@st.composite
def _machine(draw: st.DrawFn, name: str) -> Machine:
    labels: dict[str, Any] = {"disk": "ssd"} if draw(st.booleans()) else {}
    taints = draw(
        st.sampled_from([(), (), (), (Taint("k"),), (Taint("k", effect=Effect.PREFER_NO_SCHEDULE),)]),
    )
    return machine(
        name,
        gpus=draw(st.integers(0, 4)),
        cpu=draw(st.integers(1, 8)),
        pods=draw(st.sampled_from([None, None, 1, 3])),
        rack=draw(st.sampled_from(["", "r1", "r2"])),
        zone=draw(st.sampled_from(["", "z1", "z2"])),
        cordoned=draw(st.integers(0, 9)) == 0,
        offers={FPGA: 2 * WHOLE} if draw(st.integers(0, 4)) == 0 else None,
        taints=taints,
        **labels,
    )


@st.composite
def companies(draw: st.DrawFn) -> InterPodTerm:
    return InterPodTerm(draw(st.sampled_from(KEYS)), labelled(app=draw(st.sampled_from(APPS))))


@st.composite
def wheres(draw: st.DrawFn) -> Where:
    """Mostly one constraint at a time; otherwise hardly anything would fit."""
    match draw(st.integers(0, 14)):
        case 0:
            return Where(node_labels=(("disk", "ssd"),))
        case 1:
            return Where(required=((Requirement("disk", Operator.ABSENT),), (Requirement(HOST, Operator.IN, ("a",)),)))
        case 2:
            return Where(tolerations=(Toleration("k", exists=True),))
        case 3 | 4:
            return Where(apart=(draw(companies()),))
        case 5:
            return Where(near=(draw(companies()),))
        case 6 | 7:
            key, skew = draw(st.sampled_from(KEYS)), draw(st.integers(1, 2))
            selector = draw(st.sampled_from([None, labelled(app="web")]))
            return Where(spreads=(Spread(key, skew, draw(st.booleans()), selector),))
        case 8:
            return Where(rather_near=((50, draw(companies())),), rather_apart=((20, draw(companies())),))
        case 9:
            return Where(preferred=((10, (Requirement("disk", Operator.IN, ("ssd",)),)),))
    return Where()


GANGS = (Gang("g1", 2), Gang("g2", 3))


@st.composite
def single(draw: st.DrawFn, number: int) -> Ask:
    namespace = draw(st.sampled_from(sorted(TENANTS)))
    exclusive = draw(st.integers(0, 7)) == 0
    wants = {FPGA: WHOLE} if draw(st.integers(0, 7)) == 0 else None
    return ask(
        f"x{number:02}",
        namespace=namespace,
        tenant=TENANTS[namespace],
        gpus=draw(st.sampled_from([0, 0.25, 0.5, 0.6, 1, 1, 2])),
        cpu=draw(st.sampled_from([0, 0.5, 1, 3])),
        nodes=draw(st.sampled_from([1, 1, 1, 2])),
        exclusive=exclusive,
        wants=wants,
        where=draw(wheres()),
        labels=draw(st.sampled_from([{}, {"app": "web"}, {"app": "db"}])),
        gang=draw(st.sampled_from([None, None, None, *GANGS])),
        job=draw(st.sampled_from(["", "j1"])),
        priority=draw(st.sampled_from([0, 0, 10])),
        ttl=draw(st.sampled_from([0, 100, 1000])),
        at=NOW - draw(st.integers(0, 3)),
    )


@st.composite
def asks(draw: st.DrawFn, most: int) -> list[Ask]:
    return [draw(single(number)) for number in range(draw(st.integers(1, most)))]


def some_limits(cluster: ClusterState) -> None:
    limit(
        cluster,
        Tenant("t", limits={GPU: 5 * WHOLE, "nodes": 3 * WHOLE}),
        Tenant("u", limits={"allocations": 6 * WHOLE}),
        quotas=[ResourceQuota("n", "q", {"cpu": 9 * WHOLE})],
        namespaces=TENANTS,
    )
