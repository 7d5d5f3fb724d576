"""Names are given anew: what is seen, and spent, follows the tenant and not its name."""

import pytest

from bursar.core.access import Identity, Reach, Role, identity_fault, reach
from bursar.core.account import Account, filed_name, is_filed, spends_anothers
from bursar.core.names import dns_subdomain
from bursar.core.tree import Tenant, Tree, is_current, saw, sees, with_end, without_tenant

FIRST, SECOND = "tenant-1", "tenant-2"


def tree(*tenants: Tenant, **ended: tuple[int, int]) -> Tree:
    return Tree({one.name: one for one in tenants}, ended=ended)


LAB = Tenant("lab", parent="uni", uid=SECOND)
UNI = Tenant("uni", uid="tenant-0")


@pytest.mark.parametrize(
    ("whose", "current"),
    [
        (Reach(tenant="lab", tenant_uid=SECOND), True),
        (Reach(tenant="lab", tenant_uid=FIRST), False),
        (Reach(tenant="lab"), True),
        (Reach(tenant="gone", tenant_uid=FIRST), True),
        (Reach(everything=True), True),
    ],
)
def test_whose_tenant_is_still_theirs(whose: Reach, current: bool) -> None:
    assert is_current(tree(LAB, UNI), whose) is current


def test_the_people_of_a_deleted_tenant_see_nothing_of_its_namesake() -> None:
    now = tree(LAB, UNI)
    assert sees(now, Reach(tenant="lab", tenant_uid=SECOND), "lab")
    assert not sees(now, Reach(tenant="lab", tenant_uid=FIRST), "lab")
    assert sees(now, Reach(tenant="uni", tenant_uid="tenant-0", subtree=True), "lab")
    assert sees(now, Reach(everything=True), "lab")


@pytest.mark.parametrize(("revision", "seen"), [(1, False), (7, False), (8, True), (99, True)])
def test_what_happened_before_a_tenant_was_made_is_hidden_from_its_people(revision: int, seen: bool) -> None:
    now = tree(LAB, UNI, lab=(3, 7))
    for whose in (Reach(tenant="lab", tenant_uid=SECOND), Reach(tenant="uni", tenant_uid="tenant-0", subtree=True)):
        assert saw(now, whose, "lab", revision) is seen
    assert saw(now, Reach(everything=True), "lab", revision)
    assert not saw(now, Reach(tenant="uni", tenant_uid="tenant-0"), "lab", revision)


@pytest.mark.parametrize(("revision", "seen"), [(3, False), (4, True), (7, True)])
def test_a_tenant_that_was_deleted_is_told_so_and_nothing_of_those_before_it(revision: int, seen: bool) -> None:
    now = tree(UNI, lab=(3, 7))
    assert saw(now, Reach(tenant="lab", tenant_uid=FIRST), "lab", revision) is seen
    assert not saw(now, Reach(tenant="other", tenant_uid=FIRST), "lab", revision)


def test_deletions_are_remembered_in_order_and_once() -> None:
    ended = with_end(with_end(with_end({}, "lab", 3), "lab", 7), "lab", 7)
    assert ended == {"lab": (3, 7)}
    assert without_tenant(tree(LAB, UNI, lab=(0, 3)), "lab", 7).ended == {"lab": (3, 7)}
    assert without_tenant(tree(LAB, UNI), "lab").ended == {}, "where nothing was committed"


def test_no_tenant_can_be_called_as_what_a_deleted_one_left() -> None:
    name = filed_name("lab", FIRST)
    assert name == "lab@tenant-1"
    assert is_filed(name)
    assert dns_subdomain(name)
    assert not is_filed("lab")


def test_users_do_not_choose_who_pays() -> None:
    pool, own = Account(100, "lab"), Account(101, "lab", "ann")
    assert spends_anothers(pool, None) is None
    assert spends_anothers(own, own) is None
    refusal = spends_anothers(pool, own)
    assert refusal is not None
    assert refusal.message == "account lab/ann pays for you, and not lab"


def test_an_identity_carries_its_tenants_uid() -> None:
    assert reach(Identity("ann", Role.USER, "lab", tenant_uid=FIRST)) == Reach(tenant="lab", tenant_uid=FIRST)


@pytest.mark.parametrize("role", [Role.SYSTEM_ADMIN, Role.BILLING_ADMIN, Role.APPROVER, Role.SERVICE])
def test_nobody_without_a_tenant_is_recorded_as_a_tenants_user(role: Role) -> None:
    assert "slash" in identity_fault(role, user="rival/ann", tenant="", node="")
    assert identity_fault(Role.USER, user="a/b", tenant="lab", node="") == ""
