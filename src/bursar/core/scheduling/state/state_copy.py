"""A copy of the world to try things out in.

It lives only while the world itself stands still. So it shares with it what describes the nodes, and everything that is
replaced and never changed; what decisions move is its own. Copying twenty thousand allocations on five thousand nodes
takes some milliseconds.
"""

from __future__ import annotations

from dataclasses import replace

from bursar.core.scheduling.state.cluster_state import World
from bursar.core.scheduling.state.credit_slow_start import Probes


def twin_of(world: World) -> World:
    """The same world once more. Nodes must not be changed in it; allocations may come, be placed, be told to stop."""
    twins = {id(group): group.copy() for group in world.groups.values()}
    twin = World(
        fleet=replace(world.fleet, now=world.fleet.now.copy()),
        running=world.running.copy(),
        placed=dict(world.placed),
        waiting={uid: twins[id(group)] for uid, group in world.waiting.items()},
        groups={group.key: group for group in twins.values()},
        bands={
            key: replace(one, waiting=dict(one.waiting), placed=set(one.placed)) for key, one in world.bands.items()
        },
        nominated=dict(world.nominated),
        tenants=world.tenants,
        profiles=world.profiles,
        boosts=dict(world.boosts),
        limits=world.limits.copy(),
        habits=world.habits,
        used={tenant: dict(amounts) for tenant, amounts in world.used.items()},
        capacity=world.capacity,
        blocked=dict(world.blocked),
        probes=Probes(dict(world.probes.most)),
        reserved_for=world.reserved_for,
        reservation=world.reservation,
        reserved_at=world.reserved_at,
        reserved_moved=world.reserved_moved,
        uniform=world.uniform,
        moved=world.moved,
        burst=world.burst,
        freed=world.freed,
    )
    twin.tallies = world.tallies.copy(twin.fleet)
    return twin
