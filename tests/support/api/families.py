"""Families of tenants with everything that tenants have, each part named by a mark that occurs nowhere else.

A family is a parent, two of its children side by side, and a child of one of them. A mark that is found in an answer or
a row tells whose secret it is.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bursar.commands.command import Written
from bursar.core.values.redaction import LAST_APPLIED
from support.api.site import Document, Reply, Site
from support.runtime.runtime import bind

MARK = re.compile(rb"zq[0-9]{5}z")
FAMILY = "family"  # a label of everything that belongs to one
GPU = "nvidia.com/gpu"
H100 = "h100"


@dataclass(frozen=True, slots=True)
class Mark:
    """The owner of a secret. `user` is the one whose account it is of, empty where it is the tenant's; `nodes` are
    those that it is bound to; `variable` marks values of environment variables."""

    tenant: str = ""
    user: str | None = None
    nodes: tuple[str, ...] = ()
    public: bool = False
    is_tenant: bool = False
    variable: bool = False


class Marks:
    """All marks, by their text; also the ids that the server gave."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.known: dict[str, Mark] = {}

    def new(self, tenant: str = "", **more: Any) -> str:
        text = f"zq{next(self._numbers):05}z"
        self.known[text] = Mark(tenant, **more)
        return text

    def tenant(self) -> str:
        """The name of a tenant, which is its own."""
        text = self.new()
        self.known[text] = Mark(text, is_tenant=True)
        return text

    def in_(self, *texts: bytes) -> set[str]:
        return {found.decode() for text in texts for found in MARK.findall(text)}


@dataclass(slots=True)
class Target:
    """The names of the parts of one tenant, by the kind of part; of a tenant that does not exist, of nothing."""

    tenant: str
    names: dict[str, str]
    tokens: dict[str, str] = field(default_factory=dict)  # by role, of users of this tenant; of its node as `node`

    def plain(self, text: str) -> str:
        """A text with the kind of each part in place of its name, so that it reads alike for two targets."""
        for part, name in sorted(self.names.items(), key=lambda one: -len(one[1])):  # a member's has its tenant's
            text = text.replace(name, f"<{part}>")
        return text


@dataclass(slots=True)
class Family:
    own: Target
    sibling: Target
    child: Target
    parent: Target
    nobody: Target

    @property
    def targets(self) -> Mapping[str, Target]:
        return {"own": self.own, "sibling": self.sibling, "child": self.child, "parent": self.parent,
                "nobody": self.nobody}  # fmt: skip


TOKENS = ("tenant-admin", "user", "viewer")


async def prepare(site: Site) -> None:
    """Give the system all that families need: prices, and nodes that may be claimed."""
    _done(await site.post("prices", {"resource": GPU, "class": H100, "per_second": "0.01"}))
    _done(await site.post("prices", {"resource": "cpu", "per_second": "0.001"}))
    _done(await site.patch("settings/system", {"spec": {"limits": {"sensitive_pool_size": "1000"}}}))


async def founded(site: Site, fingerprints: Marks) -> Family:
    """A family of four tenants, and the names that nobody has."""
    label = fingerprints.new(public=True)
    parent = await _settled(site, fingerprints, label, "")
    own, sibling = await asyncio.gather(*(_settled(site, fingerprints, label, parent.tenant) for _ in range(2)))
    child = await _settled(site, fingerprints, label, own.tenant)
    return Family(own, sibling, child, parent, absent(fingerprints))


def absent(fingerprints: Marks) -> Target:
    """Names as tenants have them, of things that do not exist."""
    tenant = fingerprints.tenant()
    parts = (*_NAMES, "allocation", "pending", "job", "user", "family")
    names = {part: fingerprints.new(tenant, public=part in PUBLIC) for part in parts}
    ids = {"token": "0123456789ab", "lease": "lease-4711000"}
    ids |= {"account": f"account={tenant}/{names['user']}", "member": f"{tenant}.{fingerprints.new(tenant)}"}
    ids["identity"] = f"campus:{fingerprints.new(tenant)}"
    fingerprints.known |= {one: Mark(tenant) for one in ids.values()}
    ids["binding"] = BINDING
    return Target(tenant, {"tenant": tenant, **names, **ids})


# Parts that have a name of their own and no content.
_NAMES = ("namespace", "resourcequota", "resourceclaim", "quotarequest", "node", "claimed", "queue", "priorityclass",
          "tier", "webhook", "leased", "colleague", "limitrange", "registered", "group")  # fmt: skip
