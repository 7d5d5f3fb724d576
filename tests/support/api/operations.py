"""The operations of the OpenAPI document as requests: each is filled in for a target so that it would succeed.

Bodies come from the schemas; by hand comes what schemas do not say. An operation that has a path variable or a query
parameter which this module does not know raises `Unfilled`: add it to the tables below.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.api.families import FAMILY, H100, Target
from support.api.raw_http import request
from support.api.site import MERGE, TABLE, Document

_REF = "#/components/schemas/"
_DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answers` are the names of the schemas of its answers."""

    id: str
    method: str
    path: str
    variables: tuple[str, ...]
    query: tuple[str, ...]
    media: str
    schema: Document | None
    answers: frozenset[str]

    @property
    def body(self) -> str:
        """The name of the body's schema; empty where there is none."""
        return str((self.schema or {}).get("$ref", "")).removeprefix(_REF)

    @property
    def noun(self) -> str:
        """The plural that the path's {name} belongs to: the last word before it, or of the path."""
        return self.path.partition("/{name}")[0].rpartition("/")[2]

    @property
    def is_collection(self) -> bool:
        """Whether it lists or deletes all there are of something."""
        return self.method in ("GET", "DELETE") and "{name}" not in self.path

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def operations(document: Document) -> list[Operation]:
    """All operations of an OpenAPI document."""
    return [
        Operation(
            one["operationId"],
            method.upper(),
            path,
            tuple(each["name"] for each in item.get("parameters", ())),
            tuple(each["name"] for each in one.get("parameters", ())),
            *_body(one),
            frozenset(_names(one["responses"])),
        )
        for path, item in document["paths"].items()
        for method, one in item.items()
        if method != "parameters"
    ]


def _body(operation: Document) -> tuple[str, Document | None]:
    """Merge patches where patches are taken, else the first form that is offered."""
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        return "", None
    media = MERGE if MERGE in content else next(iter(content))
    return media, content[media]["schema"]


def _names(value: Any) -> set[str]:
    """The names of all schemas that a value refers to itself."""
    if isinstance(value, dict):
        own = {value["$ref"].removeprefix(_REF)} if str(value.get("$ref", "")).startswith(_REF) else set()
        return own.union(*(_names(one) for one in value.values()))
    return set().union(*(_names(one) for one in value)) if isinstance(value, list) else set()


class Unfilled(Exception):
    """An operation that cannot be filled in."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A request that is ready but for the token."""

    operation: Operation
    path: str
    query: Mapping[str, str]
    media: str
    body: bytes | None
    accept: str = "application/json"

    def raw(self, token: str | None) -> bytes:
        return request(self.operation.method, self.where, self.headers(token), self.body)

    def headers(self, token: str | None) -> list[tuple[str, str]]:
        sent = [("X-Request-Id", "same"), ("Accept", self.accept)]
        sent += [("Authorization", f"Bearer {token}")] if token is not None else []
        return sent + ([("Content-Type", self.media)] if self.media else [])

    @property
    def where(self) -> str:
        return self.path + (f"?{urlencode(self.query, safe='/')}" if self.query else "")

    @property
    def asked(self) -> bytes:
        """All that the caller said itself."""
        return self.where.encode() + (self.body or b"")

    def names(self, target: Target) -> list[str]:
        """The names of the target's parts that it says."""
        return [name for part, name in target.names.items() if part not in UNOWNED and name.encode() in self.asked]


