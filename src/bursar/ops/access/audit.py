"""Audit log lines about tokens and webhooks, which are no objects: who created, changed or removed one, and when.

A line names the purpose of the token or webhook and holds no secret: no token text, no webhook secret, and no URL path,
which many receivers use as a secret.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from bursar.store.access.token import TokenRecord
from bursar.store.objects.change import AuditNote
from bursar.store.objects.webhook import Webhook
from bursar.wire.shared.document import encode
from bursar.wire.shared.meta import API_VERSION

TOKEN, WEBHOOK = "Token", "Webhook"
# The resource that a user must be allowed to list to see lines of a kind.
RESOURCES = {TOKEN: "tokens", WEBHOOK: "webhooks"}


def token_note(record: TokenRecord, type_: str, verb: str, actor: str, reason: str = "") -> AuditNote:
    spec = {"role": record.role, "tenant": record.tenant, "user": record.user, "node": record.node}
    return AuditNote(TOKEN, record.id, record.tenant, type_, _doc(TOKEN, record.id, spec), actor, verb, reason)


def webhook_note(webhook: Webhook, type_: str, verb: str, actor: str, reason: str = "") -> AuditNote:
    """An audit line about a webhook. It belongs to no tenant, because only administrators manage webhooks."""
    host = urlsplit(webhook.url).hostname or ""
    spec = {"direction": webhook.direction, "tenant": webhook.tenant, "types": webhook.types, "host": host}
    return AuditNote(WEBHOOK, webhook.name, "", type_, _doc(WEBHOOK, webhook.name, spec), actor, verb, reason)


def _doc(kind: str, name: str, spec: dict[str, Any]) -> bytes:
    said = {key: value for key, value in spec.items() if value}
    return encode({"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": said})
