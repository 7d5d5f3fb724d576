"""Two tenants and somebody of every role, for tests of who sees and does what."""

from dataclasses import dataclass

from support.api.site import Site, allocation
from support.runtime.runtime import bind


@dataclass(frozen=True, slots=True)
class TwoTenants:
    """Two tenants side by side, one of them with a child, and somebody of every role."""

    physics: str
    optics: str  # below physics
    biology: str
    boss: str  # tenant-admin of physics
    user: str  # of physics
    viewer: str  # of physics
    junior: str  # user of optics
    rival: str  # user of biology
    rival_boss: str
    worker: str  # a node's name
    node: str  # its token
    other_worker: str
    other_node: str


async def assembled(site: Site) -> TwoTenants:
    physics, biology = await site.namespace(name="physics"), await site.namespace(name="biology")
    await site.post("tenants", {"metadata": {"name": "optics"}, "spec": {"parent": "physics"}})
    optics = await site.namespace(tenant="optics", name="optics")
    tokens = {}
    for name in ("worker-1", "worker-2"):
        node = await site.post("nodes", {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "64"}}})
        tokens[name] = node.body["status"]["token"]
    for team in (physics, optics, biology):
        await site.post(f"namespaces/{team}/allocations", allocation(f"{team}-job", cpu=1))
        quota = {"metadata": {"name": "quota"}, "spec": {"hard": {"cpu": "100"}}}
        await site.post(f"namespaces/{team}/resourcequotas", quota)
    await bind(site.context.runtime, "physics", "physics-job", "worker-1")
    await bind(site.context.runtime, "biology", "biology-job", "worker-2")
    return TwoTenants(
        physics,
        optics,
        biology,
        boss=await site.token("tenant-admin", tenant="physics", user="boss"),
        user=await site.token("user", tenant="physics", user="ann"),
        viewer=await site.token("viewer", tenant="physics", user="vic"),
        junior=await site.token("user", tenant="optics", user="jim"),
        rival=await site.token("user", tenant="biology", user="bob"),
        rival_boss=await site.token("tenant-admin", tenant="biology", user="bea"),
        worker="worker-1",
        node=tokens["worker-1"],
        other_worker="worker-2",
        other_node=tokens["worker-2"],
    )
