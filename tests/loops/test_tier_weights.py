"""Tenants weigh what they say, else what their tier says: also when the tier changes, or they change it."""

from bursar.loops.informer import Informer
from bursar.ops.runtime.runtime import Runtime
from support.runtime.runtime import change, create, delete, tenant
from support.scheduling.schedulers import assert_as_if_loaded, loaded


async def tier(runtime: Runtime, name: str, weight: float) -> None:
    await create(runtime, "Tier", {"metadata": {"name": name}, "spec": {"weight": weight}})


async def weights(runtime: Runtime, informer: Informer) -> dict[str, float]:
    async with runtime.database.reader() as db:
        await informer.catch_up(db)
    await assert_as_if_loaded(runtime, informer)
    return {name: one.weight for name, one in informer.cluster.tenants.items() if name in ("rich", "own", "plain")}


async def test_tenants_weigh_what_their_tier_says_unless_they_say_it_themselves(runtime: Runtime) -> None:
    await tier(runtime, "gold", 10)
    await tier(runtime, "silver", 3)
    await tenant(runtime, "rich", tier="gold")
    await tenant(runtime, "own", tier="gold", weight=2)
    await tenant(runtime, "plain")
    informer = await loaded(runtime)
    assert await weights(runtime, informer) == {"rich": 10, "own": 2, "plain": 1}
    await change(runtime, "Tier", "", "gold", weight=7)
    assert await weights(runtime, informer) == {"rich": 7, "own": 2, "plain": 1}
    await change(runtime, "Tenant", "", "rich", tier="silver")
    await change(runtime, "Tenant", "", "plain", tier="silver")
    assert await weights(runtime, informer) == {"rich": 3, "own": 2, "plain": 3}
    await delete(runtime, "Tenant", "", "plain")
    assert await weights(runtime, informer) == {"rich": 3, "own": 2}
