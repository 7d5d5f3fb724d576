"""Where one stands in the line, and when it may start: asked of small worlds."""

import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import Where
from bursar.core.scheduling.cycle.cycle import decide
from bursar.core.scheduling.explain.explain import estimate
from bursar.core.scheduling.explain.explain_types import QueueEstimate
from bursar.core.scheduling.explain.queue_position import QueueOrder, QueueOrders, order_boosted, order_queue
from bursar.core.scheduling.state.cluster_state import ClusterState
from support.scheduling.questions import GPU, NOW, POLICY, ask, cluster_of, placed, snapshot, told, waiting

# The line.


def place(cluster: ClusterState, line: QueueOrder, uid: str) -> int:
    group = cluster.waiting[uid]
    found = line.position(group.members[uid], group)
    assert found is not None
    return found.overall


def in_order(cluster: ClusterState, line: QueueOrder) -> list[str]:
    return sorted(cluster.waiting, key=lambda uid: place(cluster, line, uid))


def test_positions_count_within_the_queue_and_overall() -> None:
    cluster = waiting(
        cluster_of(1),
        ask("first", queue="a", submitted_at=NOW - 900),
        ask("second", queue="b", submitted_at=NOW - 800),
        ask("third", 2, queue="a", submitted_at=NOW - 700),
    )
    found = told(cluster, "third")
    assert (found.queue, found.position, found.position_overall) == ("a", 2, 3)
    assert (found.ahead.allocations, found.ahead.amounts) == (2, {"cpu": 2000, GPU: 2000})


def test_tenants_take_turns_in_the_line() -> None:
    cluster = cluster_of(*[8] * 10)
    many = [ask(f"p{index:02}", 8, submitted_at=NOW - 9000 + index) for index in range(20)]
    waiting(cluster, *many, ask("one", 8, tenant="biology"))
    line = order_queue(cluster, POLICY, NOW)
    order = in_order(cluster, line)
    assert order.index("one") <= 1, "a long backlog takes nothing from others"
    assert [uid for uid in order if uid != "one"] == [one.uid for one in many]


def test_members_of_a_gang_stand_together() -> None:
    gang = Gang("g", 2)
    cluster = waiting(
        cluster_of(8),
        ask("alone", submitted_at=NOW - 500),
        ask("g1", gang=gang, submitted_at=NOW - 900),
        ask("g2", gang=gang, submitted_at=NOW - 100),
    )
    order = in_order(cluster, order_queue(cluster, POLICY, NOW))
    assert abs(order.index("g1") - order.index("g2")) == 1


def test_positions_are_the_order_in_which_a_cycle_places() -> None:
    """Also where shares move while the queue is taken: the traversal is the same."""
    cluster = cluster_of(*[8] * 60)
    for index in range(60):
        tenant = ("physics", "biology", "chemistry")[index % 3]
        gang = Gang(f"g{index % 3}", 4) if index % 5 == 0 else None
        gpus = 1 + index % 4
        waiting(cluster, ask(f"a{index:02}", gpus, tenant=tenant, gang=gang, submitted_at=NOW - 9000 + 97 * index))
    line = order_queue(cluster, POLICY, NOW)
    expected = in_order(cluster, line)
    plan = decide(cluster.copy(), POLICY, NOW)
    placed_in_order = [uid for one in plan.bindings for uid in sorted(ask.uid for ask, _ in one.members)]
    assert len(placed_in_order) == 60
    assert placed_in_order == expected


def test_far_behind_the_front_the_order_of_submission_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.scheduling.explain.queue_position.FRONT_MAX", 5)
    asks = [ask(f"a{index:03}", 1 + index % 3, submitted_at=NOW - 9000 + index) for index in range(50)]
    cluster = waiting(cluster_of(1), *asks, ask("gone", submitted_at=NOW - 9999))
    cluster.forget("gone")
    line = order_queue(cluster, POLICY, NOW)
    assert in_order(cluster, line) == [one.uid for one in asks]
    assert [place(cluster, line, one.uid) for one in asks] == list(range(1, 51))
    last = line.position(asks[-1], cluster.waiting[asks[-1].uid])
    assert last is not None
    assert (last.ahead.allocations, last.ahead.amounts["cpu"], len(line)) == (49, 49_000, 50)


