"""Creating, changing and deleting objects: what refuses it, and that a refusal leaves nothing behind."""

from typing import Any

import msgspec
import pytest

from bursar.commands.objects.object import Recall
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace
from support.commands.records import GPU, TEST, Records, code, key_of, refusal, written

GANG = {"gangScheduling": {"groupId": "g", "minMembers": 3}}
OTHER_SIZE = {"gangScheduling": {"groupId": "g", "minMembers": 2}}


def limited(gpus: int) -> Records:
    records = Records()
    assert code(records.tenant("lab", limits={GPU: gpus})) == "ok"
    assert code(records.namespace("lab", "lab")) == "ok"
    return records


# Creating.


def test_an_accepted_allocation_is_charged_and_pending() -> None:
    records = limited(4)
    write = written(records.allocation("a", "lab", user="lab/ann", gpu=2))
    assert (write.type, write.origin.actor) == ("ADDED", "user:lab/ann")
    assert (records.status("a", "lab")["phase"], records.status("a", "lab")["user"]) == ("Pending", "lab/ann")
    assert records.objects[key_of("a", "lab")].tenant == "lab"
    assert records.used("tenant:lab") == (2, 0)


@pytest.mark.parametrize(("asked", "answer"), [((4,), "ok"), ((5,), "quota_exceeded"), ((3, 2), "quota_exceeded")])
def test_the_limit_of_a_quota_is_exact(asked: tuple[int, ...], answer: str) -> None:
    records = limited(4)
    replies = [records.allocation(f"a{place}", "lab", gpu=gpus) for place, gpus in enumerate(asked)]
    assert [code(one) for one in replies] == ["ok"] * (len(asked) - 1) + [answer]
    accepted = sum(asked[:-1]) + (asked[-1] if answer == "ok" else 0)
    assert records.used("tenant:lab") == (accepted, 0)
    assert (key_of(f"a{len(asked) - 1}", "lab") in records.objects) is (answer == "ok")


def test_a_refusal_for_quota_has_its_numbers() -> None:
    records = limited(4)
    records.allocation("a", "lab", gpu=3)
    refused = refusal(records.allocation("b", "lab", gpu=2))
    (cause,) = refused.causes
    assert (cause.dimension, cause.limit, cause.requested_delta) == (GPU, "4", "2")
    assert key_of("b", "lab") not in records.objects


@pytest.mark.parametrize(
    ("name", "namespace", "spec", "expected"),
    [
        ("a", "lab", {}, Code.ALREADY_EXISTS),
        ("b", "nowhere", {}, Code.NOT_FOUND),
        ("b", "ending", {}, Code.TERMINATING),
        ("b", "lab", {"queue": "fast"}, Code.INVALID),
        ("b", "lab", {"priorityClass": "urgent"}, Code.INVALID),
    ],
)
def test_what_refuses_a_new_allocation(name: str, namespace: str, spec: dict[str, Any], expected: Code) -> None:
    records = limited(8)
    records.namespace("ending", "lab")
    records.delete(Key("Namespace", "", "ending"))
    records.allocation("a", "lab", gpu=1)
    assert refusal(records.allocation(name, namespace, spec=spec, gpu=1)).code == expected
    assert records.used("tenant:lab") == (1, 0)


def test_a_queue_that_is_there_may_be_named() -> None:
    records = limited(8)
    records.create("Queue", {"metadata": {"name": "fast"}, "spec": {}})
    assert code(records.allocation("a", "lab", spec={"queue": "fast"}, gpu=1)) == "ok"


# Gangs.


def test_a_gang_is_charged_as_a_set_once_it_is_complete() -> None:
    records = limited(3)
    steps = []
    for name in "abc":
        assert code(records.allocation(name, "lab", spec=GANG, gpu=1)) == "ok"
        steps.append(records.used("tenant:lab"))
    assert steps == [(0, 0), (0, 0), (3, 0)]
    row = records.gangs["lab", "g"]
    assert (row.members, row.charged) == (3, True)


def test_a_gang_without_capacity_for_all_keeps_its_members_uncharged() -> None:
    records = limited(2)
    replies = [records.allocation(name, "lab", spec=GANG, gpu=1) for name in "abc"]
    assert [code(one) for one in replies] == ["ok", "ok", "quota_exceeded"]
    assert records.used("tenant:lab") == (0, 0)
    assert (records.gangs["lab", "g"].members, records.gangs["lab", "g"].charged) == (2, False)
    assert key_of("c", "lab") not in records.objects


