"""OpenAPI, generated from the route table and from the types that the server reads and writes.

`/openapi.json` is the whole API, in OpenAPI 3.1. `/openapi/v3` has a part for each group of kinds, which kubectl reads
before `apply` and for `explain`, in Kubernetes' dialect. `/openapi/v2` only lists where old clients may use dry runs.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from bursar.api.http.route import JSON, Route
from bursar.api.site import openapi_v2
from bursar.api.site.discovery import DiscoveredResource, nouns
from bursar.api.site.openapi_text import FIELD_WORDS, REFUSAL_HEADERS, REFUSAL_WORDS
from bursar.core.values.access import MONEY, OURS
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.faults import schema_components
from bursar.wire.shared.kind import Kind

Document = dict[str, Any]

MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"

_SCHEMAS: Final = "#/components/schemas/"
_OTHER_TAG: Final = "System"
_CREDIT_TAG: Final = "Credit"
_GVK: Final = "x-kubernetes-group-version-kind"


def documents(routes: Iterable[Route], kinds: Iterable[Kind] = KINDS, *, release: str) -> dict[str, bytes]:
    """Render every document by path; `release` is Bursar's own version."""
    routes, kinds = tuple(routes), tuple(kinds)
    groups: dict[str, list[Kind]] = {}
    for kind in kinds:
        groups.setdefault(kind.root, []).append(kind)
    for_kubectl = {
        root: msgspec.json.encode(kubectl_document(_of_group(routes, root), group, release=release))
        for root, group in groups.items()
    }
    return {
        "/openapi.json": msgspec.json.encode(document(routes, kinds, release=release)),
        "/openapi/v2": openapi_v2.body(_patches(routes), release=release),
        "/openapi/v3": msgspec.json.encode(kubectl_index(for_kubectl)),
        **{f"/openapi/v3{root}": body for root, body in for_kubectl.items()},
    }


def _of_group(routes: Iterable[Route], root: str) -> tuple[Route, ...]:
    return tuple(route for route in routes if route.kind is not None and route.kind.root == root)


def document(routes: Iterable[Route], kinds: Iterable[Kind] = KINDS, *, release: str) -> Document:
    """The OpenAPI 3.1 document."""
    routes, kinds = _documented(routes), tuple(kinds)
    roots, schemas = _schemas(routes, kinds)
    names = operation_ids(routes)
    paths: dict[str, Document] = {}
    for route in routes:
        item = paths.setdefault(route.path, _path_item(route.path))
        item[route.method.lower()] = _operation(route, names[route.method, route.path], roots)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Bursar",
            "version": release,
            "summary": "The control plane that decides who gets which GPUs, when, and who pays.",
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}],
        "tags": _tags(routes),
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token from `bursar token create`, or an OIDC JWT.",
                }
            },
            "responses": _refusal_responses(routes),
            "schemas": schemas,
        },
    }


_INTRODUCTION: Final = (
    "Objects have metadata, spec and status, as in Kubernetes; unmodified kubectl works. Every refusal is a Status "
    "with a code, a reason and a message, and where fields are at fault all of them are listed in `details.causes`. "
    "Quantities are written as in Kubernetes: `8000m`, `32Gi`, `4`."
)


def _documented(routes: Iterable[Route]) -> tuple[Route, ...]:
    """The routes without duplicate spellings that end in a slash."""
    routes = tuple(routes)
    paths = {route.path for route in routes}
    return tuple(one for one in routes if one.path == "/" or one.path.rstrip("/") not in paths - {one.path})


# Operations.


def _operation(route: Route, name: str, roots: Mapping[Any, Document]) -> Document:
    operation: Document = {"operationId": name, "summary": route.summary, "tags": [_tag(route)]}
    if route.public:
        operation["security"] = []
    if route.params:
        operation["parameters"] = [
            {"name": one.name, "in": "query", "description": one.description, "schema": {"type": one.type}}
            for one in route.params
        ]
    if route.body is not None:
        operation["requestBody"] = _request_body(route, roots)
    operation["responses"] = _responses(route, roots)
    return operation


