"""The ledger's commands on a desk: top-ups, leases by name, refunds, accounts and prices; and what refuses them."""

from itertools import count
from typing import Any

import pytest

from bursar.commands.credit.credit import (
    Adjust,
    CloseLeaseCommand,
    DropPrice,
    ExtendLeaseCommand,
    Lapse,
    OpenLease,
    PutAccount,
    PutPrice,
    Refund,
    TopUp,
)
from bursar.commands.credit.ledger import Credit, LedgerBatch, Receipt
from bursar.core.credit.account import Account, Owner
from bursar.core.credit.lease import Lease, LeaseState
from bursar.core.credit.ledger import Ledger
from bursar.core.credit.price import Price, PriceList
from bursar.core.values.money import AMOUNT_MAX, MICROS, NANO
from bursar.core.values.refusal import Code, Refusal

GPU = "nvidia.com/gpu"
LAB, ANN = Owner("lab"), Owner("lab", "ann")
BEGIN = 1_900_000_000 * MICROS


def batch(credit: int = 100, **limits: Any) -> LedgerBatch:
    """The pool of a tenant with this many credits; one GPU costs a credit a second."""
    prices = PriceList.of([Price(GPU, "", NANO, 0)])
    accounts = {7: Account(7, "lab", posted=credit * NANO, tenant_uid="tenant-1", **limits)}
    return LedgerBatch(Ledger(BEGIN, prices, accounts, numbers=count(1)), {LAB: 7})


def done(at: LedgerBatch, command: Credit) -> Receipt:
    receipt = command.decide(at)
    assert isinstance(receipt, Receipt), receipt
    return receipt


def refused(at: LedgerBatch, command: Credit) -> Refusal:
    before = (repr(at.ledger.accounts), repr(at.ledger.leases), list(at.ledger.entries))
    reply = command.decide(at)
    assert isinstance(reply, Refusal)
    assert (repr(at.ledger.accounts), repr(at.ledger.leases), list(at.ledger.entries)) == before
    return reply


def opened(seconds: int = 60, gpus: int = 1, whose: Owner = LAB) -> OpenLease:
    return OpenLease(whose=whose, job="job", amounts={GPU: gpus * 1000}, window=seconds * MICROS, actor="user:test")


def money(at: LedgerBatch) -> tuple[int, int]:
    """Posted and held, in credits."""
    account = at.ledger.accounts[7]
    return account.posted // NANO, account.held // NANO


# Money that comes and goes.


def test_what_is_topped_up_is_there_and_on_the_receipt() -> None:
    at = batch(10)
    receipt = done(at, TopUp(whose=LAB, amount=5 * NANO, actor="user:test"))
    assert receipt.account is not None
    assert (receipt.account.posted, money(at)) == (15 * NANO, (15, 0))
    assert [one.amount for one in at.ledger.entries] == [5 * NANO]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (TopUp(whose=ANN, amount=NANO), Code.NOT_FOUND),
        (TopUp(whose=Owner("lab@tenant-0"), amount=NANO), Code.IMMUTABLE),
        (TopUp(whose=LAB, amount=NANO, tenant_uid="tenant-2"), Code.NOT_FOUND),
        (TopUp(whose=LAB, amount=AMOUNT_MAX + 1), Code.INVALID),
        (TopUp(whose=LAB, amount=-1), Code.INVALID),
        (Adjust(whose=LAB, amount=-101 * NANO), Code.INSUFFICIENT_CREDIT),
        (Refund(whose=LAB, amount=NANO, for_lease=9), Code.NOT_FOUND),
    ],
)
def test_movements_that_cannot_be_change_nothing(command: Credit, expected: Code) -> None:
    assert refused(batch(), command).code == expected


# Leases by name.


def test_a_lease_holds_what_it_may_use_and_is_settled_when_it_is_closed() -> None:
    at = batch(100)
    receipt = done(at, opened(60))
    assert receipt.lease is not None
    assert (receipt.lease.id, money(at)) == (1, (100, 60))
    at.ledger.now += 20 * MICROS
    closed = done(at, CloseLeaseCommand(number=1))
    assert closed.lease is not None
    assert (closed.lease.state, money(at)) == (LeaseState.CLOSED, (80, 0))
    again = done(at, CloseLeaseCommand(number=1))
    assert again.lease == closed.lease, "one that has ended is answered as it did"


@pytest.mark.parametrize(
    ("limits", "command", "expected"),
    [
        ({}, opened(101), Code.INSUFFICIENT_CREDIT),
        ({"gpus_max": 1000}, opened(10, gpus=2), Code.CONCURRENCY_EXCEEDED),
        ({"spend_rate_max": NANO, "spend_burst": 0}, opened(10, gpus=2), Code.SPEND_RATE_EXCEEDED),
        ({}, opened(0), Code.INVALID),
        ({}, opened(whose=ANN), Code.NOT_FOUND),
    ],
)
def test_a_lease_without_capacity_is_refused(limits: dict[str, Any], command: Credit, expected: Code) -> None:
    assert refused(batch(100, **limits), command).code == expected


