"""Handlers of the caller's identity and permissions: whoami, and the self-reviews of Kubernetes."""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.api.http.body import read_document
from bursar.api.http.route import Answer, Call, Outcome
from bursar.core.values.refusal import Refusal, invalid
from bursar.wire.shared.document import encode


class WhoAmI(msgspec.Struct, omit_defaults=True):
    user: str
    role: str
    tenant: str = ""
    node: str = ""
    tenants: list[str] = []  # of an approver
    gates: list[str] = []


async def whoami(call: Call) -> Outcome:
    one = call.identity
    return Answer(
        200,
        encode(WhoAmI(one.user, one.role, one.tenant, one.node, [name for name, _ in one.tenants], list(one.gates))),
    )


async def access_review(call: Call) -> Outcome:
    """`kubectl auth can-i`."""
    document = read_document(call)
    if isinstance(document, Refusal):
        return document
    asked: Any = document.get("spec", {}) if isinstance(document, dict) else None
    if not isinstance(asked, dict):
        return invalid("the review must have a spec")
    attributes = asked.get("resourceAttributes") or {}
    if not isinstance(attributes, dict):
        return invalid("resourceAttributes must be an object")
    words = [str(attributes.get(name, "")) for name in ("verb", "resource", "subresource")]
    allowed = call.context.policy.allows(call.identity, *words) if attributes else True
    status: dict[str, Any] = {"allowed": allowed}
    if not allowed:
        status["reason"] = f"role {call.identity.role} may not"
    return Answer(201, encode({**_headed("SelfSubjectAccessReview"), "spec": asked, "status": status}))


async def rules_review(call: Call) -> Outcome:
    """`kubectl auth can-i --list`."""
    listed = [
        {"verbs": list(rule.verbs), "apiGroups": [""], "resources": list(rule.resources)}
        for rule in call.context.policy.rules(call.identity)
    ]
    status = {"resourceRules": listed, "nonResourceRules": [], "incomplete": False}
    return Answer(201, encode({**_headed("SelfSubjectRulesReview"), "spec": {}, "status": status}))


async def subject_review(call: Call) -> Outcome:
    """`kubectl auth whoami`."""
    one = call.identity
    groups = [f"role:{one.role}", *([f"tenant:{one.tenant}"] if one.tenant else [])]
    user = {"username": one.user, "groups": groups}
    head = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1", "metadata": {}}
    return Answer(201, encode({**head, "status": {"userInfo": user}}))


def _headed(kind: str) -> dict[str, Any]:
    return {"kind": kind, "apiVersion": "authorization.k8s.io/v1", "metadata": {}}
