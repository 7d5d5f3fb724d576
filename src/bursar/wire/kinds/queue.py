"""Queue: an ordered list of pending work; its profile sets the weights of the priority score."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from bursar.core.values.access import AccessGroup, KindAccess
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
    description="An ordered list of pending work with its own priority weights.",
    short_names=("q",),
    uid_prefix="queue",
    access=KindAccess(AccessGroup.CATALOGUE),
    check=_check,
    columns=(column("Profile", "spec.profile", default="default"),),
    # Locked against submissions while a change of its profile is decided.
    in_tree=True,
    only_named=True,
)