@pytest.mark.parametrize(("delta", "ahead", "paid"), [(30, 600, 90), (30, 70, 70), (600, 75, 75)])
def test_an_extension_pays_further_ahead_but_never_beyond_the_horizon(delta: int, ahead: int, paid: int) -> None:
    at = batch(100)
    done(at, opened(60))
    receipt = done(at, ExtendLeaseCommand(number=1, delta=delta * MICROS, ahead_max=ahead * MICROS))
    assert receipt.lease is not None
    assert receipt.lease.paid_until == BEGIN + paid * MICROS
    assert money(at) == (100, paid)


def test_an_extension_that_is_not_paid_for_says_how_long_is_left() -> None:
    at = batch(60)
    done(at, opened(60))
    at.ledger.now += 15 * MICROS
    reply = ExtendLeaseCommand(number=1, delta=30 * MICROS, ahead_max=600 * MICROS).decide(at)
    assert isinstance(reply, Refusal)
    assert (reply.code, reply.seconds_left) == (Code.INSUFFICIENT_CREDIT, 45)


@pytest.mark.parametrize(
    "command", [ExtendLeaseCommand(number=1, delta=MICROS, ahead_max=MICROS), CloseLeaseCommand(number=1)]
)
@pytest.mark.parametrize(("uid", "told"), [("alloc-1", "running allocation"), ("claim-1", "claim of node n1")])
def test_the_lease_of_something_placed_lasts_as_long_as_that(command: Credit, uid: str, told: str) -> None:
    at = batch(100)
    lease = Lease(0, 7, "job", window=60 * MICROS, amounts={GPU: 1000}, gpus=1000, uid=uid, node="n1")
    assert at.ledger.open(lease, started=True) is None
    reply = refused(at, command)
    assert reply.code == Code.IN_USE
    assert told in reply.message


def test_a_lease_that_never_was_is_not_found_and_one_that_ended_is_not_extended() -> None:
    at = batch(100)
    assert refused(at, CloseLeaseCommand(number=3)).code == Code.NOT_FOUND
    done(at, opened(60))
    done(at, CloseLeaseCommand(number=1))
    gone = refused(at, ExtendLeaseCommand(number=1, delta=MICROS, ahead_max=600 * MICROS))
    assert (gone.code, gone.seconds_left) == (Code.FENCED, 0)


def test_a_refund_of_a_lease_is_never_more_than_it_cost() -> None:
    at = batch(100)
    done(at, opened(60))
    at.ledger.now += 20 * MICROS
    done(at, CloseLeaseCommand(number=1))
    assert refused(at, Refund(whose=LAB, amount=21 * NANO, for_lease=1)).code == Code.UNPROCESSABLE
    done(at, Refund(whose=LAB, amount=20 * NANO, for_lease=1))
    assert money(at) == (100, 0)
    assert refused(at, Refund(whose=LAB, amount=1, for_lease=1)).code == Code.UNPROCESSABLE


def test_a_lease_lapses_only_while_it_is_paid_as_was_seen() -> None:
    at = batch(100)
    done(at, opened(60))
    seen = at.ledger.leases[1].paid_until
    done(at, ExtendLeaseCommand(number=1, delta=30 * MICROS, ahead_max=600 * MICROS))
    assert refused(at, Lapse(number=1, paid_until=seen)).code == Code.STALE
    at.ledger.now += 90 * MICROS
    done(at, Lapse(number=1, paid_until=seen + 30 * MICROS))
    assert money(at) == (10, 0)


# Accounts and prices.


def test_an_account_is_opened_on_purpose_and_once() -> None:
    at = batch()
    at.owners[ANN], at.ledger.accounts[8] = 8, Account(8, "lab", "ann", tenant_uid="tenant-1")
    at.added.add(8)
    assert refused(at, PutAccount(whose=ANN, changes={}, only_old=True)).code == Code.NOT_FOUND
    done(at, PutAccount(whose=ANN, changes={"credit_limit": NANO}, only_new=True))
    assert refused(at, PutAccount(whose=LAB, changes={}, only_new=True)).code == Code.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("begin", "expected"),
    [(None, BEGIN), (BEGIN - 30 * MICROS, BEGIN), (BEGIN + 60 * MICROS, BEGIN + 60 * MICROS)],
)
def test_prices_begin_now_or_later(begin: int | None, expected: int) -> None:
    receipt = done(batch(), PutPrice(resource=GPU, klass="h100", per_second=2 * NANO, effective_from=begin))
    assert receipt.price is not None
    assert receipt.price.effective_from == expected


def test_a_price_that_has_begun_stays_as_it_is() -> None:
    at = batch()
    past = PutPrice(resource=GPU, klass="", per_second=1, effective_from=BEGIN - 90 * MICROS)
    assert refused(at, past).code == Code.UNPROCESSABLE
    assert refused(at, PutPrice(resource=GPU, klass="", per_second=-1)).code == Code.INVALID
    assert refused(at, DropPrice(resource=GPU, klass="", effective_from=0)).code == Code.IN_USE
    assert refused(at, DropPrice(resource=GPU, klass="", effective_from=BEGIN)).code == Code.NOT_FOUND
    later = BEGIN + 60 * MICROS
    done(at, PutPrice(resource=GPU, klass="", per_second=2 * NANO, effective_from=later))
    other = PutPrice(resource=GPU, klass="", per_second=3 * NANO, effective_from=later)
    assert refused(at, other).code == Code.ALREADY_EXISTS
    done(at, DropPrice(resource=GPU, klass="", effective_from=later))
    done(at, other)
