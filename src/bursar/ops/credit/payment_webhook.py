"""Payments that others tell us of: believed when they are signed with the secret of one that we know."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from bursar.core.credit.account import Owner, no_account
from bursar.core.objects.webhook import signature_fault, verify
from bursar.core.values.access import unauthenticated
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.credit.ledger import Receipt, ledger_claim
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Database
from bursar.store.objects import webhook as store
from bursar.store.objects.webhook import WebhookPayer

# Whoever sends nonsense has the database asked no more often than that.
KNOWN_SECONDS = 1.0
HINT = "Sign it with the secret of a webhook of direction in, as Standard Webhooks describes."

_known: WeakKeyDictionary[Database, tuple[float, Sequence[WebhookPayer]]] = WeakKeyDictionary()


async def find_payer(
    runtime: Runtime, id_: str, timestamp: str, signatures: str, body: bytes
) -> WebhookPayer | Refusal:
    """Whose signature it is."""
    now = time.time()
    if fault := signature_fault(id_, timestamp, signatures, now):
        return unauthenticated(fault, HINT)
    for payer in await _payers(runtime):
        if verify(payer.secret, id_, timestamp, body, signatures, now):
            return payer
    return unauthenticated("the signature is nobody's", HINT)


async def _payers(runtime: Runtime) -> Sequence[WebhookPayer]:
    read_at, payers = _known.get(runtime.database, (-KNOWN_SECONDS, ()))
    if time.monotonic() - read_at >= KNOWN_SECONDS:
        async with runtime.database.reader() as db:
            payers = await store.load_payers(db)
        _known[runtime.database] = (time.monotonic(), payers)
    return payers


async def pay(
    runtime: Runtime, payer: WebhookPayer, id_: str, owner: Owner, amount: int, reason: str = ""
) -> Receipt | Refusal:
    """Top an account up, once for each event of a payer, for ever. What its account is not there for is not remembered:
    the payer sends it again, and the account may have been opened by then."""
    if payer.tenant not in ("", owner.tenant):
        return no_account(owner)
    async with runtime.database.reader() as db:
        there = owner in await ledger_store.find_accounts(db, [owner])
    if owner.user and not there:
        return no_account(owner)
    # What is paid, however it was written.
    what = "\0".join((owner.tenant, owner.user, str(amount), reason))
    # Ids are the payer's own: an event is paid once, whoever is called so by now.
    claim = ledger_claim("", f"payment {payer.name}", id_, hashlib.sha256(what.encode()).hexdigest())
    return await credit.top_up(runtime, owner, amount, actor=f"payment:{payer.name}", claim=claim, reason=reason)
