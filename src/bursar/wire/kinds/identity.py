"""Identity: the account of a person at an identity provider, mapped to a User."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from bursar.core.values.names import path_segment
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.kinds.namespace import adopt_by_label, keep_label, tenant_of
from bursar.wire.kinds.user import REGISTER_ACCESS, USER_API
from bursar.wire.shared.kind import Fields, Kind, column
from bursar.wire.shared.meta import ObjectMeta, Text, Wire

MAPPED_FIELD = "user.name"  # the field that selects identities by the user that they are mapped to


class UserReference(Wire):
    name: str
    uid: Text = UNSET
    kind: Text = UNSET
    namespace: Text = UNSET
    api_version: Text = UNSET


class ProviderIdentity(Wire, kw_only=True):
    api_version: Text = UNSET
    kind: Text = UNSET
    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    provider_name: str
    provider_user_name: str
    user: UserReference | UnsetType = UNSET
    extra: dict[str, str] | UnsetType = UNSET


def mapped_user(identity: ProviderIdentity) -> str:
    """The name of the user that the identity is mapped to; empty if there is none."""
    return identity.user.name if isinstance(identity.user, UserReference) else ""


def _name(identity: ProviderIdentity) -> str:
    return f"{identity.provider_name}:{identity.provider_user_name}"


def _check(identity: ProviderIdentity) -> list[Cause]:
    faults = []
    if not identity.provider_name or ":" in identity.provider_name:
        faults.append(field_fault("providerName", "is required, and must not contain a colon"))
    if not identity.provider_user_name:
        faults.append(field_fault("providerUserName", "is required"))
    if not faults and identity.metadata.name != _name(identity):
        rule = f"must be {_name(identity)[:253]}, by providerName and providerUserName: leave it out of a new identity"
        faults.append(field_fault("metadata.name", rule))
    return faults


def _fields(identity: ProviderIdentity) -> Fields:
    return {
        "providerName": identity.provider_name,
        "providerUserName": identity.provider_user_name,
        MAPPED_FIELD: mapped_user(identity),
    }


IDENTITY = Kind(
    name="Identity",
    plural="identities",
    type=ProviderIdentity,
    namespaced=False,
    description="The account of a person at an identity provider, mapped to a user.",
    api_version=USER_API,
    uid_prefix="identity",
    access=REGISTER_ACCESS,
    check=_check,
    selectable=("providerName", "providerUserName", MAPPED_FIELD),
    fields=_fields,
    columns=(
        column("Idp Name", "providerName"),
        column("Idp User Name", "providerUserName"),
        column("User Name", MAPPED_FIELD),
    ),
    owner=tenant_of,
    adopt=adopt_by_label,
    keep=keep_label,
    derived_name=_name,
    name_faults=path_segment,
    ends_with_tenant=True,
    words={
        "ProviderIdentity.providerName": "The identity provider.",
        "ProviderIdentity.providerUserName": "The name of the account there.",
        "ProviderIdentity.user": "The user that it is mapped to.",
    },
    example={
        "metadata": {"name": "campus:ann@example.org"},
        "providerName": "campus",
        "providerUserName": "ann@example.org",
    },
)
