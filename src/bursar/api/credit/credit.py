"""Shared parts of the credit handlers: bodies with exact amounts, the account of a request, and its visibility."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import msgspec

from bursar.api.http.action import faulty
from bursar.api.http.body import REQUEST_ID_CHARS_MAX, dry_run, read_beside, read_document
from bursar.api.http.route import JSON, Call, Param
from bursar.core.credit.account import Account, Owner, account_name, no_account, spends_anothers
from bursar.core.credit.lease import Lease, lease_number
from bursar.core.quota.tenant_tree import is_current, lineage
from bursar.core.values.access import Role, reach
from bursar.core.values.idempotency import IdempotencyKey
from bursar.core.values.refusal import Cause, Code, Refusal, field_fault, invalid
from bursar.ops.credit.ledger import ledger_key
from bursar.store.credit import ledger as store
from bursar.wire.reports.credit import Order
from bursar.wire.shared.document import encode
from bursar.wire.shared.faults import all_faults
from bursar.wire.shared.instant import InstantError, micros_of

P = TypeVar("P", bound=tuple[Any, ...])
T = TypeVar("T", bound=Order)

ACCOUNT = Param(
    "account",
    "A tenant, tenant/user, or TENANT@UID of a deleted tenant; default: the account that pays for the caller.",
)
WORDS_CHARS_MAX: Final = 1024
_NUMBER_CHARS_MAX: Final = 40
_EXPONENT_MAX: Final = 40
FILED_CHARS_MAX: Final = 320  # of NAME@UID
PLACE_MAX: Final = 2**63 - 1


# Bodies.


async def read_order(
    call: Call, wanted: type[T], what: str, check: Callable[[T], list[Cause]], *, required: bool = True
) -> T | Refusal:
    """A checked body with its request id, which is `required` where money moves."""
    if refusal := _no_dry_run(call):
        return refusal
    document = await read_beside(call, _read)
    if isinstance(document, Refusal):
        return document
    try:
        order = msgspec.convert(document, wanted)
    except msgspec.ValidationError as error:
        faults = all_faults(wanted, document) or [("", str(error))]
        return faulty(what, [field_fault(path, message) for path, message in faults])
    order.request_id = order.request_id or call.headers.get("idempotency-key", "")
    if causes := [*_request_faults(order.request_id, required=required), *check(order)]:
        return faulty(what, causes)
    return order


def bare_order(call: Call) -> Order | Refusal:
    """A request without a body; it may have a request id."""
    if refusal := _no_dry_run(call):
        return refusal
    order = Order(call.headers.get("idempotency-key", ""))
    causes = _request_faults(order.request_id, required=False)
    return faulty("request", causes) if causes else order


def _read(call: Call) -> Any:
    """Decode the body to plain values. A number with a fraction stays the text that it was written as, because a float
    would lose digits."""
    document = read_document(call)
    if isinstance(document, Refusal) or not isinstance(document, dict):
        return document if isinstance(document, Refusal) else invalid("the body must be an object")
    if call.media_type == JSON or call.media_type.endswith("+json"):
        document = _decoder.decode(call.body)
    return {name: _plain(value) for name, value in document.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return format(value, "f") if isinstance(value, Decimal) else value


def _exact(text: str) -> Decimal | float:
    """Parse a number as it was written; one too long or too large for an amount stays an invalid number."""
    try:
        if len(text) <= _NUMBER_CHARS_MAX and abs((value := Decimal(text)).adjusted()) <= _EXPONENT_MAX:
            return value
    except InvalidOperation:
        pass
    return float(text)


_decoder = msgspec.json.Decoder(float_hook=_exact)
_canonical = msgspec.json.Encoder(order="deterministic").encode


def _no_dry_run(call: Call) -> Refusal | None:
    """Refuse options of other writes that these do not support."""
    dry = dry_run(call)
    if isinstance(dry, Refusal):
        return dry
    return invalid("dryRun is not supported here") if dry else None


def _request_faults(request_id: str, *, required: bool) -> list[Cause]:
    if not request_id:
        missing = "is required, here or as the header Idempotency-Key, so that a repetition moves no credit"
        return [field_fault("request_id", missing)] if required else []
    if request_id.isascii() and request_id.isprintable() and len(request_id) <= REQUEST_ID_CHARS_MAX:
        return []
    return [field_fault("request_id", f"must be at most {REQUEST_ID_CHARS_MAX} printable ASCII characters")]


def words_faults(field: str, text: str, *, required: bool = False) -> list[Cause]:
    if required and not text.strip():
        return [field_fault(field, "is required: the entry stores it")]
    if len(text) <= WORDS_CHARS_MAX and (text.isprintable() or not text):
        return []
    return [field_fault(field, f"must have at most {WORDS_CHARS_MAX} printable characters")]


def ledger_key_for(call: Call, order: Order, tenant_uid: str) -> IdempotencyKey | None:
    """The idempotency key of an order: its id, path, caller and content. The form of the body makes no difference:
    order of fields, white space, or fields set to their defaults. Ids are unique in the tenant that owns the account,
    and are kept for ever."""
    if not order.request_id:
        return None
    path = "/".join((call.route.path, *call.parameters.values()))
    query = urlencode(sorted(call.query.items()))
    parts = (call.route.method, path, query, call.identity.tenant, call.identity.actor)
    what = hashlib.sha256(b"\0".join((*(part.encode() for part in parts), _canonical(order)))).hexdigest()
    return ledger_key(tenant_uid, f"{call.route.verb} {call.route.resource}", order.request_id, what)


# Queries.


def instant_of(call: Call, name: str) -> int | Refusal | None:
    """Parse a time in the query to microseconds; None if it is absent."""
    text = call.query.get(name, "")
    try:
        return micros_of(text) if text else None
    except InstantError as error:
        return invalid(f"{name} {error}", field_fault(name, str(error)))


def limit_of(call: Call, most: int) -> int | Refusal:
    """The page size of the query."""
    text = call.query.get("limit", "")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):
        return invalid("limit must be a number from 1 on")
    return min(int(text or "0") or most, most)


def continue_token(*place: int | str) -> str:
    return base64.urlsafe_b64encode(encode(place)).decode()


def continue_place(call: Call, form: type[P]) -> P | Refusal | None:
    """Parse the continue token; None for the first page."""
    text = call.query.get("continue", "")
    if not text:
        return None
    place: P | None
    try:
        place = msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=form)
    except (ValueError, msgspec.MsgspecError):
        place = None
    if place is None or not all(_is_place(one) for one in place):
        return not_ours()
    return place


def not_ours() -> Refusal:
    return invalid("the continue token is invalid", hint="Start the list again without it.")


def _is_place(one: int | str) -> bool:
    """Whether the database can represent the value: a caller may send any text as a token."""
    return "\0" not in one if isinstance(one, str) else 0 <= one <= PLACE_MAX


# Accounts of callers.


async def find_account(call: Call, in_body: str = "") -> Account | Refusal:
    """Find the named account, else the one that pays for the caller. An invisible account is answered as not found."""
    owner = named_owner(call, in_body)
    if isinstance(owner, Refusal):
        return owner
    if owner is None:
        return await own_account(call)
    if not await sees(call, *owner):
        return no_account(Owner(*owner))
    async with call.context.database.reader() as db:
        found = (await store.find_accounts(db, [owner])).get(owner)
        account = (await store.load_accounts(db, [found])).get(found) if found is not None else None
    return account or no_account(Owner(*owner))


def named_owner(call: Call, in_body: str = "") -> tuple[str, str] | Refusal | None:
    """Parse (tenant, user) of the account that the query, the path or the body names."""
    in_path = account_name(call.parameters.get("tenant", ""), call.parameters.get("user", ""))
    given = {one for one in (call.query.get("account", ""), in_body, in_path) if one}
    if not given:
        return None
    if len(given) > 1:
        return invalid(f"two accounts are named: {' and '.join(sorted(given))}", hint="Name one.")
    tenant, _, user = given.pop().partition("/")
    if not tenant or len(tenant) > FILED_CHARS_MAX or len(user) > 253 or not (tenant + user).isprintable():
        return invalid(
            "account must be a tenant, or tenant/user", field_fault("account", "must be tenant or tenant/user")
        )
    return tenant, user


async def own_account(call: Call) -> Account | Refusal:
    """The caller's own account, else that of the tenant."""
    identity = call.identity
    if not identity.tenant:
        return invalid(
            f"role {identity.role} has no account of its own: name one",
            field_fault("account", "is required"),
            hint="Name TENANT or TENANT/USER; in the API as ?account=.",
        )
    owners = [(identity.tenant, identity.user), (identity.tenant, "")]
    async with call.context.database.reader() as db:
        ids = await store.find_accounts(db, owners)
        found = next((ids[owner] for owner in owners if owner in ids), None)
        account = (await store.load_accounts(db, [found])).get(found) if found is not None else None
    if account is None or identity.tenant_uid not in ("", account.tenant_uid):
        return no_account(Owner(identity.tenant))
    return account


