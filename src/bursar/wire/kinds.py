"""All kinds, in the order in which the API lists them."""

from __future__ import annotations

from bursar.wire.allocation import ALLOCATION
from bursar.wire.job import JOB
from bursar.wire.kind import Kind
from bursar.wire.namespace import NAMESPACE
from bursar.wire.node import NODE
from bursar.wire.priorityclass import PRIORITY_CLASS
from bursar.wire.queue import QUEUE
from bursar.wire.resourcequota import RESOURCE_QUOTA
from bursar.wire.settings import SETTINGS
from bursar.wire.tenant import TENANT
from bursar.wire.tier import TIER

KINDS: tuple[Kind, ...] = (
    ALLOCATION,
    JOB,
    NAMESPACE,
    NODE,
    PRIORITY_CLASS,
    QUEUE,
    RESOURCE_QUOTA,
    SETTINGS,
    TENANT,
    TIER,
)

BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}
BY_PLURAL: dict[str, Kind] = {kind.plural: kind for kind in KINDS}
