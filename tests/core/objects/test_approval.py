"""The state machine of approvals, without a database: gates in order, decisions once, ends, and own requests."""

from datetime import UTC, datetime, timedelta

import pytest

from bursar.core.objects.approval import (
    Approval,
    ApprovalPolicy,
    ApprovalReason,
    ApprovalState,
    Decision,
    Verdict,
    approval_fields,
    approval_in,
    decided,
    expired,
    is_own_request,
    next_due,
    requested,
    stored_form,
    undecidable,
)
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

AT = datetime(2031, 5, 1, 12, tzinfo=UTC)
GATES = ("manual", "quota", "external:budget")
POLICY = ApprovalPolicy(GATES, frozenset({"Job"}), 60)


def asked(*gates: str, policy: ApprovalPolicy = POLICY) -> Approval:
    return requested(policy, gates or GATES, AT)


def after(approval: Approval, *verdicts: tuple[str, str]) -> Approval:
    for gate, verdict in verdicts:
        found = decided("claim", approval, Decision(gate, Verdict(verdict), "ann"), AT)
        assert isinstance(found, Approval), found
        approval = found
    return approval


@pytest.mark.parametrize(
    ("verdicts", "state", "gate"),
    [
        ((), "pending", "manual"),
        ((("manual", "note"),), "pending", "manual"),
        ((("manual", "approve"),), "pending", "quota"),
        ((("manual", "approve"), ("quota", "approve")), "pending", "external:budget"),
        ((("manual", "approve"), ("quota", "approve"), ("external:budget", "approve")), "approved", ""),
        ((("manual", "deny"),), "denied", ""),
        ((("manual", "approve"), ("quota", "deny")), "denied", ""),
    ],
)
def test_gates_are_decided_in_order(verdicts: tuple[tuple[str, str], ...], state: str, gate: str) -> None:
    found = after(asked(), *verdicts)
    assert (found.state, found.gate) == (state, gate)
    assert approval_in({"approval": stored_form(found)}) == found


@pytest.mark.parametrize(
    ("verdicts", "gate", "code"),
    [
        ((), "quota", Code.CONFLICT),
        ((), "external:other", Code.UNPROCESSABLE),
        ((("manual", "approve"),), "manual", Code.DECIDED),
        ((("manual", "deny"),), "manual", Code.DECIDED),
        ((("manual", "deny"),), "quota", Code.DECIDED),
    ],
)
def test_a_gate_is_decided_once_and_in_its_turn(verdicts: tuple[tuple[str, str], ...], gate: str, code: Code) -> None:
    refusal = undecidable("claim", after(asked(), *verdicts), gate)
    assert refusal is not None
    assert refusal.code is code
    assert isinstance(decided("claim", after(asked(), *verdicts), Decision(gate, Verdict.DENY, "ann"), AT), Refusal)


def test_the_earliest_end_holds() -> None:
    early, late = (timestamp(AT + timedelta(days=days)) for days in (10, 20))
    approval = asked("manual", "quota")
    for gate, until in (("manual", late), ("quota", early)):
        found = decided("claim", approval, Decision(gate, Verdict.APPROVE, "ann", until=until), AT)
        assert isinstance(found, Approval)
        approval = found
    assert (approval.until, next_due(approval)) == (early, timestamp(AT + timedelta(days=3)))


def test_an_undecided_request_is_due_and_a_decided_one_is_not() -> None:
    request = asked("manual")
    assert next_due(request) == timestamp(AT + timedelta(seconds=60))
    assert next_due(after(request, ("manual", "approve"))) == ""
    assert next_due(asked("manual", policy=replace(POLICY, pending_seconds=0))) == ""
    over = expired(request, ApprovalReason.UNDECIDED, AT)
    assert (over.state, over.reason, next_due(over)) == (ApprovalState.EXPIRED, "Undecided", "")


def test_fields_name_the_open_gate_and_no_other() -> None:
    assert approval_fields(None) == {}
    passed = after(asked(), ("manual", "approve"))
    fields = approval_fields(passed)
    assert (fields["status.approval.state"], fields["status.approval.gate"]) == ("pending", "quota")
    growth = replace(after(asked("manual"), ("manual", "approve")), change=asked("quota"))
    fields = approval_fields(growth)
    assert (fields["status.approval.state"], fields["status.approval.gate"]) == ("approved", "quota")
    assert "status.approval.gate" not in approval_fields(after(asked("manual"), ("manual", "deny")))


def test_a_policy_names_kinds_or_means_all() -> None:
    assert POLICY.gates_of("Job") == GATES
    assert POLICY.gates_of("ResourceClaim") == ()
    assert ApprovalPolicy(("manual",)).gates_of("ResourceClaim") == ("manual",)


@pytest.mark.parametrize(
    ("requester", "by", "tenants", "own"),
    [
        ("admin", "admin", (), True),
        ("acme/ann", "acme/ann", (), True),
        ("acme/ann", "ann", ("acme",), True),
        ("acme/ann", "ann", ("company",), True),  # a tenant above
        ("acme/ann", "ann", ("*",), True),
        ("acme/ann", "ann", (), False),  # an administrator of the system with the name of a tenant's user
        ("acme/ann", "bob", ("acme",), False),
        ("ann", "bob", ("*",), False),
        ("acme/", "", ("*",), True),
        ("", "ann", ("*",), False),
    ],
)
def test_an_own_request_is_known_by_its_user(requester: str, by: str, tenants: tuple[str, ...], own: bool) -> None:
    assert is_own_request(requester, by, tenants) is own