def _path_item(path: str) -> Document:
    variables = path_variables(path)
    if not variables:
        return {}
    return {
        "parameters": [
            {"name": one, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for one in variables
        ]
    }


def path_variables(path: str) -> list[str]:
    return [step[1:-1] for step in path.split("/") if step.startswith("{")]


def _request_body(route: Route, roots: Mapping[Any, Document]) -> Document:
    content: dict[str, Document] = {}
    for media in route.body_media:
        content[media] = {"schema": _body_schema(media, roots[route.body])}
        example = route.kind.example if route.kind else None
        if example and media == JSON and route.kind and route.body is route.kind.type and not route.subresource:
            content[media]["example"] = example
    # Kubernetes' clients send options in the body of a DELETE; other clients send none.
    return {"required": route.method != "DELETE", "content": content}


def _body_schema(media: str, root: Document) -> Document:
    if media == JSON_PATCH:
        return {"$ref": f"{_SCHEMAS}JSONPatch"}
    if media in (MERGE_PATCH, STRATEGIC_PATCH):
        return {"type": "object", "description": "The fields to change; null removes one."}
    if media == JSON or media.endswith(("+yaml", "/yaml")):
        return root
    return {"type": "string", "format": "binary"}


def _responses(route: Route, roots: Mapping[Any, Document]) -> Document:
    """The possible responses by status code."""
    responses: Document = {}
    for status in sorted({route.status, *(code for code in route.refusals if code < 400)}):
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
        if status != HTTPStatus.NO_CONTENT:
            schema = _answer_schema(route, roots)
            responses[str(status)]["content"] = {media: _answer_media(media, schema) for media in route.answer_media}
    for status in refusals(route):
        responses[str(status)] = {"$ref": f"#/components/responses/{_refusal_name(status)}"}
    return responses


def _answer_schema(route: Route, roots: Mapping[Any, Document]) -> Document:
    found = [roots[one] for one in route.answers]
    if route.is_list:
        found = [{"$ref": f"{root['$ref']}List"} if "$ref" in root else root for root in found]
    return {"anyOf": found} if len(found) > 1 else found[0] if found else {"type": "object"}


def _answer_media(media: str, schema: Document) -> Document:
    if "as=Table" in media:
        return {"schema": {"$ref": f"{_SCHEMAS}Table"}}
    return {"schema": schema if media.startswith(JSON) else {"type": "string"}}


def refusals(route: Route) -> list[int]:
    """Every status of 400 and above that the route may return: those it lists, and those that follow from its form."""
    writes_kind = route.kind is not None and route.method != "GET"
    has_body, has_variables = route.body is not None, "{" in route.path
    is_watched = any(param.name == "watch" for param in route.params)
    rules = (
        (has_body or has_variables or bool(route.params), (400,)),
        (not route.public, (401, 403, 500, 503)),
        (has_variables, (404,)),
        (len(route.answer_media) > 1, (406,)),
        (writes_kind, (409,)),
        (is_watched, (410,)),
        (has_body, (413, 415)),
        (writes_kind and has_body, (422,)),
        (not route.free, (429,)),
    )
    implied = {code for applies, codes in rules if applies for code in codes}
    return sorted(implied | {code for code in route.refusals if code >= 400})


def _refusal_responses(routes: Iterable[Route]) -> Document:
    used = {code for route in routes for code in refusals(route)}
    return {_refusal_name(code): _refusal_response(code) for code in sorted(used)}


def _refusal_name(status: int) -> str:
    return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "").replace("'", "")


def _refusal_response(status: int) -> Document:
    response: Document = {
        "description": REFUSAL_WORDS.get(status, HTTPStatus(status).phrase),
        "content": {JSON: {"schema": {"$ref": f"{_SCHEMAS}Status"}}},
    }
    if status in REFUSAL_HEADERS:
        response["headers"] = REFUSAL_HEADERS[status]
    return response


# Names and tags.


