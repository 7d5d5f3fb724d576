"""Types of every object: metadata, conditions, and the shapes that Kubernetes clients expect around them."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType

from bursar.core.objects.finalizer import faults as finalizer_faults
from bursar.core.values.names import annotations as annotation_faults
from bursar.core.values.names import labels as label_faults
from bursar.core.values.refusal import Cause, field_fault

API_VERSION = "v1"

# Quantities are text, or the numbers that YAML makes of unquoted text.
Quantity: TypeAlias = str | int | float
Text: TypeAlias = str | UnsetType


class Wire(Struct, rename="camel", forbid_unknown_fields=True, omit_defaults=True):
    """Base of wire types. Fields are camelCase; omitted fields stay omitted in responses, so that specs are echoed as
    given."""


class OwnerReference(Wire):
    kind: str
    name: str
    uid: str
    api_version: Text = UNSET
    controller: bool | UnsetType = UNSET
    block_owner_deletion: bool | UnsetType = UNSET


class ObjectMeta(Wire):
    name: Text = UNSET
    generate_name: Text = UNSET
    namespace: Text = UNSET
    uid: Text = UNSET
    resource_version: Text = UNSET
    generation: int | UnsetType = UNSET
    creation_timestamp: Text = UNSET
    deletion_timestamp: Text = UNSET
    deletion_grace_period_seconds: int | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET
    annotations: dict[str, str] | UnsetType = UNSET
    owner_references: list[OwnerReference] | UnsetType = UNSET
    finalizers: list[str] | UnsetType = UNSET
    # Accepted because real clients send them; never stored.
    self_link: Text = UNSET
    managed_fields: list[dict[str, object]] | UnsetType = UNSET


class Condition(Wire):
    type: str
    status: str
    reason: Text = UNSET
    message: Text = UNSET
    last_transition_time: Text = UNSET
    last_heartbeat_time: Text = UNSET
    last_update_time: Text = UNSET
    observed_generation: int | UnsetType = UNSET


class LabelSelectorRequirement(Wire):
    key: str
    operator: str
    values: list[str] | UnsetType = UNSET


class LabelSelector(Wire):
    match_labels: dict[str, str] | UnsetType = UNSET
    match_expressions: list[LabelSelectorRequirement] | UnsetType = UNSET


def given(value: object) -> bool:
    """Whether a field was present in the body."""
    return value is not UNSET and value is not None


def meta_faults(metadata: ObjectMeta) -> list[Cause]:
    """Labels, annotations and finalizers, which every kind has."""
    faults: list[Cause] = []
    if isinstance(metadata.labels, dict):
        faults += [field_fault("metadata.labels", fault) for fault in label_faults(metadata.labels)]
    if isinstance(metadata.annotations, dict):
        faults += [field_fault("metadata.annotations", fault) for fault in annotation_faults(metadata.annotations)]
    if isinstance(metadata.finalizers, list):
        faults += [field_fault("metadata.finalizers", fault) for fault in finalizer_faults(metadata.finalizers)]
    return faults
