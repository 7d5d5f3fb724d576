"""All kinds, in the order in which the API lists them."""

from __future__ import annotations

from bursar.wire.kinds.allocation import ALLOCATION
from bursar.wire.kinds.job import JOB
from bursar.wire.kinds.namespace import NAMESPACE
from bursar.wire.kinds.node import NODE
from bursar.wire.kinds.priorityclass import PRIORITY_CLASS
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.kinds.resourcequota import RESOURCE_QUOTA
from bursar.wire.kinds.settings import SETTINGS
from bursar.wire.kinds.tenant import TENANT
from bursar.wire.kinds.tier import TIER
from bursar.wire.shared.kind import Kind

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