async def sees(call: Call, tenant: str, user: str) -> bool:
    whose = reach(call.identity)
    if whose.everything:
        return True
    tree = await call.context.tree_for(whose)
    return is_current(tree, whose) and whose.sees_account(lineage(tree, tenant), user, call.identity.user)


# Leases of callers.


async def find_lease(call: Call, *, spending: bool = False) -> tuple[Lease, Account] | Refusal:
    """Find a lease that the caller may see, open or ended, with its account. If `spending`, a user must be paid for by
    that account, or have opened the lease."""
    name = call.parameters["name"]
    missing = Refusal(Code.NOT_FOUND, f'leases "{name}" not found')
    number = lease_number(name)
    if number is None:
        return missing
    async with call.context.database.reader() as db:
        open_ones = await store.load_leases(db, [number])
        lease = open_ones.get(number) or (await store.load_ended(db, [number])).get(number)
        if lease is None:
            return missing
        # No account has an administrator's name.
        owner = (call.identity.tenant, call.identity.user) if call.identity.role is Role.USER else ("", "")
        account, own, opened_by = await store.load_payers(db, lease, owner)
    if account is None:
        return missing
    if call.identity.role is Role.NODE:
        return (lease, account) if lease.node and lease.node == call.identity.node else missing
    if not await sees(call, account.tenant, account.user):
        return missing
    if spending and opened_by != call.identity.actor and (refusal := spends_anothers(account, own)):
        return refusal
    return lease, account