def test_a_gang_that_was_charged_takes_further_members_at_once() -> None:
    records = limited(4)
    replies = [records.allocation(name, "lab", spec=GANG, gpu=1) for name in "abcde"]
    assert [code(one) for one in replies] == ["ok"] * 4 + ["quota_exceeded"]
    assert records.used("tenant:lab") == (4, 0)
    assert records.gangs["lab", "g"].members == 4


def test_a_member_that_says_another_size_is_refused() -> None:
    records = limited(4)
    records.allocation("a", "lab", spec=GANG, gpu=1)
    refused = refusal(records.allocation("b", "lab", spec=OTHER_SIZE, gpu=1))
    assert (refused.code, refused.causes[0].field) == (Code.INVALID, "minMembers")
    assert records.gangs["lab", "g"].members == 1


def test_a_waiting_member_that_is_deleted_makes_the_gang_wait_longer() -> None:
    records = limited(3)
    for name in "ab":
        records.allocation(name, "lab", spec=GANG, gpu=1)
    assert code(records.delete(key_of("a", "lab"))) == "ok"
    records.allocation("c", "lab", spec=GANG, gpu=1)
    assert records.used("tenant:lab") == (0, 0)
    records.allocation("d", "lab", spec=GANG, gpu=1)
    assert records.used("tenant:lab") == (3, 0)


# Changing.


def test_a_change_of_a_version_that_is_not_the_last_is_a_conflict() -> None:
    records = Records()
    records.create("Queue", {"metadata": {"name": "fast"}, "spec": {}})
    key = Key("Queue", "", "fast")
    first, second = (records.change_command(key, description=f"{number}") for number in (2, 3))
    assert code(records.decide(first)) == "ok"
    before = records.objects[key]
    assert refusal(records.decide(second)).code == Code.CONFLICT
    assert records.objects[key] == before


def test_a_change_of_what_is_gone_finds_nothing() -> None:
    records = limited(4)
    records.allocation("a", "lab", gpu=1)
    command = records.change_command(key_of("a", "lab"), priority=5)
    records.delete(key_of("a", "lab"))
    assert refusal(records.decide(command)).code == Code.NOT_FOUND


def test_pending_work_may_be_made_more_urgent_and_keeps_what_it_is_charged() -> None:
    records = limited(4)
    records.allocation("a", "lab", gpu=2)
    assert code(records.change(key_of("a", "lab"), priority=7)) == "ok"
    assert msgspec.json.decode(records.objects[key_of("a", "lab")].doc)["spec"]["priority"] == 7
    assert records.used("tenant:lab") == (2, 0)
    assert refusal(records.change(key_of("a", "lab"), nodes=2)).code == Code.IMMUTABLE


def test_of_placed_work_nothing_changes() -> None:
    records = limited(4)
    records.node("n1", gpu=2)
    records.allocation("a", "lab", gpu=2)
    command = records.change_command(key_of("a", "lab"), priority=7)
    records.bind({"a": ["n1"]}, "lab")
    stale = replace(command, expected=records.objects[key_of("a", "lab")].revision)
    assert refusal(records.decide(stale)).code == Code.IMMUTABLE


# Deleting.


def test_what_is_deleted_gives_back_its_charge() -> None:
    records = limited(4)
    records.allocation("a", "lab", gpu=4)
    assert written(records.delete(key_of("a", "lab"))).type == "DELETED"
    assert records.used("tenant:lab") == (0, 0)


def test_what_has_finalizers_is_marked_and_goes_with_the_last_of_them() -> None:
    records = Records()
    records.create("Queue", {"metadata": {"name": "fast", "finalizers": ["example.com/clean"]}, "spec": {}})
    key = Key("Queue", "", "fast")
    assert written(records.delete(key)).type == "MODIFIED"
    before = records.objects[key]
    document = msgspec.json.decode(before.doc)
    assert document["metadata"]["deletionTimestamp"]
    assert code(records.delete(key)) == "ok"
    assert records.objects[key] == before
    del document["metadata"]["finalizers"]
    command = records.change_command(key)
    draft = replace(before, doc=msgspec.json.encode(document))
    assert written(records.decide(replace(command, draft=draft))).type == "DELETED"


def test_a_recalled_answer_does_nothing() -> None:
    records = Records()
    answer = Refusal(Code.CONFLICT, "too late")
    assert records.decide(Recall(key=key_of("a"), origin=TEST, otherwise=answer)) is answer