def _tag(route: Route) -> str:
    plural, noun = _noun(route)
    if plural in (*MONEY, "ledger"):
        return _CREDIT_TAG
    return noun.kind if noun else plural.capitalize() or _OTHER_TAG


def _tags(routes: Sequence[Route]) -> list[Document]:
    """Each tag once, in order of first use; routes without a resource come last."""
    described = {_tag(route): route.kind.description if route.kind else "" for route in reversed(routes)}
    ordered = sorted(dict.fromkeys(map(_tag, routes)), key=lambda tag: tag == _OTHER_TAG)
    return [{"name": tag, "description": described[tag]} if described[tag] else {"name": tag} for tag in ordered]


_COLLECTION_WORDS: Final = {"GET": "list", "POST": "create", "DELETE": "deleteAll"}
_ITEM_WORDS: Final = {"GET": "get", "POST": "create", "PUT": "replace", "PATCH": "patch", "DELETE": "delete"}


def operation_ids(routes: Sequence[Route]) -> dict[tuple[str, str], str]:
    """Give each (method, path) a unique name in the form of a function name."""
    short = {(route.method, route.path): _operation_name(route) for route in routes}
    uses = Counter(short.values())
    return {key: name if uses[name] == 1 else f"{name}At{_path_name(key[1])}" for key, name in short.items()}


def _operation_name(route: Route) -> str:
    steps = _steps(route.path)
    plural, noun = _noun(route)
    if noun is None or plural not in steps:
        return _word(route) + _pascal(step for step in steps if not step.startswith("{") and step != route.verb)
    # The rightmost plural is the subject of a path: /namespaces/{namespace}/allocations.
    tail = steps[len(steps) - steps[::-1].index(plural) :]
    if not tail:
        everywhere = "ForAllNamespaces" if noun.namespaced and "{namespace}" not in steps else ""
        name = noun.kind if route.method == "POST" else _plural_name(plural, noun)
        return f"{_COLLECTION_WORDS.get(route.method, route.method.lower())}{name}{everywhere}"
    if not tail[0].startswith("{"):
        return f"{_camel('-'.join(tail))}{_plural_name(plural, noun)}"
    if route.verb in OURS and route.method != "DELETE":
        return f"{route.verb}{noun.kind}"
    return f"{_word(route)}{noun.kind}{_pascal(step for step in tail if not step.startswith('{'))}"


def _noun(route: Route) -> tuple[str, DiscoveredResource | None]:
    """The resource of a route: its plural and its names, of kinds and of resources made for Kubernetes."""
    if route.kind is not None:
        return route.kind.plural, nouns([route.kind])[route.kind.plural]
    return route.resource, nouns(()).get(route.resource)


def _steps(path: str) -> list[str]:
    steps = path.strip("/").split("/")
    if steps[0] == "apis":
        return steps[3:] or steps
    return steps[2:] or steps if steps[0] == "api" else steps


def _word(route: Route) -> str:
    ours = route.verb in (*OURS, "list") and route.method != "DELETE"
    return route.verb if ours else _ITEM_WORDS.get(route.method, route.method.lower())


def _plural_name(plural: str, noun: DiscoveredResource) -> str:
    """The plural in the spelling of the kind: PriorityClasses, from priorityclasses and PriorityClass."""
    return noun.kind + plural[len(noun.kind) :] if plural.startswith(noun.singular) else plural.capitalize()


def _pascal(words: Iterable[str]) -> str:
    joined = "-".join(words)
    return "".join(word[:1].upper() + word[1:] for word in joined.replace(".", "-").replace("_", "-").split("-"))


def _path_name(path: str) -> str:
    return _pascal(step.strip("{}") for step in path.strip("/").split("/"))


def _camel(text: str) -> str:
    name = _pascal([text])
    return name[:1].lower() + name[1:]


# Schemas.


