"""Changes of the tenant tree: what they refuse, and that usage moves with a tenant."""

import pytest

from bursar.commands.quota.tenant_tree import TreeUse
from bursar.core.credit.account import Account
from bursar.core.objects.object import Key
from bursar.core.values.refusal import Code
from support.commands.records import GPU, Records, code, key_of, refusal


def tenant_key(name: str) -> Key:
    return Key("Tenant", "", name)


def family(**limits: int) -> Records:
    """Two tenants below `left`, one below `right`; each of the three has a namespace with one GPU in use."""
    records = Records()
    for name, parent in (("left", ""), ("right", ""), ("a", "left"), ("b", "left"), ("c", "right")):
        bounds = {"limits": {GPU: limits[name]}} if name in limits else {}
        assert code(records.tenant(name, **({"parent": parent} if parent else {}), **bounds)) == "ok"
        if parent:
            assert code(records.namespace(name, name)) == "ok"
            assert code(records.allocation("x", name, gpu=1)) == "ok"
    return records


def gpus(records: Records) -> dict[str, int]:
    return {name: records.used(f"tenant:{name}")[0] for name in ("left", "right", "a", "b", "c")}


def test_the_limit_of_an_ancestor_holds_for_everything_below_it() -> None:
    records = family(left=3, right=6)
    assert gpus(records) == {"left": 2, "right": 1, "a": 1, "b": 1, "c": 1}
    assert code(records.allocation("y", "a", gpu=1)) == "ok"
    assert code(records.allocation("y", "b", gpu=1)) == "quota_exceeded"
    assert code(records.allocation("y", "c", gpu=5)) == "ok"


def test_moving_a_tenant_moves_what_its_subtree_uses() -> None:
    records = family(left=4, right=4, a=4, b=4, c=4)
    assert code(records.change(tenant_key("a"), parent="right")) == "ok"
    assert gpus(records) == {"left": 1, "right": 2, "a": 1, "b": 1, "c": 1}
    records.delete(key_of("x", "a"))
    assert gpus(records) == {"left": 1, "right": 1, "a": 0, "b": 1, "c": 1}


def test_a_move_without_capacity_is_refused_and_changes_nothing() -> None:
    records = family(left=4, right=1, a=4, b=4, c=4)
    before, tree = gpus(records), records.tree
    refused = refusal(records.change(tenant_key("a"), parent="right"))
    assert refused.code == Code.IN_USE
    assert refused.causes[0].dimension == GPU
    assert (gpus(records), records.tree) == (before, tree)


@pytest.mark.parametrize("parent", ["a", "nobody"])
def test_a_tenant_cannot_be_below_itself_or_below_nobody(parent: str) -> None:
    refused = refusal(family().change(tenant_key("left"), parent=parent))
    assert (refused.code, refused.causes[0].field) == (Code.INVALID, "spec.parent")


@pytest.mark.parametrize(("spec", "field"), [({"parent": "nobody"}, "spec.parent"), ({"tier": "none"}, "spec.tier")])
def test_a_new_tenant_needs_the_parent_and_the_tier_that_it_names(spec: dict[str, str], field: str) -> None:
    refused = refusal(Records().tenant("new", **spec))
    assert (refused.code, refused.causes[0].field) == (Code.INVALID, field)


def test_a_limit_that_is_lowered_stops_nothing_and_refuses_only_increases() -> None:
    records = family(left=4)
    assert code(records.change(tenant_key("left"), limits={GPU: 1})) == "ok"
    assert records.used("tenant:left") == (2, 0)
    assert code(records.allocation("y", "a", gpu=1)) == "quota_exceeded"
    assert code(records.delete(key_of("x", "a"))) == "ok"
    assert records.used("tenant:left") == (1, 0)


@pytest.mark.parametrize(
    ("name", "use", "expected"),
    [
        ("left", TreeUse(), "still has tenants a, b"),
        ("c", TreeUse(), "still has namespaces c"),
        ("free", TreeUse(kept_for=("n1",)), "n1"),
        ("free", TreeUse(claimed=("n2",)), "n2"),
        ("free", TreeUse(accounts=(Account(1, "free", posted=1),)), "credit"),
    ],
)
def test_a_tenant_that_is_in_use_is_not_deleted(name: str, use: TreeUse, expected: str) -> None:
    records = family()
    records.tenant("free")
    refused = refusal(records.delete(tenant_key(name), use))
    assert expected in refused.message
    assert tenant_key(name) in records.objects


def test_a_tenant_that_nothing_uses_is_deleted() -> None:
    records = family()
    records.tenant("free")
    assert code(records.delete(tenant_key("free"))) == "ok"
    assert "free" not in records.tree.tenants


@pytest.mark.parametrize("key", [tenant_key("default"), Key("Namespace", "", "default")])
def test_the_built_in_objects_stay(key: Key) -> None:
    assert refusal(Records().delete(key)).code == Code.FORBIDDEN
