"""The quota service's arithmetic, by tables: which requests are approved, in which order, and what is noted."""

from typing import Any

import pytest

from bursar.client import Event
from bursar.quota_service.decider import BACKOFF_SECONDS, CONFLICT_SECONDS, NOTE_SECONDS, Decider, PlannedDecision

Answer = dict[str, Any]
OK: Answer = {"status": 200}


def item(name: str, tenant: str = "acme", since: int = 0, gang: str = "", reason: str = "", **asked: int) -> Any:
    approval = {"state": "pending", "gates": {"quota": {"state": "pending", **({"reason": reason} if reason else {})}}}
    return {
        "kind": "ResourceClaim", "namespace": tenant, "name": name, "tenant": tenant, "gate": "quota",
        "since": f"2026-01-01T00:00:{since:02}Z", "requested": {key: str(value) for key, value in asked.items()},
        "gang": gang, "object": {"metadata": {"uid": f"uid-{name}"}, "status": {"approval": approval}},
    }  # fmt: skip


def figures(scope: str = "tenant:acme", *, ancestors: tuple[str, ...] = (), **pairs: tuple[int | None, int]) -> Any:
    """The figures of a scope: (limit, used) by dimension."""
    kind, _, name = scope.partition(":")
    quotas = {
        key: {"limit": None if limit is None else str(limit), "accepted": str(used)}
        for key, (limit, used) in pairs.items()
    }
    shown: dict[str, Any] = {"scope": scope, "enforcement": "Reject", "ancestors": list(ancestors), "quotas": quotas}
    if kind == "tenant":
        shown["tenant"] = name
    if kind == "quota":
        namespace, _, quota = name.partition("/")
        shown |= {"tenant": namespace, "namespace": namespace, "name": quota}
    return shown


def decider(*shown: Any) -> Decider:
    one = Decider()
    for scope in shown:
        one.take_figures(Event("ADDED", scope))
    return one


def ask(one: Decider, *items: Any, type_: str = "ADDED") -> None:
    for shown in items:
        one.take_request(Event(type_, shown))


def told(plan: list[PlannedDecision]) -> list[tuple[str, str]]:
    return [(decision.request.key[2], decision.note) for decision in plan]


def go(one: Decider, now: float = 0, answer: Answer = OK) -> list[tuple[str, str]]:
    """One plan, and this answer to every decision of it."""
    plan = one.plan(now)
    for decision in plan:
        one.answered(decision, answer, now)
    return told(plan)


def refusal(code: str, *causes: tuple[str, str], status: int = 409, **numbers: str) -> Answer:
    listed = [{"scope": scope, "dimension": dimension, **numbers} for scope, dimension in causes]
    return {"status": status, "refusal": {"details": {"code": code, "causes": listed}}}


def lacking(name: str, over: int, limit: int, used: int, asked: int) -> str:
    return f"would exceed max_{name} by {over}: limit {limit}, used {used}, requested {asked}"


def test_the_oldest_of_a_tenant_come_first_and_one_that_does_not_fit_holds_up_none() -> None:
    one = decider(figures(clusters=(10, 4)))
    ask(one, item("new", since=3, clusters=1), item("large", since=2, clusters=5), item("old", since=1, clusters=4))
    assert go(one) == [("old", ""), ("large", lacking("clusters", 3, 10, 8, 5)), ("new", "")]
    assert len(one) == 1


@pytest.mark.parametrize(
    ("scopes", "asked", "note"),
    [
        ([figures(clusters=(20, 18))], {"clusters": 5}, lacking("clusters", 3, 20, 18, 5)),
        ([figures(clusters=(20, 15))], {"clusters": 5}, ""),
        ([figures(clusters=(None, 900))], {"clusters": 5}, ""),
        ([figures(hosts=(1, 1))], {"clusters": 5}, ""),
        ([figures(clusters=(3, 5))], {"clusters": 0}, ""),
        ([], {"clusters": 5}, ""),
        (
            [figures("quota:acme/rq", clusters=(1, 0)), figures(clusters=(1, 1))],
            {"clusters": 2},
            f"{lacking('clusters', 1, 1, 0, 2)}; {lacking('clusters', 2, 1, 1, 2)}",
        ),
        (
            [figures(ancestors=("parent",)), figures("tenant:parent", clusters=(7, 6))],
            {"clusters": 2},
            "a limit above this tenant has no headroom: max_clusters, requested 2",
        ),
        (
            [figures(), figures("system", clusters=(7, 6))],
            {"clusters": 2},
            "a limit above this tenant has no headroom: max_clusters, requested 2",
        ),
        ([figures("quota:other/rq", clusters=(1, 1))], {"clusters": 2}, ""),
        ([{**figures("quota:acme/rq", clusters=(1, 1)), "selective": True}], {"clusters": 2}, ""),
        ([{**figures(clusters=(1, 1)), "enforcement": "Queue"}], {"clusters": 2}, ""),
    ],
)
def test_a_request_is_judged_by_every_scope_that_counts_it(scopes: list[Any], asked: Any, note: str) -> None:
    one = decider(*scopes)
    ask(one, item("c", **asked))
    assert go(one) == [("c", note)]


