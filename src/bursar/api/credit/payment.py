"""Handler of the payment webhook: a signed payment event tops up an account."""

from __future__ import annotations

from bursar.api.credit.credit import named_owner, read_order, words_faults
from bursar.api.http.route import Answer, Call, Outcome
from bursar.core.credit.account import Owner
from bursar.core.values.money import credits_of, nanocredits
from bursar.core.values.refusal import Cause, Refusal, field_fault
from bursar.ops.credit import payment_webhook as ops
from bursar.wire.reports.credit import Credits, Moved, Order, credit_faults
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import time_text


class Payment(Order, kw_only=True):
    """A payment for an account: a tenant, or tenant/user."""

    account: str
    amount: Credits
    reason: str = ""


async def take(call: Call) -> Outcome:
    """Authenticate by the signature instead of a token; the event's id is the idempotency key."""
    id_ = call.headers.get("webhook-id", "")
    payer = await ops.find_payer(
        call.context.runtime,
        id_,
        call.headers.get("webhook-timestamp", ""),
        call.headers.get("webhook-signature", ""),
        call.body,
    )
    if isinstance(payer, Refusal):
        return payer
    order = await read_order(call, Payment, "payment", _faults, required=False)
    if isinstance(order, Refusal):
        return order
    owner = named_owner(call, order.account)
    if isinstance(owner, Refusal):
        return owner
    assert owner is not None, "the account was found to be named"
    amount = nanocredits(order.amount)
    done = await ops.pay(call.context.runtime, payer, id_, Owner(*owner), amount, order.reason)
    if isinstance(done, Refusal):
        return done
    account = done.account
    assert account is not None
    moved = Moved(
        account.name,
        credits_of(amount),
        credits_of(account.posted),
        credits_of(account.available),
        time_text(done.at),
    )
    return Answer(201, encode(moved))


def _faults(order: Payment) -> list[Cause]:
    faults = [*credit_faults("amount", order.amount, least=1), *words_faults("reason", order.reason)]
    if not order.account:
        faults.append(field_fault("account", "is required: a tenant, or tenant/user"))
    return faults
