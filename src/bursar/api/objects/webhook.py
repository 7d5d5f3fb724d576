"""Handlers of webhooks: create, list, remove. Only the response that creates one contains its secret."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bursar.api.credit import payment
from bursar.api.credit.credit import continue_place, continue_token, limit_of
from bursar.api.http.action import read_action, seen_whole
from bursar.api.http.route import NO_STORE, Answer, Call, Outcome, Param, Route
from bursar.core.values.instant import timestamp
from bursar.core.values.refusal import Refusal, invalid
from bursar.ops.objects import webhook as ops
from bursar.store.objects.webhook import Pending, Webhook
from bursar.wire.reports.cloud_event import TYPE_PREFIX, event_id
from bursar.wire.reports.credit import Moved
from bursar.wire.shared.document import encode

DELIVERIES_MAX = 500
PAGING = (Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
          Param("continue", "The continue token of the previous page."))  # fmt: skip


class NewWebhook(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A new webhook. `direction` is out, for events sent to `url`, or in, for payments signed with the secret. Without
    `types` it gets all events; without `tenant` those of all tenants. `allowLocal` permits loopback and link-local
    addresses."""

    name: str
    url: str = ""
    direction: str = "out"
    tenant: str = ""
    types: list[str] = []
    allow_local: bool = False
    secret: str = ""


class WebhookMeta(msgspec.Struct, rename="camel"):
    name: str
    creation_timestamp: str


class WebhookSpec(msgspec.Struct, rename="camel"):
    direction: str
    url: str
    tenant: str
    types: list[str]
    allow_local: bool
    created_by: str


class WebhookStatus(msgspec.Struct, rename="camel", omit_defaults=True):
    """Counts of queued and abandoned notifications, and the last response of the receiver."""

    state: str
    waiting: int = 0
    given_up: int = 0
    last_said: str = ""
    secret: str = ""


class WebhookView(msgspec.Struct, rename="camel"):
    metadata: WebhookMeta
    spec: WebhookSpec
    status: WebhookStatus
    kind: str = "Webhook"
    api_version: str = "v1"


class WebhookList(msgspec.Struct, rename="camel"):
    items: list[WebhookView]
    kind: str = "WebhookList"
    api_version: str = "v1"


class Trial(msgspec.Struct):
    """A test notification, with the id that the receiver sees."""

    webhook: str
    notice: str


class DeliveryView(msgspec.Struct, rename="camel"):
    """An undelivered event; `nextAt` is null if delivery was abandoned."""

    notice: str
    type: str
    tenant: str
    subject: str
    at: str
    tries: int
    last_said: str
    next_at: str | None


class DeliveryList(msgspec.Struct, rename="camel"):
    items: list[DeliveryView]
    following: str = msgspec.field(name="continue", default="")


def webhook_routes(root: str) -> Iterator[Route]:
    """The routes of webhooks, part of the route table."""
    yield Route(
        "POST", f"{root}/webhooks", create, "Create a webhook for events or for payments.", "create", "webhooks",
        body=NewWebhook, answer=WebhookView, status=201, refusals=(404, 409),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/webhooks", list_webhooks, "List webhooks, without their secrets.", "list", "webhooks",
        answer=WebhookList,
    )  # fmt: skip
    yield Route(
        "DELETE", f"{root}/webhooks/{{name}}", remove, "Remove a webhook.", "delete", "webhooks", answer=WebhookView
    )
    yield Route(
        "POST", f"{root}/webhooks/{{name}}/test", send_trial, "Send a test notice.", "create",
        "webhooks", "test", answer=Trial, status=202, refusals=(404, 409, 422),
    )  # fmt: skip
    yield Route(
        "GET", f"{root}/webhooks/{{name}}/deliveries", list_deliveries, "List the undelivered notices of a webhook.",
        "list", "webhooks", "deliveries", params=PAGING, answer=DeliveryList, refusals=(404,),
    )  # fmt: skip
    yield Route(
        "POST", f"{root}/payments", payment.take, "Top up an account, signed with the secret of a payment webhook.",
        body=payment.Payment, answer=Moved, status=201, public=True, refusals=(401, 403, 404, 422),
    )  # fmt: skip


def shown(one: Webhook, secret: str = "") -> WebhookView:
    made = timestamp(one.created_at) if one.created_at else ""
    return WebhookView(
        WebhookMeta(one.name, made),
        WebhookSpec(one.direction, one.url, one.tenant, list(one.types), one.allow_local, one.created_by),
        WebhookStatus(
            f"Stopped: {one.stopped}" if one.stopped else "Active", one.waiting, one.given_up, one.last_said, secret
        ),
    )


async def create(call: Call) -> Outcome:
    asked = read_action(call, NewWebhook, "webhook")
    if isinstance(asked, Refusal):
        return asked
    # A request id is accepted but not needed, because a name is taken once. A repeated request cannot get the response
    # again: the secret is not stored.
    wanted, _, dry = asked
    if dry:
        return invalid("dryRun is not supported here")
    webhook = Webhook(
        wanted.name, wanted.direction, wanted.tenant, wanted.url, tuple(wanted.types), wanted.allow_local,
        call.identity.actor,
    )  # fmt: skip
    made = await ops.add_webhook(call.context.runtime, webhook, wanted.secret)
    return made if isinstance(made, Refusal) else Answer(201, encode(shown(*made)), headers=NO_STORE)


async def list_webhooks(call: Call) -> Outcome:
    if refusal := seen_whole(call, "the list of webhooks"):
        return refusal
    found = await ops.list_webhooks(call.context.runtime)
    return Answer(200, encode(WebhookList([shown(one) for one in found])))


async def remove(call: Call) -> Outcome:
    name = call.parameters["name"]
    found = {one.name: one for one in await ops.list_webhooks(call.context.runtime)}
    refusal = await ops.remove_webhook(call.context.runtime, name, call.identity.actor)
    return refusal if refusal is not None else Answer(200, encode(shown(found.get(name, Webhook(name)))))


async def send_trial(call: Call) -> Outcome:
    name = call.parameters["name"]
    made = await ops.try_webhook(call.context.runtime, name, call.identity.actor)
    return made if isinstance(made, Refusal) else Answer(202, encode(Trial(name, event_id(*made))))


async def list_deliveries(call: Call) -> Outcome:
    if refusal := seen_whole(call, "the list of webhooks"):
        return refusal
    limit, place = limit_of(call, DELIVERIES_MAX), continue_place(call, tuple[int])
    if isinstance(limit, Refusal):
        return limit
    if isinstance(place, Refusal):
        return place
    after = place[0] if place else 0
    found = await ops.list_pending(call.context.runtime, call.parameters["name"], after, limit + 1)
    if isinstance(found, Refusal):
        return found
    following = continue_token(found[limit - 1].id) if len(found) > limit else ""
    return Answer(200, encode(DeliveryList([_pending(one) for one in found[:limit]], following)))


def _pending(one: Pending) -> DeliveryView:
    again = timestamp(one.next_at) if one.next_at is not None else None
    return DeliveryView(
        event_id(one.id, one.at), TYPE_PREFIX + one.type, one.tenant, one.subject, timestamp(one.at), one.tries,
        one.last_said, again,
    )  # fmt: skip
