"""The table of roles and verbs, read aloud."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values.access import (
    ANY,
    DELEGATE,
    EVERY,
    JOINING,
    VERBS,
    Identity,
    Reach,
    Role,
    grantable,
    identity_fault,
    reach,
)
from bursar.wire.kinds.registry import policy

POLICY = policy()
allows = POLICY.allows

WHO = {
    "system-admin": Identity("root", Role.SYSTEM_ADMIN),
    "tenant-admin": Identity("ada", Role.TENANT_ADMIN, tenant="ml"),
    "user": Identity("alice", Role.USER, tenant="ml"),
    "viewer": Identity("victor", Role.VIEWER, tenant="ml"),
    "node": Identity("gpu-1", Role.NODE, node="gpu-1"),
    "bootstrap": Identity("gpu-2", Role.NODE, node="gpu-2", bootstrap=True),
    "approver": Identity("quota-service", Role.APPROVER, tenants=((EVERY, ""),), gates=("quota",)),
    "approver of ml": Identity("ann", Role.APPROVER, tenants=(("ml", "uid"),), gates=("manual",)),
    "billing-admin": Identity("bill", Role.BILLING_ADMIN),
    "service": Identity("waldur", Role.SERVICE),
}

SENTENCES = """
system-admin   may     patch tenants
system-admin   may     drain nodes
system-admin   may     boost jobs
system-admin   may     preempt allocations
system-admin   may     create preemptions
system-admin   may     create tokens
system-admin   may     update settings
system-admin   may     bind allocations
system-admin   may     create pods/eviction
system-admin   may     patch allocations/status
system-admin   may     * *

tenant-admin   may     create namespaces
tenant-admin   may     patch resourcequotas
tenant-admin   may     create tokens
tenant-admin   may     delete tokens
tenant-admin   may     get tenants
tenant-admin   may     get tenants/quotas
tenant-admin   may     delete allocations
tenant-admin   may not patch tenants
tenant-admin   may not update tenants
tenant-admin   may not create tenants
tenant-admin   may not patch tiers
tenant-admin   may not topup accounts
tenant-admin   may not create topups
tenant-admin   may not update limits
tenant-admin   may not create accounts
tenant-admin   may not get ledger
tenant-admin   may     create members
tenant-admin   may     delete members
tenant-admin   may not boost jobs
tenant-admin   may not drain nodes
tenant-admin   may not preempt allocations
tenant-admin   may not patch allocations/status
tenant-admin   may not patch resourceclaims/approval
tenant-admin   may not get settings
tenant-admin   may not patch resourcequotas/status

user           may     create allocations
user           may     watch allocations
user           may     patch allocations
user           may     delete allocations
user           may     release allocations
user           may     explain allocations
user           may     get allocations/status
user           may     create jobs
user           may     cancel jobs
user           may     get jobs/status
user           may     create workloads
user           may     patch workloads/scale
user           may     create resourceclaims
user           may     claim nodes
user           may     list namespaces
user           may     get resourcequotas/status
user           may     get tenants/usage
user           may     list events
user           may     get balance
user           may not get nodes/evictions
user           may not create namespaces
user           may not patch resourcequotas
user           may not patch allocations/status
user           may not patch allocations/approval
user           may not create allocations/binding
user           may not bind allocations
user           may not boost jobs
user           may not create tokens
user           may not list tokens
user           may not patch nodes
user           may not patch nodes/status
user           may not create topups
user           may not create prices
user           may not create usage
user           may     create leases
user           may     get statements
user           may     get forecast
user           may     list prices
user           may not get ledger
user           may     list members
user           may not create members
user           may not create refunds
user           may not patch accounts
user           may not create preemptions

viewer         may     list allocations
viewer         may     watch jobs
viewer         may     explain allocations
viewer         may     get tenants
viewer         may not create allocations
viewer         may not delete allocations
viewer         may not release allocations
viewer         may not cancel jobs
viewer         may not claim nodes
viewer         may not create leases
viewer         may not list tokens

node           may     patch nodes/status
node           may     get nodes
node           may     get nodes/evictions
node           may     get allocations
node           may     patch allocations/status
node           may     extend leases
node           may     create usage
node           may not create nodes
node           may not patch nodes
node           may not delete nodes
node           may not create allocations
node           may not patch allocations
node           may not list namespaces
node           may not list tenants
node           may not create leases
node           may not list events

bootstrap      may     create nodes
bootstrap      may     create certificates
node           may     create certificates
user           may not create certificates
tenant-admin   may not create certificates
service        may not create certificates
system-admin   may     create certificates
bootstrap      may not get nodes
bootstrap      may not patch nodes/status
bootstrap      may not get allocations
bootstrap      may not create selfsubjectaccessreviews

