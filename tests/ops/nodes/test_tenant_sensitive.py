"""A tenant that may not hold sensitive nodes: its users claim none, and keep those that they had."""

from typing import Any

from bursar.core.objects.object import Origin
from bursar.core.values.access import Reach
from bursar.ops.nodes.claim import claim_node
from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import change, code, node, refusal, tenant
from support.scheduling.schedulers import edit

ALL = Reach(everything=True)


async def test_users_of_a_tenant_that_may_not_claim_nodes_are_refused(runtime: Runtime) -> None:
    assert code(await tenant(runtime, "physics", sensitive=False)) == "ok"
    assert code(await node(runtime, "n1", gpu=1)) == "ok"

    def pool(document: dict[str, Any]) -> None:
        document["spec"] = {"limits": {"sensitive_pool_size": 1}}

    assert code(await edit(runtime, "Settings", "", "system", pool)) == "ok"
    origin = Origin("user:physics/ann", "claim")
    refused = refusal(await claim_node(runtime, "n1", origin, ALL, tenant="physics", user="ann"))
    assert (refused.code, refused.message) == ("forbidden", 'users of tenant "physics" may not claim nodes')
    assert refused.hint == "Ask a system admin: bursar admin tenant update physics --sensitive"
    assert code(await change(runtime, "Tenant", "", "physics", sensitive=True)) == "ok"
    assert code(await claim_node(runtime, "n1", origin, ALL, tenant="physics", user="ann")) == "ok"
    assert code(await change(runtime, "Tenant", "", "physics", sensitive=False)) == "ok"
    # It is theirs already.
    assert code(await claim_node(runtime, "n1", origin, ALL, tenant="physics", user="ann")) == "ok"
