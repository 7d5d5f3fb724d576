"""A portal that administers projects: a service whose token names a tenant, and its requests in OpenShift's API."""

from dataclasses import dataclass
from typing import Any

from support.api.site import STRATEGIC, Document, Reply, Site

PROJECTS = "/apis/project.openshift.io/v1/projects"
REQUESTS = "/apis/project.openshift.io/v1/projectrequests"
USERS = "/apis/user.openshift.io/v1/users"
IDENTITIES = "/apis/user.openshift.io/v1/identities"
MAPPINGS = "/apis/user.openshift.io/v1/useridentitymappings"
GROUPS = "/apis/user.openshift.io/v1/groups"


def bindings(project: str) -> str:
    return f"/apis/rbac.authorization.k8s.io/v1/namespaces/{project}/rolebindings"


def binding(role: str, *users: str) -> Document:
    subjects = [{"kind": "User", "name": user} for user in users]
    return {"metadata": {"name": role}, "subjects": subjects, "roleRef": {"name": role, "kind": "ClusterRole"}}


@dataclass(slots=True)
class Portal:
    site: Site
    tenant: str
    token: str

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.site.ask(method, path, body, token=self.token, **options)

    async def project(self, name: str = "", **metadata: Any) -> str:
        name = name or self.site.name("project")
        reply = await self.ask("POST", PROJECTS, {"metadata": {"name": name, **metadata}})
        assert reply.status == 201, reply
        return name

    async def bind(self, project: str, role: str, *users: str) -> Reply:
        """Patch a binding with the whole object, as the portal read it."""
        current = (await self.ask("GET", f"{bindings(project)}/{role}")).body
        subjects = [{"kind": "User", "name": user} for user in users]
        return await self.ask(
            "PATCH", f"{bindings(project)}/{role}", {**current, "subjects": subjects}, media=STRATEGIC
        )

    async def subjects(self, project: str, role: str) -> list[str]:
        reply = await self.ask("GET", f"{bindings(project)}/{role}")
        assert reply.status == 200, reply
        return [one["name"] for one in reply.body["subjects"]]


async def portal(site: Site, tenant: str = "") -> Portal:
    """A portal with a tenant of its own."""
    tenant = tenant or site.name("portal")
    reply = await site.post("tenants", {"metadata": {"name": tenant}, "spec": {}})
    assert reply.status == 201, reply
    return Portal(site, tenant, await site.token("service", user=tenant, tenants=[tenant]))