BINDING = "edit"  # every namespace has this role binding
# Parts that everybody sees.
PUBLIC = frozenset({"node", "claimed", "queue", "priorityclass", "tier"})


async def _settled(site: Site, fingerprints: Marks, family: str, parent: str) -> Target:
    """One tenant with everything."""
    tenant = fingerprints.tenant()

    def own(**more: Any) -> str:
        return fingerprints.new(tenant, **more)

    names = {part: own(public=part in PUBLIC) for part in _NAMES}
    names |= {"tenant": tenant, "family": family}
    fingerprints.known[names["webhook"]] = Mark()
    fingerprints.known[names["colleague"]] = Mark(tenant, user=names["colleague"])
    bound = (names["node"],)
    fingerprints.known[tenant] = Mark(tenant, nodes=bound, is_tenant=True)
    names |= {"allocation": own(nodes=bound), "pending": own(), "job": own(), "user": own(nodes=bound)}
    fingerprints.known[names["namespace"]] = Mark(tenant, nodes=bound)

    def meta(name: str, **more: Any) -> Document:
        note = "public" if fingerprints.known[name].public else own(**more)
        return {"name": name, "labels": {FAMILY: family}, "annotations": {"note": note}}

    policy = {"gates": ["manual"], "kinds": ["ResourceClaim"]}
    spec = {"displayName": own(), "approval": policy, "limits": {"seats": 1}, **({"parent": parent} if parent else {})}
    _done(await site.post("tenants", {"metadata": meta(tenant), "spec": spec}))
    space = meta(names["namespace"])
    space["labels"]["bursar.io/tenant"] = tenant
    _done(await site.post("namespaces", {"metadata": space}))
    tokens = {"user": await _token(site, names, "user", tenant=tenant, user=names["user"])}
    fingerprints.known[names["token"]] = Mark(tenant)
    for role in TOKENS:
        if role != "user":
            tokens[role] = await site.token(role, tenant=tenant, user=own())
    tokens["node"] = await _furnish_nodes(site, names, tokens["user"], own(), meta)
    await _furnish_catalogue(site, names, meta)
    await _furnish_work(site, fingerprints, names, tokens, meta)
    await _furnish_money(site, fingerprints, names, tokens["user"])
    quota = {"metadata": meta(names["resourcequota"]), "spec": {"hard": {"cpu": "100"}}}
    _done(await site.post(f"namespaces/{names['namespace']}/resourcequotas", quota))
    claimed = {"metadata": meta(names["resourceclaim"]), "spec": {"resources": {"clusters": 1}}}
    _done(await site.post(f"namespaces/{names['namespace']}/resourceclaims", claimed, token=tokens["user"]))
    user = own()
    names["member"] = f"{tenant}.{user}"
    fingerprints.known[names["member"]] = Mark(tenant)
    member = {"metadata": meta(names["member"]), "spec": {"tenant": tenant, "user": user, "role": "viewer"}}
    _done(await site.post("members", member))
    await _register(site, fingerprints, names, meta)
    url = f"https://hooks.example/{fingerprints.new()}"
    _done(await site.post("webhooks", {"name": names["webhook"], "url": url, "tenant": tenant}))
    return Target(tenant, names, tokens)


async def _register(site: Site, fingerprints: Marks, names: dict[str, str], meta: Any) -> None:
    """All that a portal keeps in its tenant, and the limits of a namespace."""
    tenant, user = names["tenant"], fingerprints.new(names["tenant"])
    names |= {"identity": f"campus:{user}", "binding": BINDING}
    fingerprints.known[names["identity"]] = Mark(tenant)

    def owned(name: str) -> Document:
        one: Document = meta(name)
        one["labels"]["bursar.io/tenant"] = tenant
        return one

    limits = {"metadata": meta(names["limitrange"]), "spec": {"limits": []}}
    _done(await site.post(f"namespaces/{names['namespace']}/limitranges", limits))
    api = "/apis/user.openshift.io/v1"
    _done(await site.post(f"{api}/users", {"metadata": owned(names["registered"]), "fullName": names["registered"]}))
    _done(await site.post(f"{api}/groups", {"metadata": owned(names["group"]), "users": [names["registered"]]}))
    identity = {"metadata": owned(names["identity"]), "providerName": "campus", "providerUserName": user}
    _done(await site.post(f"{api}/identities", identity))
    mapping = {"identity": {"name": names["identity"]}, "user": {"name": names["registered"]}}
    _done(await site.post(f"{api}/useridentitymappings", mapping))


