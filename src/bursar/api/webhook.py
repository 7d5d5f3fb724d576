"""Handlers of webhooks: made, listed, removed. The secret is in the answer that made it, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from bursar.api import payment
from bursar.api.action import read_action
from bursar.api.route import Answer, Call, Outcome, Route
from bursar.core.refusal import Code, Refusal, invalid
from bursar.ops import notice as ops
from bursar.ops.office import timestamp
from bursar.store.notice import Webhook
from bursar.wire.credit import Moved
from bursar.wire.document import encode


class NewWebhook(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """`direction` is out, for notices that are sent to `url`, or in, for payments that are signed with the secret. No
    `types` are all of them; no `tenant` is everybody. `allowLocal`: it may be on this machine, or link-local."""

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
    """How many notices wait to be sent, how many were given up, and what the receiver said last."""

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


def webhook_routes(root: str) -> Iterator[Route]:
    """Part of the one table in routes.py."""
    yield Route(
        "POST", f"{root}/webhooks", create, "Have notices sent, or payments believed.", "create", "webhooks",
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
        "POST", f"{root}/payments", payment.take, "Top up an account, signed by one whose payments are believed.",
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
    wanted, claim, dry = asked
    if dry or claim is not None:
        # A secret is remembered nowhere, so that no answer could be given again; its name is taken once.
        return invalid("dryRun and request_id are not offered here: a webhook's name is taken once")
    if wanted.tenant and wanted.tenant not in (await call.house.tree(fresh=True)).tenants:
        return Refusal(Code.NOT_FOUND, f'tenants "{wanted.tenant[:63]}" not found')
    webhook = Webhook(
        wanted.name, wanted.direction, wanted.tenant, wanted.url, tuple(wanted.types), wanted.allow_local,
        call.identity.actor,
    )  # fmt: skip
    made = await ops.add_webhook(call.house.office, webhook, wanted.secret)
    return made if isinstance(made, Refusal) else Answer(201, encode(shown(*made)))


async def list_webhooks(call: Call) -> Outcome:
    found = await ops.list_webhooks(call.house.office)
    return Answer(200, encode(WebhookList([shown(one) for one in found])))


async def remove(call: Call) -> Outcome:
    name = call.parameters["name"]
    found = {one.name: one for one in await ops.list_webhooks(call.house.office)}
    refusal = await ops.remove_webhook(call.house.office, name, call.identity.actor)
    return refusal if refusal is not None else Answer(200, encode(shown(found.get(name, Webhook(name)))))
