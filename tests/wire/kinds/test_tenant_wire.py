"""Tenants as they are spoken: the flat form, what may be wrong with them, and how they show."""

from typing import Any

import msgspec
import pytest

from bursar.wire.kinds.tenant import FLAT_FIELDS, SOFT_FIELDS, TENANT, Tenant, TenantSpec, merge_from_flat, to_tree


def tenant(status: dict[str, Any] | None = None, **spec: Any) -> Tenant:
    return msgspec.convert({"metadata": {"name": "physics"}, "spec": spec, "status": status or {}}, Tenant)


def test_the_flat_form_names_limits_and_everything_else_that_may_be_said() -> None:
    assert merge_from_flat(
        {
            "max_nodes": 250,
            "max_concurrent_allocations": 50,
            "gpu_hours_budget": 150000,
            "node_hours_budget": 500000,
            "fair_share_target": 0.15,
            "burst_allowance": 1.5,
            "billing_mode": "prepaid",
            "approval_policy": "manual",
            "sensitive": True,
        }
    ) == {
        "spec": {
            "gpuHoursBudget": 150000,
            "nodeHoursBudget": 500000,
            "fairShareTarget": 0.15,
            "burstAllowance": 1.5,
            "billing": {"mode": "prepaid"},
            "approvalPolicy": "manual",
            "sensitive": True,
            "limits": {"nodes": 250, "allocations": 50},
        }
    }


def test_every_field_of_a_tenant_can_be_said_in_the_flat_form() -> None:
    structured = {"approval", "warn_at"}
    flat = {*SOFT_FIELDS, *FLAT_FIELDS, "billing", "limits", *structured}
    assert flat == set(TenantSpec.__struct_fields__)


def test_what_is_not_known_is_named() -> None:
    faults = merge_from_flat({"max_nodes": 1, "gpu_hours": 5, "billing": {"mode": "none"}})
    assert isinstance(faults, list)
    assert [one.field for one in faults] == ["gpu_hours", "billing"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"approvalPolicy": "sometimes"}, "spec.approvalPolicy"),
        ({"billing": {"mode": "later"}}, "spec.billing.mode"),
        ({"gpuHoursBudget": -1}, "spec.gpuHoursBudget"),
        ({"nodeHoursBudget": 1e16}, "spec.nodeHoursBudget"),
        ({"fairShareTarget": 1.5}, "spec.fairShareTarget"),
        ({"burstAllowance": 0.9}, "spec.burstAllowance"),
        ({"enforcement": "Maybe"}, "spec.enforcement"),
        ({"parent": "physics"}, "spec.parent"),
    ],
)
def test_each_fault_names_its_field(spec: dict[str, Any], field: str) -> None:
    assert [one.field for one in TENANT.check(tenant(**spec))] == [field]


@pytest.mark.parametrize("policy", ["none", "quota", "manual", "external"])
def test_policies_of_approval(policy: str) -> None:
    assert TENANT.check(tenant(approvalPolicy=policy)) == []


@pytest.mark.parametrize(("said", "may"), [({}, True), ({"sensitive": True}, True), ({"sensitive": False}, False)])
def test_nodes_may_be_claimed_unless_that_is_denied(said: dict[str, Any], may: bool) -> None:
    assert to_tree(tenant(**said)).may_claim is may


def conditions(warning: str, exhausted: str) -> dict[str, Any]:
    found = {"BudgetWarning": warning, "BudgetExhausted": exhausted}
    return {"conditions": [{"type": name, "status": value} for name, value in found.items()]}


@pytest.mark.parametrize(
    ("status", "spec", "field", "shown"),
    [
        ({}, {}, "Within", "<none>"),
        ({}, {"gpuHoursBudget": 5}, "Within", "Within"),
        (conditions("True", "False"), {"nodeHoursBudget": 5}, "Warning", "Warning"),
        (conditions("True", "True"), {"gpuHoursBudget": 5}, "Exhausted", "Exhausted"),
        (conditions("False", "False"), {}, "Within", "<none>"),
    ],
)
def test_how_it_stands_with_its_budget_is_a_field_and_a_column(
    status: dict[str, Any], spec: dict[str, Any], field: str, shown: str
) -> None:
    one = tenant(status, **spec)
    assert TENANT.fields(one)["status.budget"] == field
    column = next(each for each in TENANT.columns if each.name == "Budget")
    assert column.value(msgspec.to_builtins(one)) == shown