async def _token(site: Site, names: dict[str, str], role: str, **whose: str) -> str:
    made = _done(await site.post("tokens", {"role": role, **whose}))
    names["token"] = made["metadata"]["name"]
    return str(made["status"]["token"])


async def _furnish_nodes(site: Site, names: Mapping[str, str], token: str, reason: str, meta: Any) -> str:
    """A node for its work, whose token is returned, and one that its user has claimed."""
    capacity = {"capacity": {"cpu": "64", "memory": "512Gi", GPU: "8"}}
    made = _done(await site.post("nodes", {"metadata": meta(names["node"]), "spec": capacity}))
    _done(await site.post("nodes", {"metadata": meta(names["claimed"]), "spec": capacity}))
    _done(await site.post(f"nodes/{names['claimed']}/claim", {"reason": reason}, token=token))
    return str(made["status"]["token"])


async def _furnish_catalogue(site: Site, names: Mapping[str, str], meta: Any) -> None:
    _done(await site.post("tiers", {"metadata": meta(names["tier"]), "spec": {}}))
    _done(await site.post("queues", {"metadata": meta(names["queue"]), "spec": {}}))
    _done(await site.post("priorityclasses", {"metadata": meta(names["priorityclass"]), "value": 7}))


async def _furnish_work(
    site: Site, fingerprints: Marks, names: Mapping[str, str], tokens: Mapping[str, str], meta: Any
) -> None:
    """Work that runs, work that waits, and a job; passwords in their environments, as `kubectl apply` sends them."""
    tenant, space = names["tenant"], names["namespace"]
    for part, requests in (("allocation", {"cpu": "1"}), ("pending", {"cpu": "2"})):
        more = {"nodes": (names["node"],)} if part == "allocation" else {}
        env = {"PASSWORD": fingerprints.new(tenant, variable=True, **more)}
        spec = {
            "resources": {"requests": requests}, "env": env, "command": ["train", fingerprints.new(tenant, **more)],
            "stdin": True,
        }  # fmt: skip
        body = {"metadata": meta(names[part], **more), "spec": spec}
        body["metadata"]["annotations"][LAST_APPLIED] = json.dumps(body)
        _done(await site.post(f"namespaces/{space}/allocations", body, token=tokens["user"]))
    placed = await bind(site.context.runtime, space, names["allocation"], names["node"])
    assert isinstance(placed, Written), placed
    where = f"namespaces/{space}/allocations/{names['allocation']}/status"
    _done(await site.patch(where, {"status": {"phase": "Running"}}, token=tokens["node"]))
    listed = [{"name": "PASSWORD", "value": fingerprints.new(tenant, variable=True)}]
    template = {"resources": {"requests": {"cpu": "1"}}, "env": listed, "command": ["train", fingerprints.new(tenant)]}
    job = {"metadata": meta(names["job"]), "spec": {"completions": 1, "template": {"spec": template}}}
    job["metadata"]["annotations"][LAST_APPLIED] = json.dumps(job)
    _done(await site.post(f"namespaces/{space}/jobs", job, token=tokens["user"]))
    request = {"metadata": meta(names["quotarequest"]), "spec": {"limits": {"seats": 2}}}
    _done(await site.post(f"namespaces/{space}/quotarequests", request, token=tokens["tenant-admin"]))


async def _furnish_money(site: Site, fingerprints: Marks, names: dict[str, str], token: str) -> None:
    """Credit of the tenant, of its user and of a colleague, and a lease."""
    tenant, user, colleague = names["tenant"], names["user"], names["colleague"]
    for owner in ("", user, colleague):
        account = f"{tenant}/{owner}" if owner else tenant
        reason = fingerprints.new(tenant, user=owner)
        if owner:
            _done(await site.post("accounts", {"tenant": tenant, "user": owner, "request_id": f"{account}-open"}))
        body = {"amount": "1000", "account": account, "reason": reason, "request_id": f"{account}-topup"}
        _done(await site.post("topups", body))
    fingerprints.known[names["leased"]] = Mark(tenant, user=user)
    lease = {"job_id": names["leased"], "gpu_type": H100, "gpu_count": 1, "window_seconds": 3600}
    made = _done(await site.post("leases", {**lease, "request_id": f"{user}-lease"}, token=token))
    names["lease"] = str(made["lease_id"])
    names["account"] = f"account={tenant}/{user}"  # as queries name it
    fingerprints.known |= {names[part]: Mark(tenant, user=user) for part in ("lease", "account")}


def _done(reply: Reply) -> Document:
    assert reply.status in (200, 201, 202), reply
    body: Document = reply.body
    return body