def _schemas(routes: Sequence[Route], kinds: Sequence[Kind]) -> tuple[dict[Any, Document], dict[str, Document]]:
    """The schema of each type that a route names, and all components."""
    named = (one for route in routes for one in (route.body, *route.answers) if one is not None)
    types: list[Any] = list(dict.fromkeys([*(kind.type for kind in kinds), *named]))
    roots, components = schema_components(types, f"{_SCHEMAS}{{name}}")
    by_type = dict(zip(types, roots, strict=True))
    lists = (by_type[one] for route in routes if route.is_list for one in route.answers)
    schemas = {**(copy.deepcopy(_COMMON_SCHEMAS) if routes else {}), **components}
    for root in lists:
        if "$ref" in root:
            name = root["$ref"].removeprefix(_SCHEMAS)
            schemas[f"{name}List"] = _list_schema(name)
    for kind in kinds:
        schemas[kind.type.__name__].setdefault("description", kind.description)
    words = {**FIELD_WORDS, **{path: text for kind in kinds for path, text in kind.words.items()}}
    for name, schema in schemas.items():
        _describe(name, schema, words)
    return by_type, dict(sorted(schemas.items()))


def _list_schema(name: str) -> Document:
    return {
        "title": f"{name}List",
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "$ref": f"{_SCHEMAS}ListMeta",
                "description": "The revision to watch from, and the continue token.",
            },
            "items": {"type": "array", "items": {"$ref": f"{_SCHEMAS}{name}"}},
        },
        "required": ["items"],
    }


def _describe(name: str, schema: Document, words: Mapping[str, str]) -> None:
    """Add known descriptions to the fields of a schema."""
    if not schema.get("required", True):
        del schema["required"]
    for field, inner in schema.get("properties", {}).items():
        if text := words.get(f"{name}.{field}") or words.get(field):
            inner.setdefault("description", text)


_COMMON_SCHEMAS: Final[dict[str, Document]] = {
    "Status": {
        "title": "Status",
        "type": "object",
        "description": "The outcome of a request: its refusal or success.",
        "properties": {
            "kind": {"type": "string", "const": "Status"},
            "apiVersion": {"type": "string"},
            "metadata": {"type": "object", "description": "Empty."},
            "status": {"type": "string", "description": "Success or Failure."},
            "code": {"type": "integer", "description": "The HTTP status."},
            "reason": {"type": "string", "description": "A stable word for programs, such as NotFound."},
            "message": {"type": "string", "description": "A sentence for people, with the numbers that explain it."},
            "details": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "kind": {"type": "string"},
                    "uid": {"type": "string"},
                    "retryAfterSeconds": {"type": "integer"},
                    "causes": {"type": "array", "items": {"$ref": f"{_SCHEMAS}StatusCause"}},
                },
            },
        },
        "required": ["kind", "code", "reason", "message"],
    },
    "StatusCause": {
        "title": "StatusCause",
        "type": "object",
        "description": "One of the causes: an invalid field, or an exceeded limit.",
        "properties": {
            "reason": {"type": "string"},
            "message": {"type": "string"},
            "field": {"type": "string", "description": "The path in the body, as in spec.taints[0].key."},
        },
    },
    "ListMeta": {
        "title": "ListMeta",
        "type": "object",
        "properties": {
            "resourceVersion": {"type": "string", "description": "The revision to watch from."},
            "continue": {"type": "string", "description": "Fetches the next page; absent on the last one."},
            "remainingItemCount": {"type": "integer"},
        },
    },
    "JSONPatch": {
        "title": "JSONPatch",
        "type": "array",
        "description": "RFC 6902.",
        "items": {
            "type": "object",
            "properties": {
                "op": {"enum": ["add", "remove", "replace", "move", "copy", "test"]},
                "path": {"type": "string"},
                "from": {"type": "string"},
                "value": {"description": "Any JSON value."},
            },
            "required": ["op", "path"],
        },
    },
    "Table": {
        "title": "Table",
        "type": "object",
        "description": "A table for kubectl: columns and rows.",
        "properties": {
            "kind": {"type": "string", "const": "Table"},
            "apiVersion": {"type": "string", "const": "meta.k8s.io/v1"},
            "metadata": {"$ref": f"{_SCHEMAS}ListMeta", "description": "The metadata of the list."},
            "columnDefinitions": {"type": ["array", "null"], "items": {"type": "object"}},
            "rows": {"type": "array", "items": {"type": "object"}},
        },
    },
}

