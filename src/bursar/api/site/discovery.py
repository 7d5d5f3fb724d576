"""Kubernetes discovery: the resources, their names and their verbs.

It is generated from the route table, so only served paths are announced. The shape of a path shows its type:
`/api/v1/nodes` is a collection, `/api/v1/nodes/{name}` an item, `/api/v1/nodes/{name}/status` a subresource; the method
gives the verb. Paths of other shapes (reports, bulk verbs) are Bursar's own and are not announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bursar.api.http.route import Route
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.kind import Kind

CORE = "v1"
# The release of Kubernetes whose behaviour is followed; clients compare it with their own.
KUBERNETES_MINOR = "32"

_COLLECTION_VERBS = {"GET": ("list",), "POST": ("create",), "DELETE": ("deletecollection",)}
_ITEM_VERBS = {"GET": ("get",), "PUT": ("update",), "PATCH": ("patch",), "DELETE": ("delete",)}
_PART_VERBS = {**_ITEM_VERBS, "POST": ("create",)}


@dataclass(frozen=True, slots=True)
class DiscoveredResource:
    """The names of a resource."""

    kind: str
    singular: str
    namespaced: bool
    short_names: tuple[str, ...] = ()
    in_all: bool = False


# Resources that are shown to Kubernetes clients but are no stored kinds.
_FOREIGN = {
    "events": DiscoveredResource("Event", "event", True, ("ev",)),
    "pods": DiscoveredResource("Pod", "pod", True, ("po",)),
    "poddisruptionbudgets": DiscoveredResource("PodDisruptionBudget", "poddisruptionbudget", True, ("pdb",)),
    "preemptions": DiscoveredResource("Preemption", "preemption", True),
    "projectrequests": DiscoveredResource("ProjectRequest", "projectrequest", False),
    "projects": DiscoveredResource("Project", "project", False),
    "rolebindings": DiscoveredResource("RoleBinding", "rolebinding", True),
    "useridentitymappings": DiscoveredResource("UserIdentityMapping", "useridentitymapping", False),
    "selfsubjectaccessreviews": DiscoveredResource("SelfSubjectAccessReview", "selfsubjectaccessreview", False),
    "selfsubjectrulesreviews": DiscoveredResource("SelfSubjectRulesReview", "selfsubjectrulesreview", False),
    "selfsubjectreviews": DiscoveredResource("SelfSubjectReview", "selfsubjectreview", False),
}

# Subresources whose messages are of another kind than the item; kubectl drain looks for the group and version of
# evictions.
_PART_KINDS = {"pods/eviction": {"kind": "Eviction", "group": "policy", "version": "v1"}}


def documents(routes: Iterable[Route], kinds: Iterable[Kind] = KINDS, *, release: str) -> dict[str, bytes]:
    """Render every discovery document by path; `release` is Bursar's own version."""
    known = nouns(kinds)
    lists = _resource_lists(routes, known)
    groups = [_group(name) for name in lists if "/" in name]
    bodies: dict[str, Any] = {
        "/api": {"kind": "APIVersions", "versions": [CORE], "serverAddressByClientCIDRs": []},
        "/api/v1": _resource_list(CORE, lists.get(CORE, {}), known),
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/version": version(release),
        "/version/": version(release),
    }
    for group in groups:
        bodies[f"/apis/{group['name']}"] = {"kind": "APIGroup", "apiVersion": "v1", **group}
    for name, resources in lists.items():
        if "/" in name:
            bodies[f"/apis/{name}"] = _resource_list(name, resources, known)
    return {path: msgspec.json.encode(body) for path, body in bodies.items()}


def nouns(kinds: Iterable[Kind]) -> dict[str, DiscoveredResource]:
    """Map plurals to the names of every resource that may be announced."""
    ours = {
        kind.plural: DiscoveredResource(kind.name, kind.singular, kind.namespaced, kind.short_names, kind.in_all)
        for kind in kinds
    }
    return {**_FOREIGN, **ours}


def version(release: str) -> dict[str, str]:
    """The version document. Clients choose features by major and minor; the Python client requires every field."""
    return {
        "major": "1",
        "minor": KUBERNETES_MINOR,
        "gitVersion": f"v1.{KUBERNETES_MINOR}.0+bursar-{release}",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "",
    }


def _resource_lists(
    routes: Iterable[Route], known: Mapping[str, DiscoveredResource]
) -> dict[str, dict[str, list[str]]]:
    """Group and version → resource (or `resource/part`) → its verbs."""
    lists: dict[str, dict[str, list[str]]] = {}
    for route in routes:
        for group_version, resource, verb in _announced(route, known):
            verbs = lists.setdefault(group_version, {}).setdefault(resource, [])
            if verb not in verbs:
                verbs.append(verb)
    return lists


def _announced(route: Route, known: Mapping[str, DiscoveredResource]) -> Iterator[tuple[str, str, str]]:
    group_version, steps = _split(route.path, known)
    if not steps or steps[0] not in known:
        return
    match steps:
        case [resource]:
            verbs = _COLLECTION_VERBS.get(route.method, ())
            if "list" in verbs and any(param.name == "watch" for param in route.params):
                verbs = (*verbs, "watch")
            yield from ((group_version, resource, verb) for verb in verbs)
        case [resource, name] if _is_variable(name):
            yield from ((group_version, resource, verb) for verb in _ITEM_VERBS.get(route.method, ()))
        case [resource, name, part] if _is_variable(name) and not _is_variable(part):
            yield from ((group_version, f"{resource}/{part}", verb) for verb in _PART_VERBS.get(route.method, ()))


def _split(path: str, known: Mapping[str, DiscoveredResource]) -> tuple[str, list[str]]:
    """Split a path into group and version, and its steps without the namespace."""
    steps = path.strip("/").split("/")
    if steps[:2] == ["api", CORE]:
        group_version, steps = CORE, steps[2:]
    elif steps[0] == "apis" and len(steps) > 3:
        group_version, steps = "/".join(steps[1:3]), steps[3:]
    else:
        return "", []
    # A namespace has subresources of its own, which are no resources.
    in_namespace = steps[0] == "namespaces" and len(steps) > 2 and steps[2] in known
    return group_version, steps[2:] if in_namespace else steps


def _is_variable(step: str) -> bool:
    return step.startswith("{")


def _group(group_version: str) -> dict[str, Any]:
    name, _, number = group_version.partition("/")
    one = {"groupVersion": group_version, "version": number}
    return {"name": name, "versions": [one], "preferredVersion": one}


def _resource_list(
    group_version: str, resources: Mapping[str, list[str]], known: Mapping[str, DiscoveredResource]
) -> dict[str, Any]:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": [
            _resource(name, verbs, known[name.partition("/")[0]]) for name, verbs in sorted(resources.items())
        ],
    }


def _resource(name: str, verbs: list[str], noun: DiscoveredResource) -> dict[str, Any]:
    if "/" in name:
        described = {"name": name, "singularName": "", "namespaced": noun.namespaced, "kind": noun.kind, "verbs": verbs}
        return {**described, **_PART_KINDS.get(name, {})}
    described = {
        "name": name,
        "singularName": noun.singular,
        "namespaced": noun.namespaced,
        "kind": noun.kind,
        "verbs": verbs,
    }
    if noun.short_names:
        described["shortNames"] = noun.short_names
    if noun.in_all:
        described["categories"] = ("all",)
    return described