# The part of a target that a path's {name} is the name of, by the word before it.
NOUNS = {
    "allocations": "allocation", "groups": "group", "identities": "identity", "jobs": "job",
    "limitranges": "limitrange", "projects": "namespace", "rolebindings": "binding", "useridentitymappings": "identity",
    "users": "registered", "leases": "lease", "members": "member", "namespaces": "namespace",
    "nodes": "node", "pods": "allocation", "priorityclasses": "priorityclass", "queues": "queue",
    "quotarequests": "quotarequest",
    "resourceclaims": "resourceclaim", "resourcequotas": "resourcequota",
    "tenants": "tenant", "tiers": "tier", "tokens": "token", "webhooks": "webhook",
}  # fmt: skip
# Bodies whose label says which tenant they belong to.
OWNED = ("Group", "Namespace", "Project", "ProjectRequest", "ProviderIdentity", "RegisteredUser")
UNOWNED = ("family", "binding")  # parts whose names are not of one tenant alone
# Other variables of paths.
VARIABLES = {"namespace": "namespace", "tenant": "tenant", "user": "colleague"}
# Operations on another part than their noun's.
OTHERS = {
    "claimNode": "claimed", "releaseNode": "claimed", "wipeNodeAtApiV1NodesNameWipe": "claimed",
    "wipeNodeAtApiV1NodesNameWiped": "claimed", "explainAllocation": "pending",
}  # fmt: skip
_NO_KINDS = ("leases", "pods", "rolebindings", "tokens", "useridentitymappings", "webhooks")
# Field selectors that ask a list for one part.
LISTED = {
    "events": [("involvedObject.name", "allocation"), ("involvedObject.name", "claimed")],
    "pods": [("spec.nodeName", "node")],
    **{plural: [("metadata.name", part)] for plural, part in NOUNS.items() if plural not in _NO_KINDS},
}
# Query parameters by which a target is named; None: it is named by others.
QUERY: dict[str, Callable[[Target], str] | None] = {
    "account": lambda target: target.tenant,
    "job_id": lambda target: target.names["leased"],
    "node": lambda target: target.names["node"],
    "tenant": lambda target: target.tenant,
    "user": lambda target: f"{target.tenant}/{target.names['user']}",
    **dict.fromkeys(
        ("after", "allowWatchBookmarks", "anchor", "at", "by", "class", "continue", "days", "dryRun", "effective_from",
         "epoch", "fieldManager", "fieldSelector", "fieldValidation", "follow", "force", "format", "from",
         "gate", "gracePeriodSeconds", "history", "includeObject", "labelSelector", "limit", "limitBytes", "offset",
         "period", "pretty", "propagationPolicy", "resource", "resourceVersion", "resourceVersionMatch",
         "sendInitialEvents", "state", "tailLines", "timeoutSeconds", "to", "users", "watch")
    ),
}  # fmt: skip
# Operations that are given only these of the parameters: the others say the same, or go with the body's.
EITHER: dict[str, tuple[str, ...]] = {
    "createLeases": (), "getStatements": ("account", "tenant"), "getAllocationLog": ("node",),
}  # fmt: skip

WORK = {"resources": {"requests": {"cpu": "1"}}}
SPECS: dict[str, Document] = {
    "Allocation": {"spec": WORK},
    "Job": {"spec": {"completions": 1, "template": {"spec": WORK}}},
    "LimitRange": {"spec": {"limits": []}},
    "Node": {"spec": {"capacity": {"cpu": "8"}}},
    "PriorityClass": {"value": 5},
    "QuotaRequest": {"spec": {"limits": {"seats": 99}}},
    "ResourceQuota": {"spec": {"hard": {"cpu": "50"}}},
    "ResourceClaim": {"spec": {"resources": {"clusters": 1}}},
    "Settings": {"metadata": {"name": "system"}},
}
# Properties that a schema allows and that must not be given together with others.
WITHOUT = {"NewPrice": ("gpu_type",), "NewRefund": ("lease_id",), "NewAdjustment": ("lease_id",)}
PATCHES: dict[str, Document] = {
    "patchAllocationStatus": {"status": {"phase": "Running"}},
    "patchAllocationApproval": {"reason": "seen"},
    "patchQuotaRequestApproval": {"reason": "seen"},
    "patchResourceClaimStatus": {"status": {"state": "Ready"}},
    "patchNodeStatus": {"status": {"allocatable": {"cpu": "4"}}},
}