def test_a_noted_request_is_judged_again_when_its_figures_improve_and_not_before() -> None:
    one = decider(figures(clusters=(4, 4), hosts=(9, 1)))
    ask(one, item("a", since=1, clusters=1), item("b", since=2, clusters=1))
    assert len(go(one)) == 2
    assert go(one, 1) == []
    for worse in (figures(clusters=(4, 5), hosts=(9, 1)), figures(clusters=(3, 5), hosts=(9, 1))):
        one.take_figures(Event("MODIFIED", worse))
        assert go(one, NOTE_SECONDS + 1) == []
    one.take_figures(Event("MODIFIED", figures(clusters=(6, 5), hosts=(9, 1))))
    assert go(one, NOTE_SECONDS + 2) == [("a", ""), ("b", lacking("clusters", 1, 6, 6, 1))]
    one.take_figures(Event("MODIFIED", figures(clusters=(6, 5), hosts=(9, 1))))
    assert go(one, NOTE_SECONDS + 3) == [("b", "")]


@pytest.mark.parametrize("scope", ["tenant:parent", "system", "quota:acme/rq", "tenant:acme"])
def test_a_scope_that_is_gone_or_has_no_limit_any_more_lets_requests_in(scope: str) -> None:
    one = decider(figures(ancestors=("parent",)), figures(scope, ancestors=("parent",), clusters=(1, 1)))
    ask(one, item("c", clusters=1))
    assert len(go(one)) == 1
    one.take_figures(Event("DELETED", {"scope": scope}))
    assert go(one, 1) == [("c", "")]


def test_notes_are_renewed_slowly() -> None:
    one = decider(figures(clusters=(4, 4)))
    ask(one, item("c", clusters=3))
    assert go(one) == [("c", lacking("clusters", 3, 4, 4, 3))]
    ask(one, item("c", reason=lacking("clusters", 3, 4, 4, 3), clusters=3), type_="MODIFIED")
    one.take_figures(Event("MODIFIED", figures(clusters=(5, 4))))
    assert go(one, 1) == []
    assert one.next_due() == NOTE_SECONDS
    assert go(one, NOTE_SECONDS) == [("c", lacking("clusters", 2, 5, 4, 3))]
    assert one.next_due() is None


def test_a_reason_that_stands_already_is_not_written_again() -> None:
    one = decider(figures(clusters=(4, 4)))
    ask(one, item("c", reason=lacking("clusters", 3, 4, 4, 3), clusters=3))
    assert go(one) == []


def test_a_plan_has_a_limit_and_the_next_one_goes_on() -> None:
    one = decider(figures(clusters=(3, 0)))
    ask(one, *(item(f"c{number}", since=number, clusters=1) for number in range(5)))
    first = one.plan(0, 2)
    second = one.plan(0, 2)
    assert (told(first), told(second)) == (
        [("c0", ""), ("c1", "")],
        [("c2", ""), ("c3", lacking("clusters", 1, 3, 3, 1))],
    )


def test_a_refusal_of_the_server_is_held_until_its_figures_improve_or_a_backoff_has_passed() -> None:
    one = decider(figures(clusters=(9, 0)), figures("system", clusters=(99, 0)))
    ask(one, item("c", clusters=1))
    refused = refusal("quota_exceeded", ("quota:acme/rq", "max_clusters"), ("tenant:acme", "max_clusters"))
    assert go(one, 0, refused) == [("c", "")]
    assert go(one, BACKOFF_SECONDS - 1) == []
    assert one.next_due() == BACKOFF_SECONDS
    assert go(one, BACKOFF_SECONDS, refused) == [("c", "")]
    assert one.next_due() == 3 * BACKOFF_SECONDS
    one.take_figures(Event("MODIFIED", figures("system", clusters=(100, 0))))
    assert go(one, BACKOFF_SECONDS + 1) == []
    one.take_figures(Event("MODIFIED", figures(clusters=(10, 0))))
    assert go(one, BACKOFF_SECONDS + 1) == [("c", "")]
    assert one.next_due() is None


def test_a_refusal_that_was_overtaken_by_better_figures_is_tried_again_soon() -> None:
    one = decider(figures(clusters=(1, 0)))
    ask(one, item("c", clusters=1))
    (decision,) = one.plan(0)
    one.take_figures(Event("MODIFIED", figures(clusters=(2, 1))))
    refused = refusal("quota_exceeded", ("tenant:acme", "max_clusters"), limit="1", current_usage="1")
    one.answered(decision, refused, 0)
    assert go(one, CONFLICT_SECONDS) == [("c", "")]


def test_a_refusal_by_a_scope_that_is_not_known_yet_is_tried_again_when_it_is() -> None:
    one = decider()
    ask(one, item("c", clusters=2))
    refused = refusal("quota_exceeded", ("tenant:parent", "max_clusters"), limit="1", current_usage="0")
    assert go(one, 0, refused) == [("c", "")]
    assert go(one, 1) == []
    one.take_figures(Event("ADDED", figures("tenant:parent", clusters=(2, 0))))
    assert go(one, 1) == [("c", "")]


