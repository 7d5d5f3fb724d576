"""Settings of an OIDC provider, apart from the verification of its tokens, whose libraries are slow to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OidcSettings:
    """OIDC provider settings; `jwks` is the path or URL of the key set, by default the one in the issuer's discovery
    document."""

    issuer: str
    audience: str
    jwks: str = ""
    user_claims: Sequence[str] = ("sub", "preferred_username")
    tenant_claim: str = "bursar_tenant"
    role_claim: str = "bursar_role"
    # Of approvers: the tenants and the gates that they decide for, as lists of names; `*` is every one.
    tenants_claim: str = "bursar_tenants"
    gates_claim: str = "bursar_gates"
    ca_file: str = ""
