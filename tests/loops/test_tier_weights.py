"""Tenants weigh what they say, else what their tier says: also when the tier changes, or they change it."""

from bursar.loops.informer import Keeper
from bursar.ops.runtime.runtime import Office
from support.runtime.runtime import change, create, delete, tenant
from support.scheduling.schedulers import assert_as_if_loaded, loaded


async def tier(office: Office, name: str, weight: float) -> None:
    await create(office, "Tier", {"metadata": {"name": name}, "spec": {"weight": weight}})


async def weights(office: Office, keeper: Keeper) -> dict[str, float]:
    async with office.database.reader() as db:
        await keeper.catch_up(db)
    await assert_as_if_loaded(office, keeper)
    return {name: one.weight for name, one in keeper.world.tenants.items() if name in ("rich", "own", "plain")}


async def test_tenants_weigh_what_their_tier_says_unless_they_say_it_themselves(office: Office) -> None:
    await tier(office, "gold", 10)
    await tier(office, "silver", 3)
    await tenant(office, "rich", tier="gold")
    await tenant(office, "own", tier="gold", weight=2)
    await tenant(office, "plain")
    keeper = await loaded(office)
    assert await weights(office, keeper) == {"rich": 10, "own": 2, "plain": 1}
    await change(office, "Tier", "", "gold", weight=7)
    assert await weights(office, keeper) == {"rich": 7, "own": 2, "plain": 1}
    await change(office, "Tenant", "", "rich", tier="silver")
    await change(office, "Tenant", "", "plain", tier="silver")
    assert await weights(office, keeper) == {"rich": 3, "own": 2, "plain": 3}
    await delete(office, "Tenant", "", "plain")
    assert await weights(office, keeper) == {"rich": 3, "own": 2}
