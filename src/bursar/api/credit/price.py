"""Handlers of prices: versions per resource and class, each from a time on."""

from __future__ import annotations

from bursar.api.credit.credit import bare_order, instant_of, ledger_key_for, read_order
from bursar.api.http.route import Answer, Call, Outcome
from bursar.commands.credit.credit import DropPrice, PutPrice
from bursar.core.credit.price import Price
from bursar.core.values.money import nanocredits
from bursar.core.values.names import qualified_name
from bursar.core.values.quantity import is_device
from bursar.core.values.refusal import Cause, Refusal, field_fault, invalid
from bursar.ops.credit import credit as ops
from bursar.store.credit import ledger as ledger_store
from bursar.store.credit import price as store
from bursar.wire.reports.credit import (
    NewPrice,
    PriceList,
    credit_faults,
    name_faults,
    one_name_each,
    price_faults,
    price_view,
)
from bursar.wire.shared.document import encode
from bursar.wire.shared.instant import instant_faults, micros_of

CLASS_CHARS_MAX = 63


async def list_prices(call: Call) -> Outcome:
    """List the prices in force now or at a time; with `history`, all past and future versions."""
    at = instant_of(call, "at")
    if isinstance(at, Refusal):
        return at
    async with call.context.database.reader() as db:
        known = [row.price for row in await store.list_prices(db)]
        now = await ledger_store.load_now(db)
    wanted = call.query.get("resource", "")
    known = [one for one in known if not wanted or one.resource == wanted]
    shown = known if call.query.get("history", "") in ("true", "1") else _in_force(known, now if at is None else at)
    return Answer(200, encode(PriceList([price_view(one) for one in shown])))


def _in_force(known: list[Price], at: int) -> list[Price]:
    """The latest version of each resource and class that has begun, in the order of their beginnings."""
    latest = {(one.resource, one.klass): one for one in known if one.effective_from <= at}
    return list(latest.values())


async def set_price(call: Call) -> Outcome:
    """Set a price from now or a later time on. A price that has begun cannot be changed."""
    order = await read_order(call, NewPrice, "price", _faults, required=False)
    if isinstance(order, Refusal):
        return order
    order = one_name_each(order)
    command = PutPrice(
        idempotency_key=ledger_key_for(call, order, ""),
        actor=call.identity.actor,
        resource=order.resource,
        klass=order.klass,
        per_second=nanocredits(order.per_second),
        effective_from=micros_of(order.effective_from) if order.effective_from else None,
    )
    receipt = await ops.put_price(call.context.runtime, command)
    if isinstance(receipt, Refusal):
        return receipt
    assert receipt.price is not None
    return Answer(201, encode(price_view(receipt.price)))


async def drop_price(call: Call) -> Outcome:
    """Delete a price that has not begun."""
    order, begin = bare_order(call), instant_of(call, "effective_from")
    if isinstance(order, Refusal):
        return order
    if isinstance(begin, Refusal):
        return begin
    missing = [name for name in ("resource", "effective_from") if not call.query.get(name, "")]
    if missing or begin is None:
        faults = [field_fault(name, "is required to identify the price") for name in missing]
        return invalid(f"{' and '.join(missing)} must be given", *faults)
    command = DropPrice(
        idempotency_key=ledger_key_for(call, order, ""),
        actor=call.identity.actor,
        resource=call.query["resource"],
        klass=call.query.get("class", ""),
        effective_from=begin,
    )
    receipt = await ops.drop_price(call.context.runtime, command)
    if isinstance(receipt, Refusal):
        return receipt
    assert receipt.price is not None
    return Answer(200, encode(price_view(receipt.price)))


def _faults(given: NewPrice) -> list[Cause]:
    if missing := price_faults(given):
        return missing
    order = one_name_each(given)
    faults = [field_fault("resource", fault) for fault in qualified_name(order.resource)]
    if order.klass:
        faults += name_faults("class", order.klass, CLASS_CHARS_MAX)
        if not faults and not is_device(order.resource):
            faults.append(field_fault("class", f"{order.resource} has no classes: only devices do, as nvidia.com/gpu"))
    if order.effective_from:
        faults += instant_faults("effective_from", order.effective_from)
    field = "per_second" if given.price_per_sec is None else "price_per_sec"
    return [*faults, *credit_faults(field, order.per_second)]