# Descriptions of fields: of one schema (`AllocationSpec.ttl`), or of every field with this name.


def kubectl_document(routes: Iterable[Route], kinds: Iterable[Kind] = KINDS, *, release: str) -> Document:
    """The kinds in Kubernetes' dialect of OpenAPI 3.0, reduced to the parts that kubectl reads at every apply."""
    routes, kinds = _documented(routes), tuple(kinds)
    _, schemas = _schemas((), kinds)
    for kind in kinds:
        schemas[kind.type.__name__][_GVK] = [_group_version_kind(kind)]
    names = operation_ids(routes)
    paths: dict[str, Document] = {}
    for route in routes:
        if route.kind is not None and not route.subresource and _is_of_kind(route.path, route.kind):
            item = paths.setdefault(route.path, _path_item(route.path))
            item[route.method.lower()] = _kubectl_operation(route, route.kind, names[route.method, route.path])
    return {
        "openapi": "3.0.0",
        "info": {"title": "Bursar", "version": release},
        "paths": paths,
        "components": {"schemas": {name: _in_dialect(schema) for name, schema in schemas.items()}},
    }


def _patches(routes: Iterable[Route]) -> Iterable[tuple[str, str, dict[str, str], list[str]]]:
    """The PATCH operations of the kinds: path, name, kind and query parameters."""
    routes = _documented(routes)
    names = operation_ids(routes)
    for route in routes:
        if route.method == "PATCH" and route.kind is not None and not route.subresource:
            kind, parameters = _group_version_kind(route.kind), [one.name for one in route.params]
            yield route.path, names[route.method, route.path], kind, parameters


def kubectl_index(bodies: Mapping[str, bytes]) -> Document:
    """The index of the documents by path. Their addresses change with them, because clients cache by address."""
    return {
        "paths": {
            root.removeprefix("/"): {
                "serverRelativeURL": f"/openapi/v3{root}?hash={hashlib.sha256(body).hexdigest()[:32]}"
            }
            for root, body in bodies.items()
        }
    }


def _is_of_kind(path: str, kind: Kind) -> bool:
    """Whether a path is the kind's collection or item. kubectl takes any PATCH of a kind for the item's."""
    steps = _steps(path)
    return steps[-1] == kind.plural or (steps[-2:-1] == [kind.plural] and steps[-1].startswith("{"))


def _group_version_kind(kind: Kind) -> dict[str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return {"group": group, "version": version, "kind": kind.name}


def _kubectl_operation(route: Route, kind: Kind, name: str) -> Document:
    known = {param.name: param.type for param in route.params}
    if route.method in ("POST", "PUT", "PATCH"):
        # Without this parameter, kubectl would validate bodies against schemas that it does not have.
        known["fieldValidation"] = "string"
    parameters = [{"name": name, "in": "query", "schema": {"type": type_}} for name, type_ in known.items()]
    return {
        "operationId": name,
        "parameters": parameters,
        "responses": {str(route.status): {"description": HTTPStatus(route.status).phrase}},
        _GVK: _group_version_kind(kind),
    }


def _in_dialect(schema: Any) -> Any:
    """Convert to OpenAPI 3.0, in which a reference has no siblings, and to Kubernetes' form of "text or a number"."""
    if isinstance(schema, list):
        return [_in_dialect(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and len(schema) > 1:
        return {"allOf": [{"$ref": schema["$ref"]}], **{key: value for key, value in schema.items() if key != "$ref"}}
    types = {one.get("type") for one in schema.get("anyOf", ()) if isinstance(one, dict)}
    if types and types <= {"string", "integer", "number"}:
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return {**rest, "type": "string", "x-kubernetes-int-or-string": True}
    return {key: _in_dialect(value) for key, value in schema.items() if key != "const"}


# Examples.
