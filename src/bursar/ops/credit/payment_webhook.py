"""Payment webhooks: payments reported by external systems, accepted if signed with a known webhook's secret."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from bursar.commands.credit.ledger import Receipt
from bursar.core.credit.account import Owner, no_account
from bursar.core.objects.webhook import signature_fault, verify
from bursar.core.values.access import unauthenticated
from bursar.core.values.refusal import Refusal
from bursar.ops.credit import credit
from bursar.ops.credit.ledger import ledger_key
from bursar.ops.runtime.runtime import Runtime
from bursar.store.credit import ledger as ledger_store
from bursar.store.db.database import Database
from bursar.store.objects import webhook as store
from bursar.store.objects.webhook import WebhookPayer

# How long the known webhooks are cached, so that invalid requests do not load the database.
KNOWN_SECONDS = 1.0
HINT = "Sign it with the secret of a webhook of direction in, as Standard Webhooks describes."

_known: WeakKeyDictionary[Database, tuple[float, Sequence[WebhookPayer]]] = WeakKeyDictionary()


async def find_payer(
    runtime: Runtime, id_: str, timestamp: str, signatures: str, body: bytes
) -> WebhookPayer | Refusal:
    """The webhook whose secret made the signature."""
    now = time.time()
    if fault := signature_fault(id_, timestamp, signatures, now):
        return unauthenticated(fault, HINT)
    for payer in await _payers(runtime):
        if verify(payer.secret, id_, timestamp, body, signatures, now):
            return payer
    return unauthenticated("the signature matches no webhook's secret", HINT)


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
    """Add credit to an account, exactly once for each event of a payer. A payment to a missing account is not
    remembered: the payer retries it, and the account may be open by then."""
    if payer.tenant not in ("", owner.tenant):
        return no_account(owner)
    async with runtime.database.reader() as db:
        there = owner in await ledger_store.find_accounts(db, [owner])
    if owner.user and not there:
        return no_account(owner)
    # The fingerprint covers the payment, not the form of the request.
    what = "\0".join((owner.tenant, owner.user, str(amount), reason))
    # Event ids are the payer's own, so the key names the payer and no tenant.
    idempotency_key = ledger_key("", f"payment {payer.name}", id_, hashlib.sha256(what.encode()).hexdigest())
    return await credit.top_up(
        runtime, owner, amount, actor=f"payment:{payer.name}", idempotency_key=idempotency_key, reason=reason
    )
