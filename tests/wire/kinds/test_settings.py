"""The system's settings: what they say about scheduling, and what may be wrong with it."""

from typing import Any

import msgspec
import pytest

from bursar.core.credit.billing_terms import CreditPolicy
from bursar.core.nodes.liveness import Patience
from bursar.core.scheduling.cycle.plan import SchedulingPolicy
from bursar.core.values.refusal import field_fault
from bursar.wire.kinds.settings import (
    SETTINGS,
    CreditSettings,
    NodeSettings,
    Settings,
    budget_period_days_of,
    credit_policy_of,
    patience_of,
    policy_of,
    record_days_of,
)


def settings(**scheduling: Any) -> Settings:
    return msgspec.convert({"metadata": {"name": "system"}, "spec": {"scheduling": scheduling}}, Settings)


def test_only_what_is_said_replaces_the_policy() -> None:
    doc = msgspec.json.encode(settings(minRuntimeSeconds=0, gracePeriodSeconds=5, backfill=False))
    assert policy_of(doc) == {"min_runtime_seconds": 0, "grace_seconds": 5, "backfill": False}


def test_all_that_can_be_said_is_part_of_a_policy() -> None:
    everything = settings(
        minRuntimeSeconds=1, gracePeriodSeconds=2, quotaBackoffSeconds=3, preemption=False, backfill=False,
        energyPrice=0.75,
    )  # fmt: skip
    assert SchedulingPolicy(**policy_of(msgspec.json.encode(everything))) == SchedulingPolicy(
        min_runtime_seconds=1, grace_seconds=2, quota_backoff_seconds=3, preemption=False, backfill=False,
        energy_price=0.75,
    )  # fmt: skip


@pytest.mark.parametrize("spec", [{}, {"limits": {"nodes": 3}}, None])
def test_settings_that_say_nothing_of_it_change_nothing(spec: dict[str, Any] | None) -> None:
    document = {"metadata": {"name": "system"}} | ({} if spec is None else {"spec": spec})
    assert policy_of(msgspec.json.encode(document)) == {}


@pytest.mark.parametrize("name", ["minRuntimeSeconds", "gracePeriodSeconds", "quotaBackoffSeconds"])
@pytest.mark.parametrize("value", [-1, 10**12])
def test_times_are_bounded(name: str, value: int) -> None:
    (fault,) = SETTINGS.check(settings(**{name: value}))
    assert fault.field == f"spec.scheduling.{name}"


@pytest.mark.parametrize("price", [-0.1, 1.1, 7, -1])
def test_the_price_of_energy_runs_from_the_cheapest_to_the_dearest(price: float) -> None:
    (fault,) = SETTINGS.check(settings(energyPrice=price))
    assert fault == field_fault(
        "spec.scheduling.energyPrice", f"must be between 0 (the cheapest) and 1 (the dearest), got {price:g}"
    )
    assert SETTINGS.check(settings(energyPrice=0)) == SETTINGS.check(settings(energyPrice=1)) == []


@pytest.mark.parametrize("days", [-1, 0, 367])
def test_the_budgets_period_is_bounded(days: int) -> None:
    (fault,) = SETTINGS.check(settings(budgetPeriodDays=days))
    assert fault.field == "spec.scheduling.budgetPeriodDays"


def test_budgets_are_for_ninety_days_unless_something_else_is_said() -> None:
    assert budget_period_days_of(b'{"metadata": {"name": "system"}}') == 90
    assert budget_period_days_of(msgspec.json.encode(settings(backfill=False))) == 90
    assert budget_period_days_of(msgspec.json.encode(settings(budgetPeriodDays=30))) == 30
    assert policy_of(msgspec.json.encode(settings(budgetPeriodDays=30))) == {}  # It is no part of how a cycle decides.


# How long records are kept.


def of_usage(days: int, **scheduling: Any) -> Settings:
    spec = {"usage": {"recordDays": days}, "scheduling": scheduling}
    return msgspec.convert({"metadata": {"name": "system"}, "spec": spec}, Settings)


def test_records_are_kept_for_as_long_as_is_said() -> None:
    assert record_days_of(b'{"metadata": {"name": "system"}}') == 800
    assert record_days_of(msgspec.json.encode(settings(backfill=False))) == 800
    assert record_days_of(msgspec.json.encode(of_usage(400))) == 400
    assert SETTINGS.check(of_usage(400)) == []