class Filler:
    """Fills operations in; each body that creates something names something new."""

    def __init__(self, document: Document) -> None:
        self._schemas: Mapping[str, Document] = document["components"]["schemas"]
        self._numbers = itertools.count(1)
        self._certificate_request = _certificate_request()

    def fill(self, operation: Operation, target: Target) -> Iterator[Filled]:
        """The request, and its variants: page by page, by another name, as a table."""
        number = next(self._numbers)
        path = self._path(operation, target)
        media, body = self._body(operation, target, f"new-{number:05}")
        naming = self._naming(operation, target)
        first = Filled(operation, path, naming[0] if naming else {}, media, body)
        yield first
        yield from (replace(first, query=query) for query in naming[1:])
        if "account" in operation.query and operation.method == "GET":
            for owner in ("user", "colleague"):
                yield replace(first, query={"account": f"{target.tenant}/{target.names[owner]}"})
        if "limit" in operation.query and operation.method == "GET":
            yield replace(first, query={**first.query, "limit": "1"})
        if operation.method == "GET" and "fieldSelector" in operation.query and operation.noun in LISTED:
            for field, part in LISTED[operation.noun]:
                yield replace(first, query={"fieldSelector": f"{field}={target.names[part]}"})
        if operation.method == "GET" and operation.noun in NOUNS:
            yield replace(first, accept=TABLE)
        if operation.id == "simulateAllocations":
            work = {"kind": "Job", "metadata": {"name": "what-if"}, **SPECS["Job"]}
            yield replace(first, body=json.dumps({"items": [work]}).encode())

    def _path(self, operation: Operation, target: Target) -> str:
        path = operation.path
        for variable in operation.variables:
            path = path.replace(f"{{{variable}}}", quote(self._name(operation, variable, target), safe=""))
        return path

    def _name(self, operation: Operation, variable: str, target: Target) -> str:
        if variable == "name" and operation.noun == "settings":
            return "system"
        if variable == "dimension":
            return "seats"
        part = OTHERS.get(operation.id) or NOUNS.get(operation.noun) if variable == "name" else VARIABLES.get(variable)
        if part not in target.names:
            raise Unfilled(
                f"{operation}: which part of a target {{{variable}}} names is not said in NOUNS or VARIABLES"
            )
        return target.names[part]

    def _naming(self, operation: Operation, target: Target) -> list[dict[str, str]]:
        """Queries that name the target, each by one parameter."""
        if unknown := [name for name in operation.query if name not in QUERY]:
            raise Unfilled(f"{operation}: QUERY does not say what the parameters {unknown} name")
        if operation.id == "deletePrices":
            return [{"resource": "memory", "effective_from": _moment(target)}]
        given = {name: value for name in operation.query if (value := QUERY[name]) is not None}
        chosen = EITHER.get(operation.id, tuple(given))
        return [{name: value(target)} for name, value in given.items() if name in chosen]

    def _body(self, operation: Operation, target: Target, fresh: str) -> tuple[str, bytes | None]:
        by_hand = self._by_hand(operation, target)
        if by_hand is not None:
            media, document = by_hand
            return media, document if isinstance(document, bytes) else json.dumps(document).encode()
        if operation.schema is None or operation.method == "DELETE":
            return "", None
        named = operation.method == "POST"
        name = fresh if named else self._name(operation, "name", target) if "name" in operation.variables else ""
        document = sample(self._schemas, operation.schema, self._given(operation, target, name))
        return operation.media, json.dumps(document).encode()

    def _given(self, operation: Operation, target: Target, name: str) -> Document:
        names = target.names
        labels = {FAMILY: names["family"], "touched": "yes"}
        if operation.body in OWNED:
            labels["bursar.io/tenant"] = target.tenant
        given: dict[str, Any] = {
            "metadata": {"name": name, "labels": labels} if name else {},
            "name": name, "tenant": target.tenant, "account": target.tenant, "user": f"user-{name}",
            "request_id": f"request-{next(self._numbers)}", "amount": "1", "role": "viewer", "reason": "a test",
            "url": "https://hooks.example/new", "job_id": names["leased"], "gpu_type": H100, "gpu_count": 1,
            "lease_id": names["lease"], "targetAllocation": names["allocation"], "labelSelector": "touched",
            "certificateRequest": self._certificate_request, "resource": "memory", "per_second": "0.5",
            "start_ts": "2026-01-01T00:00:00Z", "end_ts": "2026-01-01T00:00:01Z", "duration": "1h", "newPriority": 3,
            "low_balance": "1", "effective_from": _moment(target),
        }  # fmt: skip
        if operation.body in SPECS:
            given |= SPECS[operation.body]
        if operation.method == "PUT":
            given.setdefault("spec", {})  # a replacement without one is refused where that would remove something
        if operation.body == "Member":
            user = f"user-{name}" if operation.method == "POST" else name.partition(".")[2]
            given["spec"] = {"tenant": target.tenant, "user": user, "role": "viewer"}
            given["metadata"]["name"] = f"{target.tenant}.{user}"
        if operation.body == "ProviderIdentity":
            user = name if operation.method == "POST" else name.partition(":")[2]
            given |= {"providerName": "campus", "providerUserName": user, "user": {"name": names["registered"]}}
            given["metadata"]["name"] = f"campus:{user}"
        if operation.body == "RoleBinding":
            given["metadata"]["name"] = names["binding"]
            given["roleRef"] = {"kind": "ClusterRole", "name": names["binding"]}
            given["subjects"] = [{"kind": "User", "name": f"user-{name}"}]
        if operation.id == "createTenant":
            given["spec"] = {"parent": target.tenant}
        if operation.id == "replaceAllocationStatus":
            given["status"] = {"phase": "Running"}
        if operation.body in ("NewLease", "NewUsage"):
            given["account"] = f"{target.tenant}/{names['user']}"
        return {key: value for key, value in given.items() if key not in WITHOUT.get(operation.body, ())}

    def _by_hand(self, operation: Operation, target: Target) -> tuple[str, Any] | None:
        names = target.names
        if operation.method == "PATCH" and operation.body in ("", "JSONPatch"):
            return operation.media, PATCHES.get(operation.id, {"metadata": {"labels": {"touched": "yes"}}})
        match operation.id:
            case "approveApprovalsDecide":
                claim = {"kind": "ResourceClaim", "namespace": names["namespace"], "name": names["resourceclaim"]}
                return operation.media, {"items": [{**claim, "decision": "note", "reason": "a test"}]}
            case "replaceTenantLimitsAtApiV1TenantsNameLimits":
                return operation.media, {"limits": {"seats": 1}}
            case "replaceTenantLimitsAtApiV1TenantsNameLimitsDimension":
                return operation.media, {"limit": 1}
            case "claimNode":
                return operation.media, {"reason": "a test", "user": f"{target.tenant}/{names['user']}"}
            case "createUserIdentityMapping":
                mapping = {"identity": {"name": names["identity"]}, "user": {"name": names["registered"]}}
                return operation.media, mapping
            case "createPodEviction":
                return operation.media, {"metadata": {"name": names["allocation"], "namespace": names["namespace"]}}
            case "replaceAllocationStdin":
                return "application/octet-stream", b"print(1)"
            case "createSelfSubjectAccessReview":
                attributes = {"verb": "get", "resource": "allocations", "namespace": names["namespace"]}
                return "application/json", {"spec": {"resourceAttributes": attributes}}
            case "createSelfSubjectRulesReview" | "createSelfSubjectReview":
                return "application/json", {"spec": {}}
        return None


