"""How claims are paid for beforehand: when more is due, when it is over, and what closing a lease frees for another."""

from datetime import UTC, datetime

import pytest

from bursar.core.batch.claim_billing import close_now, is_due, is_over, lacking_after, lease_of_claim
from bursar.core.batch.placement_billing import payer_of
from bursar.core.batch.unit_of_work import UnitOfWork
from bursar.core.credit.account import Account, Owner
from bursar.core.credit.billing_terms import NOTHING_SAID, Billing, StatedTerms
from bursar.core.credit.lease import Lease, LeaseState, Mode
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price, PriceList
from bursar.core.nodes.node import NodeCapacity
from bursar.core.nodes.node_claim import NodeClaim
from bursar.core.quota.quota import Counters
from bursar.core.quota.tenant_tree import Tenant, Tree
from bursar.core.values.money import MICROS, NANO
from bursar.core.values.refusal import Code, Refusal
from bursar.core.values.replace import replace

GPU = "nvidia.com/gpu"
NOW = 1_800_000_000 * MICROS
ANN = NodeClaim("claim-1", "lab", "ann", "2026-11-16T10:00:00Z", "user:lab/ann")
ROOM = NodeCapacity("n1", 1, True, {GPU: 8000, "cpu": 64_000, "pods": 110_000, "exclusive": 1000, "memory": 0})


def sheet_of(terms: StatedTerms, **payers: int) -> UnitOfWork:
    tree = Tree(tenants={"lab": Tenant("lab", billing=terms)})
    batch = UnitOfWork(datetime(2026, 11, 16, tzinfo=UTC), tree, Counters(tree, {}), str)
    batch.payers = {("lab", user.removeprefix("pool")): number for user, number in payers.items()}
    batch.classes = {"n1": "h100"}
    return batch


def book_of(credit: int, *leases: Lease) -> Ledger:
    account = Account(100, "lab", "", posted=credit)
    numbers = iter(range(1, 100))
    ledger = Ledger(NOW, PriceList.of([Price(GPU, "h100", NANO, 1)]), {100: account}, {}, numbers)
    for lease in leases:
        assert ledger.open(lease, started=True) is None
    return ledger


def lease(gpus: int, seconds: int) -> Lease:
    return Lease(0, 100, "job", window=seconds * MICROS, amounts={GPU: gpus * 1000}, klass="h100", gpus=gpus * 1000)


# What is leased.


def test_all_that_has_a_price_is_leased_for_ten_minutes_at_least() -> None:
    draft = lease_of_claim(sheet_of(StatedTerms(Billing.PREPAID, window_seconds=15), pool=100), ROOM, ANN)
    assert isinstance(draft, Lease)
    assert (draft.account, draft.uid, draft.job, draft.node) == (100, "claim-1", "claim-1", "n1")
    assert draft.amounts == {GPU: 8000, "cpu": 64_000}
    assert (draft.window, draft.mode, draft.klass, draft.gpus) == (600 * MICROS, Mode.RESERVE, "h100", 8000)


def test_who_pays_further_ahead_anyway_does_so_for_a_claim_too() -> None:
    draft = lease_of_claim(sheet_of(StatedTerms(Billing.PREPAID, Mode.RESERVE, 3600, 250), pool=100), ROOM, ANN)
    assert isinstance(draft, Lease)
    assert (draft.window, draft.discount) == (3600 * MICROS, 250)


def test_who_pays() -> None:
    terms = StatedTerms(Billing.PREPAID)
    own = lease_of_claim(sheet_of(terms, pool=100, ann=101, bob=102), ROOM, ANN)
    assert isinstance(own, Lease)
    assert own.account == 101
    nobody = lease_of_claim(sheet_of(terms, bob=102), ROOM, ANN)
    assert isinstance(nobody, Refusal)
    assert nobody.code is Code.INSUFFICIENT_CREDIT
    assert lease_of_claim(sheet_of(NOTHING_SAID, pool=100), ROOM, ANN) is None


# When.