def test_of_very_many_groups_the_oldest_and_the_most_urgent_come_to_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.core.scheduling.explain.queue_position.GROUPS_MAX", 3)
    asks = [ask(f"a{index:03}", job=f"j{index}", submitted_at=NOW - 900 + index) for index in range(40)]
    cluster = waiting(cluster_of(1), *asks, ask("urgent", priority=100_000, submitted_at=NOW))
    assert in_order(cluster, order_queue(cluster, POLICY, NOW)) == ["urgent", *(one.uid for one in asks)]


def test_a_boost_moves_a_job_to_the_front_and_the_question_changes_nothing() -> None:
    cluster = waiting(cluster_of(1), ask("other", submitted_at=NOW - 90), ask("mine", job="train"))
    before = snapshot(cluster)
    assert place(cluster, order_queue(cluster, POLICY, NOW), "mine") == 2
    assert place(cluster, order_boosted(cluster, POLICY, NOW, ("team", "train"), 100_000), "mine") == 1
    assert snapshot(cluster) == before


def test_a_line_is_kept_for_a_second_and_made_anew_for_a_newcomer() -> None:
    cluster, lines = waiting(cluster_of(1), ask("a")), QueueOrders()
    first = lines.of(cluster, POLICY, NOW)
    assert lines.of(cluster, POLICY, NOW + 0.9, "a") is first
    waiting(cluster, ask("b"))
    assert place(cluster, lines.of(cluster, POLICY, NOW + 0.9, "b"), "b") == 2
    assert lines.of(cluster, POLICY, NOW + 5) is not first


# Estimates.


def test_the_start_is_estimated_from_the_ends_of_what_runs() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("r1", 2), "n0", (0, 1), ends_in=600)
    placed(cluster, ask("r2", 2), "n0", (2, 3), ends_in=1200)
    waiting(cluster, ask("two", 2, submitted_at=NOW - 900))
    assert told(cluster, "two").starts_at == NOW + 600
    waiting(cluster, ask("next", 2))
    assert told(cluster, "next").starts_at == NOW + 1200, "what stands before it takes the first room"


def test_what_has_no_known_end_gives_no_estimate() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("r", 4), "n0", (0, 1, 2, 3))
    assert told(waiting(cluster, ask("a")), "a").starts_at is None


def test_those_ahead_that_want_other_nodes_do_not_count() -> None:
    cluster = cluster_of(4, labels={"zone": "a"})
    cluster.put_node("b0", {"cpu": 64_000, GPU: 4000}, labels={"zone": "b"})
    placed(cluster, ask("r", 4), "n0", (0, 1, 2, 3), ends_in=600)
    there, here = (Where(node_labels=(("zone", zone),)) for zone in "ab")
    waiting(cluster, ask("far", 4, where=there, submitted_at=NOW - 900), ask("near", 4, where=here))
    assert told(cluster, "near").starts_at == NOW


def test_an_estimate_is_the_position_and_the_estimate() -> None:
    cluster = cluster_of(4)
    placed(cluster, ask("r", 4), "n0", (0, 1, 2, 3), ends_in=600)
    waiting(cluster, ask("a", 4), ask("b", 4))
    orders = QueueOrders()

    def estimated(uid: str, at: float) -> QueueEstimate | None:
        return estimate(cluster, uid, POLICY, at, orders.of(cluster, POLICY, at, uid))

    assert estimated("a", NOW) == QueueEstimate(1, NOW + 600)
    assert estimated("gone", NOW) is None
    cluster.forget("r")
    assert estimated("b", NOW + 0.9) == QueueEstimate(2, NOW + 600), "as fresh as the order that it was computed in"
    assert estimated("a", NOW + 5) == QueueEstimate(1, NOW + 5)