def test_what_the_server_refuses_is_not_counted_as_used() -> None:
    one = decider(figures(clusters=(1, 0)))
    ask(one, item("a", since=1, clusters=1), item("b", since=2, clusters=1))
    plan = one.plan(0)
    assert told(plan) == [("a", ""), ("b", lacking("clusters", 1, 1, 1, 1))]
    one.answered(plan[0], refusal("not_found", status=404), 0)
    one.answered(plan[1], OK, 0)
    assert go(one) == [("b", "")]
    assert len(one) == 0


def test_an_answer_to_an_older_state_does_not_make_a_new_one_forgotten() -> None:
    one = decider(figures(clusters=(9, 0)))
    ask(one, item("c", clusters=1))
    (decision,) = one.plan(0)
    ask(one, item("c", since=5, clusters=2), type_="MODIFIED")  # It was asked for again meanwhile.
    assert one.plan(0) == []
    one.answered(decision, refusal("already_decided"), 0)
    assert go(one) == [("c", "")]


def test_decisions_without_an_answer_are_planned_again() -> None:
    one = decider(figures(clusters=(1, 0)))
    ask(one, item("c", clusters=1))
    one.failed(one.plan(0))
    assert go(one) == [("c", "")]


def test_a_gang_is_decided_once_with_the_amounts_of_all_its_members() -> None:
    one = decider(figures(clusters=(3, 0)))
    ask(one, item("m1", since=1, gang="g", clusters=2))
    assert go(one, 0, refusal("conflict")) == [("m1", "")]
    assert go(one, CONFLICT_SECONDS / 2) == []
    ask(one, item("m2", since=2, gang="g", clusters=2))
    said = lacking("clusters", 1, 3, 0, 4)
    assert go(one, 1) == [("m1", said), ("m2", said)]
    one.take_figures(Event("MODIFIED", figures(clusters=(4, 0))))
    assert go(one, 2) == [("m1", "")]
    assert len(one) == 0


def test_requests_that_are_gone_are_forgotten_and_nothing_is_due() -> None:
    one = decider(figures(clusters=(9, 9)))
    ask(one, item("a", clusters=1), item("b", tenant="other", clusters=1))
    go(one, 0, refusal("quota_exceeded", ("quota:other/rq", "max_clusters")))
    ask(one, item("a"), item("b", tenant="other"), type_="DELETED")
    assert len(one) == 0
    assert go(one, 10 * BACKOFF_SECONDS) == []
    assert one.next_due() is None


def test_a_watch_that_begins_again_is_believed() -> None:
    one = decider(figures(clusters=(1, 1)))
    ask(one, item("a", clusters=1), item("b", clusters=1))
    go(one)
    one.begin_requests()
    ask(one, item("b", reason=lacking("clusters", 1, 1, 1, 1), clusters=1))
    assert (len(one), go(one, 1)) == (1, [])
    one.begin_figures()
    one.take_figures(Event("ADDED", figures(clusters=(2, 1))))
    assert go(one, 1) == [("b", "")]


def test_a_note_is_never_longer_than_the_server_takes() -> None:
    many = [f"dimension-{number}" for number in range(40)]
    shown, asking = figures(), item("a")
    shown["quotas"] = {name: {"limit": "1", "accepted": "1"} for name in many}
    asking["requested"] = dict.fromkeys(many, "1")
    one = decider(shown)
    ask(one, asking)
    ((_, note),) = go(one)
    assert (len(note), note[-2:]) == (1024, " …")


def test_the_item_of_a_decision_is_of_this_request_and_gate() -> None:
    one = decider(figures(clusters=(1, 1)))
    ask(one, item("a", clusters=1))
    (decision,) = one.plan(0)
    assert decision.item() == {
        "kind": "ResourceClaim", "namespace": "acme", "name": "a", "uid": "uid-a", "gate": "quota",
        "decision": "note", "reason": lacking("clusters", 1, 1, 1, 1),
    }  # fmt: skip


def test_growth_is_judged_by_what_is_asked_beyond_and_has_its_own_reason() -> None:
    grown = item("c", clusters=2)
    change = {"state": "pending", "gates": {"quota": {"state": "pending", "reason": lacking("clusters", 1, 3, 2, 2)}}}
    grown["object"]["status"]["approval"] = {"state": "approved", "reason": "fine", "change": change}
    one = decider(figures(clusters=(3, 2)))
    ask(one, grown)
    assert go(one) == []


def test_only_figures_of_the_tenant_are_told() -> None:
    one = decider(figures(ancestors=("parent",), clusters=(1, 1)), figures("tenant:parent", clusters=(3, 3)))
    ask(one, item("c", clusters=1))
    (decision,) = one.plan(0)
    assert "limit 3" not in decision.note
    assert decision.note.count("limit 1, used 1") == 1