@pytest.mark.parametrize(
    ("left", "final", "due"),
    [(301, "", False), (300, "", True), (-5, "", True), (301, "insufficient_credit", True)],
)
def test_more_is_due_when_half_is_used_or_was_refused(left: int, final: str, due: bool) -> None:
    one = Lease(1, 100, "claim-1", window=600 * MICROS, paid_until=NOW + left * MICROS, final=final)
    assert is_due(one, NOW) is due


@pytest.mark.parametrize(
    ("left", "final", "over"),
    [
        pytest.param(-500, "", False, id="nobody was refused: it is only late"),
        pytest.param(1, "insufficient_credit", False, id="what is paid is used"),
        pytest.param(0, "insufficient_credit", True, id="nothing is left"),
        pytest.param(-59, "spend_rate_exceeded", False, id="it stands still"),
        pytest.param(-60, "spend_rate_exceeded", True, id="for so long and no longer"),
    ],
)
def test_it_is_over_when_what_is_paid_is_used_and_more_was_refused(left: int, final: str, over: bool) -> None:
    one = Lease(1, 100, "claim-1", window=600 * MICROS, paid_until=NOW + left * MICROS, final=final)
    assert is_over(one, NOW, 60 * MICROS) is over


# One after another.


def test_what_is_closed_first_makes_capacity_and_a_trial_changes_nothing() -> None:
    ledger = book_of(100 * NANO, lease(4, 10))
    before = (replace(ledger.accounts[100]), replace(ledger.leases[1]))
    assert ledger.lacking([lease(8, 10)]) is not None
    assert lacking_after(ledger, [1], lease(8, 10)) is None
    refusal = lacking_after(ledger, [1], lease(8, 13))
    assert refusal is not None
    assert refusal.message == "account lab has 100 credits available, 104 are needed"
    assert (ledger.accounts[100], ledger.leases[1]) == before


@pytest.mark.parametrize(("micros", "paid"), [(0, 0), (7_654_321, 7_654_321), (25_000_000, 10_000_000)])
def test_closing_now_settles_to_this_moment_and_to_what_was_paid_at_most(micros: int, paid: int) -> None:
    ledger = book_of(100 * NANO, lease(3, 10))
    ledger.now += micros
    close_now(ledger, 1)
    one, account = ledger.leases[1], ledger.accounts[100]
    assert (one.state, one.measured, one.posted) == (LeaseState.CLOSED, paid, 3 * NANO * paid // MICROS)
    assert (account.posted, account.held, account.gpus) == (100 * NANO - one.posted, 0, 0)
    close_now(ledger, 1)
    assert account.posted == 100 * NANO - one.posted, "once"


# The payer of a placement.


@pytest.mark.parametrize(
    ("terms", "claim", "node", "expected"),
    [
        pytest.param(NOTHING_SAID, None, "n1", "nobody", id="billed afterwards"),
        pytest.param(StatedTerms(Billing.PREPAID), None, "n1", "account", id="prepaid"),
        pytest.param(StatedTerms(Billing.PREPAID), replace(ANN, lease=7), "n1", "claim", id="on a claim that is paid"),
        pytest.param(StatedTerms(Billing.PREPAID), ANN, "n1", "account", id="on a claim that is not paid for"),
        pytest.param(StatedTerms(Billing.PREPAID), replace(ANN, lease=7), "", "account", id="for the claim itself"),
        pytest.param(NOTHING_SAID, replace(ANN, lease=7), "n1", "claim", id="the claim of before"),
    ],
)
def test_payer_of_work_on_a_node(terms: StatedTerms, claim: NodeClaim | None, node: str, expected: str) -> None:
    batch = sheet_of(terms, pool=100)
    batch.nodes = {"n1": replace(ROOM, claim=claim)}
    payer = payer_of(batch, "lab", "lab/ann", node)
    assert payer.claim_lease == (7 if expected == "claim" else 0)
    assert payer.owners == ((Owner("lab", "ann"), Owner("lab")) if expected == "account" else ())
    assert (payer.terms is not None) is (expected == "account")
