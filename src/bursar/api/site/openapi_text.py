"""Texts of the API's documentation that belong to no single kind: descriptions of common fields, and of refusals."""

from __future__ import annotations

from typing import Any, Final

Document = dict[str, Any]

FIELD_WORDS: Final = {
    "apiVersion": "Version of the API: v1.",
    "kind": "The kind of the object.",
    "metadata": "Name, labels, annotations, and fields that the server maintains.",
    "spec": "The desired state.",
    "status": "The observed state; written by the server.",
    "conditions": "Current conditions, with the time of their last transition.",
    "phase": "The lifecycle phase, in one word.",
    "labels": "Key-value pairs that selectors match.",
    "annotations": "Key-value pairs that selectors ignore.",
    "resourceVersion": "The revision of its last change. Send it back to prevent overwriting a concurrent change.",
    "uid": "Unique for all time, even if the name is reused.",
    "limits": "Limits of usage, by dimension.",
    "description": "A description for human readers.",
    "enforcement": "The effect of a request that exceeds a limit.",
    "nodeSelector": "Labels that a node must have.",
    "gangScheduling": "The gang: allocations that start together or not at all.",
    "Condition.status": "True, False or Unknown.",
    "ObjectMeta.name": "Unique among the objects of its kind in its namespace.",
    "ObjectMeta.generateName": "The server appends a suffix to it that makes it unique.",
    "ObjectMeta.namespace": "The namespace that contains the object.",
    "ObjectMeta.generation": "Number of changes of the spec.",
    "ObjectMeta.creationTimestamp": "The time of its creation.",
    "ObjectMeta.deletionTimestamp": "The time at which its deletion was requested.",
    "ObjectMeta.finalizers": "The object is removed only when this list is empty.",
    "GangScheduling.groupId": "Name of the gang, shared by its members.",
    "GangScheduling.minMembers": "The number of members that must be placed before any may start.",
    "GangScheduling.timeout": "The time within which all members must be placed.",
}


REFUSAL_WORDS: Final = {
    400: "Malformed: every fault is listed, unknown fields by name.",
    401: "The token is missing, expired or revoked.",
    403: "The role does not permit this, a quota would be exceeded, or an account cannot pay.",
    404: "There is no such object, or it belongs to another tenant.",
    405: "The path exists, but not with this method.",
    406: "None of the accepted media types can be served.",
    409: "It exists already, has ended, or changed since it was read: read it again and retry.",
    410: "The revision is no longer kept: list again.",
    413: "The body is too large.",
    415: "The media type of the body is not supported.",
    422: "Well-formed, but it can never be satisfied.",
    429: "The rate limit, or an account's spend rate, is exceeded: retry after the seconds in Retry-After.",
    500: "Internal error; the message contains the request id.",
    503: "Overloaded, or the database is unavailable: retry after the seconds in Retry-After.",
}

_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_RATE_HEADERS: Final = {
    "X-RateLimit-Limit": {"description": "Requests per minute.", "schema": {"type": "integer"}},
    "X-RateLimit-Remaining": {"description": "Requests left in the current window.", "schema": {"type": "integer"}},
    "X-RateLimit-Reset": {
        "description": "Epoch seconds at which the full limit is available again.",
        "schema": {"type": "integer"},
    },
}
REFUSAL_HEADERS: Final = {429: {**_RETRY_AFTER, **_RATE_HEADERS}, 503: _RETRY_AFTER}
