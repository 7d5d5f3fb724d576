"""The OpenAPI documents: valid, complete, and in the form that kubectl reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from bursar.api.http.params import base_path
from bursar.api.http.route import Route
from bursar.api.site.openapi import document, documents, kubectl_document, operation_ids, refusals
from bursar.api.site.openapi_text import FIELD_WORDS
from bursar.api.site.routes import build_routes
from bursar.wire.kinds.registry import BY_NAME, KINDS
from support.api.sample_routes import ROUTES, nobody

DOCUMENT = document(ROUTES, release="1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
NAMES = operation_ids(ROUTES)
ROUTE_OF = {NAMES[route.method, route.path]: route for route in ROUTES}


def _operations(whole: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in whole["paths"].items():
        yield from ((method, path, one) for method, one in item.items() if method != "parameters")


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


@pytest.mark.parametrize("whole", [DOCUMENT, kubectl_document(ROUTES, release="1.2.3")])
def test_every_reference_leads_somewhere(whole: dict[str, Any]) -> None:
    for reference in _references(whole):
        found: Any = whole
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]


def test_every_schema_is_a_schema() -> None:
    for name, schema in SCHEMAS.items():
        assert jsonschema_rs.meta.is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name


def test_every_route_is_described_once() -> None:
    described = {(method.upper(), path) for method, path, _ in _operations(DOCUMENT)}
    assert described == {(route.method, route.path) for route in ROUTES if route.path != "/version/"}


def test_path_variables_are_declared() -> None:
    for path, item in DOCUMENT["paths"].items():
        declared = [one["name"] for one in item.get("parameters", ())]
        assert declared == [step[1:-1] for step in path.split("/") if step.startswith("{")]


def test_operation_ids_are_unique_and_read_like_functions() -> None:
    names = [operation["operationId"] for _, _, operation in _operations(DOCUMENT)]
    assert max(Counter(names).values()) == 1
    assert {
        "listAllocations",
        "listAllocationsForAllNamespaces",
        "createAllocation",
        "getAllocation",
        "replaceAllocation",
        "patchAllocation",
        "deleteAllocation",
        "getAllocationStatus",
        "bulkReleaseAllocations",
        "listPriorityClasses",
        "drainNode",
        "evictPod",
        "createSelfSubjectAccessReview",
        "getMetricsClusterUtilization",
        "getHealthz",
    } <= set(names)


def test_no_two_operations_of_the_real_table_have_the_same_name() -> None:
    whole = document(build_routes("1.2.3"), release="1.2.3")
    names = Counter(operation["operationId"] for _, _, operation in _operations(whole))
    assert max(names.values()) == 1
    assert {"createTopups", "getBalance", "createLeases", "extendLeases", "closeLeases", "listPrices"} <= set(names)
    assert {"fenceNode", "deleteNodeFence"} <= set(names)


def test_two_paths_of_the_same_name_are_told_apart() -> None:
    one = Route("GET", "/api/v1/tenants/{id}/usage", nobody, "Usage", "get", "usage")
    other = Route("GET", "/api/v1/tenants/usage", nobody, "Usage", "get", "usage")
    assert sorted(operation_ids([one, other]).values()) == [
        "getTenantsUsageAtApiV1TenantsIdUsage",
        "getTenantsUsageAtApiV1TenantsUsage",
    ]


def test_tags_are_kinds_and_what_has_none_comes_last() -> None:
    tags = [tag["name"] for tag in DOCUMENT["tags"]]
    assert tags[0] == "Allocation"
    assert tags[-1] == "System"
    assert {operation["tags"][0] for _, _, operation in _operations(DOCUMENT)} == set(tags)


def test_every_refusal_is_a_status() -> None:
    for _, _, operation in _operations(DOCUMENT):
        for code, response in operation["responses"].items():
            if int(code) >= 400:
                name = response["$ref"].rpartition("/")[2]
                content = DOCUMENT["components"]["responses"][name]["content"]
                assert content["application/json"]["schema"]["$ref"].endswith("/Status")


def test_refusals_follow_from_the_form_of_the_route() -> None:
    assert refusals(ROUTE_OF["createAllocation"]) == [400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 503]
    assert refusals(ROUTE_OF["getNode"]) == [400, 401, 403, 404, 429, 500, 503]
    assert 410 in refusals(ROUTE_OF["listNodes"])
    assert refusals(ROUTE_OF["getHealthz"]) == []


def test_public_routes_need_no_token() -> None:
    assert DOCUMENT["security"] == [{"bearer": []}]
    assert DOCUMENT["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in DOCUMENT["paths"]["/api/v1/nodes"]["get"]


def test_bodies_are_described_by_media_type() -> None:
    content = DOCUMENT["paths"]["/api/v1/nodes/{name}"]["patch"]["requestBody"]["content"]
    assert content["application/json-patch+json"]["schema"] == {"$ref": "#/components/schemas/JSONPatch"}
    assert content["application/merge-patch+json"]["schema"]["type"] == "object"
    assert content["application/apply-patch+yaml"]["schema"] == {"$ref": "#/components/schemas/Node"}


def test_lists_are_lists() -> None:
    answer = DOCUMENT["paths"]["/api/v1/nodes"]["get"]["responses"]["200"]["content"]
    assert answer["application/json"]["schema"] == {"$ref": "#/components/schemas/NodeList"}
    assert SCHEMAS["NodeList"]["properties"]["items"]["items"] == {"$ref": "#/components/schemas/Node"}
    assert answer["text/event-stream"]["schema"] == {"type": "string"}


EXAMPLES = {kind.name: kind.example for kind in KINDS if kind.example}
WORDS = [*FIELD_WORDS, *(path for kind in KINDS for path in kind.words)]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_are_what_the_server_takes(kind: str) -> None:
    read = msgspec.convert(EXAMPLES[kind], BY_NAME[kind].type)
    assert BY_NAME[kind].check(read) == []
    path = base_path(BY_NAME[kind])
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
    assert content["application/json"]["example"] == EXAMPLES[kind]


def test_words_are_said_only_of_fields_that_exist() -> None:
    fields = {name for schema in SCHEMAS.values() for name in schema.get("properties", ())}
    for key in WORDS:
        schema, _, field = key.rpartition(".")
        assert field in (SCHEMAS[schema]["properties"] if schema else fields), key


def test_generating_leaves_no_trace() -> None:
    assert document(ROUTES, release="1.2.3") == DOCUMENT


def test_no_address_is_named() -> None:
    assert "servers" not in DOCUMENT
    assert "http://" not in json.dumps(DOCUMENT)


# What kubectl looks for before it applies.


def test_every_kind_can_be_patched_with_field_validation() -> None:
    whole = kubectl_document(ROUTES, release="1.2.3")
    for kind in KINDS:
        wanted = {"group": "", "version": "v1", "kind": kind.name}
        patches = [
            item["patch"]
            for item in whole["paths"].values()
            if item.get("patch", {}).get("x-kubernetes-group-version-kind") == wanted
        ]
        # kubectl takes the first that it finds, in no particular order.
        assert len(patches) == 1
        assert "fieldValidation" in [one["name"] for one in patches[0]["parameters"] if one["in"] == "query"]
        assert whole["components"]["schemas"][kind.type.__name__]["x-kubernetes-group-version-kind"] == [wanted]


def test_kubectl_explains_quantities_as_text() -> None:
    schemas = kubectl_document(ROUTES, release="1.2.3")["components"]["schemas"]
    hard = schemas["ResourceQuotaSpec"]["properties"]["hard"]["additionalProperties"]
    assert hard["type"] == "string"
    assert schemas["Allocation"]["properties"]["spec"]["allOf"] == [{"$ref": "#/components/schemas/AllocationSpec"}]


def test_the_index_names_the_document_by_its_content() -> None:
    first, second = documents(ROUTES, release="1.2.3"), documents(ROUTES, release="1.2.4")
    assert first["/openapi/v3"] == documents(ROUTES, release="1.2.3")["/openapi/v3"]
    assert first["/openapi/v3"] != second["/openapi/v3"]
    address = msgspec.json.decode(first["/openapi/v3"])["paths"]["api/v1"]["serverRelativeURL"]
    assert address.startswith("/openapi/v3/api/v1?hash=")


def test_old_clients_are_told_that_every_kind_can_be_tried_without_effect() -> None:
    body = documents(build_routes("1.2.3"), release="1.2.3")["/openapi/v2"]
    top = dict(protobuf_fields(body))
    assert top[1] == b"2.0"
    named = [dict(protobuf_fields(value)) for number, value in protobuf_fields(top[8]) if number == 2]
    told = {}
    for one in named:
        operation = list(protobuf_fields(dict(protobuf_fields(one[2]))[8]))
        (extension,) = [dict(protobuf_fields(value)) for number, value in operation if number == 13]
        assert extension[1] == b"x-kubernetes-group-version-kind"
        kind = msgspec.json.decode(dict(protobuf_fields(extension[2]))[2])
        parameters = [value for number, value in operation if number == 8]
        told[kind["kind"], kind["group"], kind["version"]] = any(b"dryRun" in value for value in parameters)
    assert told == {(kind.name, "", "v1"): True for kind in KINDS}


def protobuf_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message in which all are text or messages."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        size, at = varint(message, at)
        assert tag & 7 == 2
        yield tag >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if not message[at - 1] & 0x80:
            return value, at