def _moment(target: Target) -> str:
    """A time to come at which a price may begin, another for each target."""
    number = int("".join(one for one in target.tenant if one.isdigit()) or 0)
    return f"{2100 + number // 3600}-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z"


def _certificate_request() -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def sample(schemas: Mapping[str, Document], schema: Document, given: Mapping[str, Any], depth: int = 0) -> Any:
    """A small value that a schema allows. Of an object: the properties that it requires, and all that are given."""
    if depth > _DEPTH_MAX:
        return {}
    if "$ref" in schema:
        return sample(schemas, schemas[schema["$ref"].removeprefix(_REF)], given, depth + 1)
    for choice in ("const", "default"):
        if choice in schema:
            return schema[choice]
    if "enum" in schema:
        return schema["enum"][0]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        plain = [one for one in options if one.get("type") != "null"]
        return sample(schemas, (plain or options)[0], given, depth + 1)
    match schema.get("type"):
        case "object" | None:
            wanted = schema.get("required", ())
            return {
                name: given[name] if name in given else sample(schemas, one, given, depth + 1)
                for name, one in schema.get("properties", {}).items()
                if name in wanted or name in given
            }
        case "array":
            return [sample(schemas, schema.get("items", {}), given, depth + 1)] if schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case _:
            return "x" * max(1, schema.get("minLength", 1))
