"""Queue: where work waits, and by which weights it is ordered."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.kind import Kind, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire

PROFILES = ("default", "hpc", "ml", "service", "sensitive", "interactive")


class QueueSpec(Wire):
    profile: Text = UNSET
    description: Text = UNSET


class Queue(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta
    spec: QueueSpec | UnsetType = UNSET


def _check(queue: Queue) -> list[Cause]:
    profile = queue.spec.profile if isinstance(queue.spec, QueueSpec) else UNSET
    if profile is not UNSET and profile not in PROFILES:
        return [field_fault("spec.profile", f"must be one of {', '.join(PROFILES)}, got {str(profile)[:63]!r}")]
    return []


QUEUE = Kind(
    name="Queue",
    plural="queues",
    type=Queue,
    namespaced=False,
    description="Where work waits, and by which weights it is ordered.",
    short_names=("q",),
    uid_prefix="queue",
    check=_check,
    columns=(column("Profile", "spec.profile", default="default"),),
    # Nobody may submit to it while it is decided whether its profile may change.
    in_tree=True,
)