@pytest.mark.parametrize(("days", "period"), [(0, 1), (-5, 1), (3651, 1), (90, 90), (366, 366), (7, 30)])
def test_records_are_kept_longer_than_budgets_count_and_not_for_ever(days: int, period: int) -> None:
    (fault,) = SETTINGS.check(of_usage(days, budgetPeriodDays=period))
    assert fault.field == "spec.usage.recordDays"


# How long silent nodes are waited for.


def of_nodes(**nodes: Any) -> Settings:
    return msgspec.convert({"metadata": {"name": "system"}, "spec": {"nodes": nodes}}, Settings)


def test_only_what_is_said_replaces_the_patience() -> None:
    assert patience_of(msgspec.json.encode(of_nodes(lostSeconds=90))) == Patience(lost_seconds=90)
    assert patience_of(b'{"metadata": {"name": "system"}}') == Patience()
    assert patience_of(msgspec.json.encode(settings(backfill=False))) == Patience()


def test_all_that_can_be_said_of_nodes_is_part_of_the_patience() -> None:
    assert NodeSettings.__struct_fields__ == tuple(Patience.__slots__)
    assert SETTINGS.check(of_nodes()) == []


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        ({"notReadySeconds": 5}, "notReadySeconds"),
        ({"heartbeatSeconds": 15}, "notReadySeconds"),
        ({"lostSeconds": 15}, "lostSeconds"),
        ({"runLeaseSeconds": 5}, "runLeaseSeconds"),
        ({"clockSkewSeconds": -1}, "clockSkewSeconds"),
        ({"killGraceSeconds": 10**12}, "killGraceSeconds"),
        ({"heartbeatSeconds": 0}, "heartbeatSeconds"),
    ],
)
def test_times_of_nodes_must_fit_together(nodes: dict[str, int], field: str) -> None:
    (fault,) = SETTINGS.check(of_nodes(**nodes))
    assert fault.field == f"spec.nodes.{field}"


def test_everything_may_be_made_shorter_together() -> None:
    short = of_nodes(heartbeatSeconds=1, notReadySeconds=2, lostSeconds=3, runLeaseSeconds=2, killGraceSeconds=0)
    assert SETTINGS.check(short) == []


# How credit is dealt with.


def of_credits(**credits: Any) -> Settings:  # noqa: A002
    return msgspec.convert({"metadata": {"name": "system"}, "spec": {"credits": credits}}, Settings)


def test_only_what_is_said_replaces_the_policy_of_credit() -> None:
    said = of_credits(
        leaseSeconds=15, driftCredits="0.5", driftAccountCredits=3, driftAccountHours=6, creditValue="2.50"
    )
    wanted = CreditPolicy(
        lease_seconds=15,
        drift_credits=500_000_000,
        drift_account_credits=3_000_000_000,
        drift_account_hours=6,
        credit_value="2.50",
    )
    assert SETTINGS.check(said) == []
    assert credit_policy_of(msgspec.json.encode(said)) == wanted
    assert credit_policy_of(b'{"metadata": {"name": "system"}}') == CreditPolicy()
    assert credit_policy_of(msgspec.json.encode(settings(backfill=False))) == CreditPolicy()


def test_all_that_can_be_said_of_credit_is_part_of_the_policy() -> None:
    assert set(CreditSettings.__struct_fields__) <= set(CreditPolicy.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("leaseSeconds", 0),
        ("leaseSeconds", 86_401),
        ("reserveSeconds", -1),
        ("extendSecondsMax", 10**12),
        ("throttleSecondsMax", -1),
        ("reconcileSeconds", -1),
        ("sealSeconds", 0),
        ("entryDays", 0),
        ("driftCredits", -1),
        ("driftCredits", "1.0000000001"),
        ("driftCredits", "much"),
        ("driftAccountCredits", "-0.1"),
        ("driftAccountHours", 0),
        ("driftAccountHours", 31 * 24 + 1),
        ("creditValue", "-1.00"),
        ("creditValue", "$1"),
    ],
)
def test_settings_of_credit_are_bounded(field: str, value: object) -> None:
    (fault,) = SETTINGS.check(of_credits(**{field: value}))
    assert fault.field == f"spec.credits.{field}"
