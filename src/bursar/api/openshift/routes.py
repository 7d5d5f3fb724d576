"""The routes of projects, role bindings and user identity mappings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bursar.api.http.params import DRY_RUN, MANAGER, PRETTY, SELECTORS, VALIDATION
from bursar.api.http.route import JSON, Param, Route
from bursar.api.objects.delete import DeleteOptions
from bursar.api.openshift import identity_mapping, project, role_binding
from bursar.api.openshift.identity_mapping import UserIdentityMapping
from bursar.api.openshift.project import PROJECT_API, Project, ProjectRequest
from bursar.api.openshift.role_binding import RBAC_API, RoleBinding
from bursar.wire.kinds.user import USER_API
from bursar.wire.shared.kind import root_path

LISTING: Final = (
    *SELECTORS,
    Param("limit", "Maximum number of items; fetch the rest with continue.", "integer"),
    Param("continue", "The continue token from the metadata of the previous page."),
    Param("resourceVersion", "Accepted for compatibility."),
)
DELETING: Final = (Param("propagationPolicy", "Accepted for compatibility."), DRY_RUN)
WRITING: Final = (VALIDATION, MANAGER, PRETTY)


def openshift_routes() -> Iterator[Route]:
    yield from _project_routes()
    yield from _binding_routes()
    yield from _mapping_routes()


def _project_routes() -> Iterator[Route]:
    base, name = f"{root_path(PROJECT_API)}/projects", "projects"
    item = f"{base}/{{name}}"
    yield Route(
        "GET", base, project.list_projects, "List projects.", "list", name, params=LISTING, answer=Project, is_list=True
    )
    yield Route("POST", base, project.create_project, "Create a project: a namespace, and a tenant of its own.",
                "create", name, params=WRITING, body=Project, answer=Project, status=201,
                refusals=(403, 409, 422))  # fmt: skip
    yield Route("GET", item, project.get_project, "Read a project.", "get", name, params=(PRETTY,), answer=Project)
    changing = {"params": (DRY_RUN, *WRITING), "body": Project, "answer": Project, "refusals": (403, 409, 422)}
    yield Route("PUT", item, project.change_project, "Replace a project.", "update", name, **changing)  # type: ignore[arg-type]
    yield Route("PATCH", item, project.change_project, "Change some fields of a project.", "patch", name,
                body_media=project.CHANGES, **changing)  # type: ignore[arg-type]  # fmt: skip
    yield Route("DELETE", item, project.delete_project, "Delete a project with everything in it.", "delete", name,
                params=DELETING, body=DeleteOptions, answer=Project, refusals=(409,))  # fmt: skip
    requests = f"{root_path(PROJECT_API)}/projectrequests"
    yield Route("GET", requests, project.may_request, "Check whether the caller may request projects.", "list",
                "projectrequests")  # fmt: skip
    yield Route("POST", requests, project.request_project, "Create a project from a request.", "create",
                "projectrequests", params=WRITING, body=ProjectRequest, answer=Project, status=201,
                refusals=(403, 409, 422))  # fmt: skip


def _binding_routes() -> Iterator[Route]:
    base, name = f"{root_path(RBAC_API)}/namespaces/{{namespace}}/rolebindings", "rolebindings"
    item = f"{base}/{{name}}"
    yield Route("GET", base, role_binding.list_bindings, "List the role bindings of a namespace.", "list", name,
                params=LISTING, answer=RoleBinding, is_list=True)  # fmt: skip
    yield Route("POST", base, role_binding.create_binding, "Fill a role binding that has no subjects.", "create", name,
                params=WRITING, body=RoleBinding, answer=RoleBinding, status=201,
                refusals=(403, 409, 422))  # fmt: skip
    yield Route(
        "GET", item, role_binding.get_binding, "Read a role binding.", "get", name, params=(PRETTY,), answer=RoleBinding
    )
    changing = {"params": WRITING, "body": RoleBinding, "answer": RoleBinding, "refusals": (403, 409, 422)}
    yield Route("PUT", item, role_binding.change_binding, "Replace the subjects of a role binding.", "update", name,
                **changing)  # type: ignore[arg-type]  # fmt: skip
    yield Route("PATCH", item, role_binding.change_binding, "Change the subjects of a role binding.", "patch", name,
                body_media=role_binding.CHANGES, **changing)  # type: ignore[arg-type]  # fmt: skip
    yield Route("DELETE", item, role_binding.delete_binding, "Remove the subjects of a role binding.", "delete", name,
                body=DeleteOptions, answer=RoleBinding, refusals=(409,))  # fmt: skip


def _mapping_routes() -> Iterator[Route]:
    base, name = f"{root_path(USER_API)}/useridentitymappings", "useridentitymappings"
    item = f"{base}/{{name}}"
    yield Route("POST", base, identity_mapping.create_mapping, "Map an identity to a user.", "create", name,
                params=WRITING, body=UserIdentityMapping, body_media=(JSON,), answer=UserIdentityMapping, status=201,
                refusals=(403, 404, 409, 422))  # fmt: skip
    yield Route("GET", item, identity_mapping.get_mapping, "Read the user of an identity.", "get", name,
                answer=UserIdentityMapping)  # fmt: skip
    yield Route("DELETE", item, identity_mapping.delete_mapping, "Remove the mapping of an identity.", "delete", name,
                body=DeleteOptions)  # fmt: skip