approver       may     list resourceclaims
approver       may     get tenants/quotas
approver       may     patch resourceclaims/approval
approver       may     patch volumes/approval
approver       may     approve allocations
approver       may not patch resourceclaims
approver       may not patch allocations/status
approver       may not create allocations
approver       may not list tokens
approver       may not list webhooks
approver       may not get ledger
approver       may not get nodes/evictions
approver       may     get nodes
approver       may     list members
approver       may not patch tenants

billing-admin  may     create topups
billing-admin  may     topup accounts
billing-admin  may     create prices
billing-admin  may     list entries
billing-admin  may     create refunds
billing-admin  may     create adjustments
billing-admin  may     patch accounts
billing-admin  may     get ledger/verify
billing-admin  may not create leases
billing-admin  may not create usage
billing-admin  may     update limits
billing-admin  may     get tenants
billing-admin  may not patch tenants
billing-admin  may not patch entries
billing-admin  may not delete entries
billing-admin  may not create allocations
billing-admin  may not list allocations
billing-admin  may not get settings

service        may     update tenants
service        may     patch tenants
service        may     patch tiers
service        may     create topups
service        may     list allocations
service        may     get settings
service        may not delete tenants
service        may not create allocations
service        may not create tokens
service        may not create prices
service        may not create refunds
service        may not create adjustments
service        may not patch accounts
service        may     create usage
service        may     create leases
service        may not patch resourceclaims/approval
service        may not drain nodes
"""


def _sentences() -> list[tuple[str, bool, str, str]]:
    rows = [line.split() for line in SENTENCES.splitlines() if line]
    return [(words[0], words[2] != "not", words[-2], words[-1]) for words in rows]


@pytest.mark.parametrize(("who", "may", "verb", "what"), _sentences())
def test_the_table_says(who: str, may: bool, verb: str, what: str) -> None:
    resource, _, part = what.partition("/")
    assert allows(WHO[who], verb, resource, part) is may


@pytest.mark.parametrize("who", [who for who in WHO if who != "bootstrap"])
def test_everybody_reads_the_catalogue_and_asks_what_it_may(who: str) -> None:
    for kind in POLICY.catalogue:
        assert all(allows(WHO[who], verb, kind) for verb in ("get", "list", "watch"))
        assert allows(WHO[who], "get", kind, "status")
    assert allows(WHO[who], "create", "selfsubjectaccessreviews")
    assert allows(WHO[who], "create", "selfsubjectrulesreviews")


@pytest.mark.parametrize("who", WHO)
@given(word=st.text(max_size=12))
def test_what_nobody_named_is_refused_to_everybody(who: str, word: str) -> None:
    if word not in VERBS | {ANY}:
        assert not allows(WHO[who], word, "allocations")
    if word not in POLICY.resources | {ANY}:
        assert not allows(WHO[who], "get", word)
        assert not allows(WHO[who], "get", word, "status")


@pytest.mark.parametrize("who", [who for who in WHO if who != "system-admin"])
@given(part=st.text(min_size=1, max_size=12).filter(lambda part: part not in {"approval", "status", "scale", "stdin"}))
def test_only_the_system_s_admins_write_a_part_that_nobody_named(who: str, part: str) -> None:
    for resource in POLICY.resources:
        assert not any(allows(WHO[who], verb, resource, part) for verb in ("create", "update", "patch", "delete"))


@pytest.mark.parametrize("who", [who for who in WHO if who != "system-admin"])
def test_only_the_system_s_admins_may_ask_for_everything(who: str) -> None:
    assert not allows(WHO[who], ANY, "allocations")
    assert not allows(WHO[who], "create", ANY)


def test_every_word_in_the_table_is_known() -> None:
    for rule in (rule for granted in POLICY.grants.values() for rule in granted):
        assert set(rule.verbs) <= VERBS | {ANY}
        assert {name.partition("/")[0] for name in rule.resources} <= POLICY.resources | {ANY}


def test_every_role_has_its_rules() -> None:
    assert set(POLICY.grants) == set(Role)
    assert POLICY.rules(WHO["user"]) == POLICY.grants[Role.USER]
    assert POLICY.rules(WHO["bootstrap"]) != POLICY.grants[Role.NODE]


@pytest.mark.parametrize(
    ("who", "lineage", "sees"),
    [
        ("system-admin", ["physics"], True),
        ("service", ["physics"], True),
        ("approver", ["physics"], True),
        ("approver of ml", ["ml"], True),
        ("approver of ml", ["ml-vision", "ml"], True),
        ("approver of ml", ["physics"], False),
        ("approver of ml", [], False),
        ("billing-admin", ["physics"], True),
        ("tenant-admin", ["ml"], True),
        ("tenant-admin", ["ml-vision", "ml", "company"], True),
        ("tenant-admin", ["company"], False),
        ("tenant-admin", ["physics", "company"], False),
        ("user", ["ml", "company"], True),
        ("user", ["ml-vision", "ml"], False),
        ("user", ["company"], False),
        ("user", [], False),
        ("viewer", ["ml"], True),
        ("viewer", ["physics"], False),
        ("node", ["ml"], False),
        ("node", [""], False),
        ("bootstrap", ["ml"], False),
    ],
)
def test_whose_objects_are_seen(who: str, lineage: list[str], sees: bool) -> None:
    assert reach(WHO[who]).sees(lineage) is sees


def test_a_node_sees_what_is_bound_to_it_and_nothing_else() -> None:
    own = reach(WHO["node"])
    assert own.sees_bound({"gpu-0", "gpu-1"})
    assert not own.sees_bound({"gpu-2"})
    assert not own.sees_bound(())
    assert not reach(WHO["user"]).sees_bound({"gpu-1"})
    assert not reach(WHO["bootstrap"]).sees_bound({"gpu-2"})
    assert not Reach().sees_bound({""})


def test_an_identity_without_a_tenant_sees_nothing_of_the_nameless_tenant() -> None:
    assert not reach(Identity("nobody", Role.USER)).sees([""])
    assert not reach(Identity("nobody", Role.TENANT_ADMIN)).sees(["", "ml"])


def test_actors_say_what_kind_of_somebody_acted() -> None:
    assert WHO["user"].actor == f"user:{WHO['user'].tenant}/alice"
    assert WHO["system-admin"].actor == "user:root"
    assert WHO["node"].actor == "node:gpu-1"
    assert WHO["service"].actor == "service:waldur"


def test_a_tenant_admin_gives_only_roles_of_tenants() -> None:
    assert grantable(WHO["tenant-admin"]) == {Role.TENANT_ADMIN, Role.USER, Role.VIEWER}
    assert grantable(WHO["system-admin"]) == set(Role)
    assert all(not grantable(WHO[who]) for who in WHO if who not in {"tenant-admin", "system-admin"})


@pytest.mark.parametrize(
    ("role", "user", "tenant", "node", "fault"),
    [
        (Role.USER, "alice", "ml", "", ""),
        (Role.USER, "alice", "", "", "role user belongs to a tenant: name one"),
        (Role.SYSTEM_ADMIN, "", "", "", ""),
        (Role.NODE, "", "", "", "role node belongs to one node: name it"),
        (Role.NODE, "", "", "gpu-1", ""),
        (Role.VIEWER, "v", "ml", "gpu-1", "role viewer belongs to no node: leave the node out"),
        (Role.USER, "al\nice", "ml", "", "the user's name must be printable and have at most 253 characters"),
        (Role.USER, "alice", "m" * 254, "", "the tenant's name must be printable and have at most 253 characters"),
    ],
)
def test_identities_that_cannot_be(role: Role, user: str, tenant: str, node: str, fault: str) -> None:
    assert identity_fault(role, user=user, tenant=tenant, node=node) == fault


def test_the_documentation_s_table_names_every_role_once_for_each_rule() -> None:
    rows = POLICY.table()
    assert {row[0] for row in rows} == {"everybody", JOINING, DELEGATE, *map(str, Role)}
    assert ("system-admin", "*", "*") in rows
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(
    ("who", "lineage", "owner", "seen"),
    [
        ("user", ("ml",), "alice", True),
        ("user", ("ml",), "", True),
        ("user", ("ml",), "bob", False),
        ("user", ("physics",), "alice", False),
        ("user", ("ml-child", "ml"), "", False),
        ("viewer", ("ml",), "alice", False),
        ("tenant-admin", ("ml",), "bob", True),
        ("tenant-admin", ("ml-child", "ml"), "bob", True),
        ("tenant-admin", ("physics",), "", False),
        ("tenant-admin", (), "", False),
        ("billing-admin", ("physics",), "bob", True),
        ("node", ("ml",), "", False),
    ],
)
def test_users_see_their_own_account_and_their_tenants(
    who: str, lineage: tuple[str, ...], owner: str, seen: bool
) -> None:
    assert reach(WHO[who]).sees_account(lineage, owner, WHO[who].user) is seen
