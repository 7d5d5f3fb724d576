"""The settings of a server process, read once: from flags, else the environment, else defaults."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from bursar.api.http.oidc_settings import OidcSettings
from bursar.api.http.ratelimit import LIMIT_PER_MINUTE_DEFAULT, SERVICE_LIMIT_PER_MINUTE_DEFAULT
from bursar.core.values.address import is_loopback_host

CONNECTIONS_MAX = 20_000
CONNECTIONS_PER_ADDRESS_MAX = 512


class ConfigError(Exception):
    """A setting is invalid; the message names it and a valid value."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return is_loopback_host(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, what: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{what} must be HOST:PORT, as in 127.0.0.1:8080, got {text!r}")
    return Address(host.strip("[]"), int(port))


@dataclass(frozen=True, slots=True)
class WaldurSettings:
    """Settings of Waldur, from which remaining budgets are read. A component has a type, and the hours of one unit."""

    url: str
    token_file: Path
    offerings: tuple[UUID, ...]
    gpu_hours: tuple[str, float]
    node_hours: tuple[str, float]
    ca_file: Path | None
    poll_seconds: float


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server process."""

    http: Address
    grpc: Address | None = None
    database_url: str = ""
    redis_url: str = ""
    admin_token_file: Path | None = None
    show_token: bool = False
    workers: int = 1
    quota_service: bool = False
    user: str = ""  # the user of the child processes if root starts the server; empty: `bursar`
    restored: bool = False  # the database was restored from a backup
    requests_per_minute: int = LIMIT_PER_MINUTE_DEFAULT
    service_requests_per_minute: int = SERVICE_LIMIT_PER_MINUTE_DEFAULT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    oidc: OidcSettings | None = None
    grpc_advertise: Address | None = None
    grpc_hosts: tuple[str, ...] = ()
    grpc_insecure: bool = False  # no certificates, on loopback only
    grpc_shared: bool = False  # other processes serve at the same address
    metrics: Address | None = None  # serves /metrics without a token
    grpc_admin: Address | None = None  # serves AdminService
    waldur: WaldurSettings | None = None
    connections: int = CONNECTIONS_MAX
    connections_per_address: int = CONNECTIONS_PER_ADDRESS_MAX

    @property
    def grpc_address(self) -> str:
        """The address that agents are given; empty if unknown."""
        return str(self.grpc_advertise or self.grpc or "")

    @property
    def grpc_names(self) -> tuple[str, ...]:
        """The host names of the gRPC server certificate."""
        named = (one.host for one in (self.grpc, self.grpc_advertise) if one is not None)
        return (*named, *self.grpc_hosts)


def oidc_from_environment() -> OidcSettings | None:
    issuer = os.environ.get("BURSAR_OIDC_ISSUER", "")
    if not issuer:
        return None
    audience = os.environ.get("BURSAR_OIDC_AUDIENCE", "")
    if not audience:
        raise ConfigError("BURSAR_OIDC_ISSUER needs BURSAR_OIDC_AUDIENCE: tokens for other services must not work here")
    usual = OidcSettings(issuer, audience)
    user_claim = os.environ.get("BURSAR_OIDC_USER_CLAIM", "")
    return OidcSettings(
        issuer=issuer,
        audience=audience,
        jwks=os.environ.get("BURSAR_OIDC_JWKS", ""),
        ca_file=os.environ.get("BURSAR_OIDC_CA_FILE", ""),
        user_claims=(user_claim,) if user_claim else usual.user_claims,
        role_claim=os.environ.get("BURSAR_OIDC_ROLE_CLAIM") or usual.role_claim,
        tenant_claim=os.environ.get("BURSAR_OIDC_TENANT_CLAIM") or usual.tenant_claim,
        tenants_claim=os.environ.get("BURSAR_OIDC_TENANTS_CLAIM") or usual.tenants_claim,
        gates_claim=os.environ.get("BURSAR_OIDC_GATES_CLAIM") or usual.gates_claim,
    )


def requests_per_minute_from_environment() -> int:
    return _per_minute("BURSAR_REQUESTS_PER_MINUTE", LIMIT_PER_MINUTE_DEFAULT)


def service_requests_per_minute_from_environment() -> int:
    return _per_minute("BURSAR_SERVICE_REQUESTS_PER_MINUTE", SERVICE_LIMIT_PER_MINUTE_DEFAULT)


def _per_minute(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"{name} must be a number of at least 1, got {text!r}")
    return int(text)


def waldur_from_environment() -> WaldurSettings | None:
    url = os.environ.get("BURSAR_WALDUR_URL", "").rstrip("/").removesuffix("/api")
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"BURSAR_WALDUR_URL must be a URL such as https://waldur.example.com, got {url!r}")
    if parts.scheme == "http" and not is_loopback_host(parts.hostname):
        raise ConfigError("BURSAR_WALDUR_URL must use https: its token could be read on the wire")
    token_file, offerings = os.environ.get("BURSAR_WALDUR_TOKEN_FILE"), os.environ.get("BURSAR_WALDUR_OFFERINGS")
    if not token_file or not offerings:
        raise ConfigError("BURSAR_WALDUR_URL needs BURSAR_WALDUR_TOKEN_FILE and BURSAR_WALDUR_OFFERINGS (uuid,uuid…)")
    ca_file = os.environ.get("BURSAR_WALDUR_CA_FILE")
    return WaldurSettings(
        url=url,
        token_file=Path(token_file),
        offerings=tuple(_offering(one.strip()) for one in offerings.split(",") if one.strip()),
        gpu_hours=_component("BURSAR_WALDUR_GPU_HOURS", "gpu_hours"),
        node_hours=_component("BURSAR_WALDUR_NODE_HOURS", "node_hours"),
        ca_file=Path(ca_file) if ca_file else None,
        poll_seconds=_positive("BURSAR_WALDUR_POLL_SECONDS", os.environ.get("BURSAR_WALDUR_POLL_SECONDS") or "20"),
    )


def _offering(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigError(f"BURSAR_WALDUR_OFFERINGS must be the offerings' UUIDs, got {text!r}") from None


def _component(variable: str, default: str) -> tuple[str, float]:
    """`gpu_hours`, or `gpu_khours:1000` if one unit of the component is a thousand hours."""
    type_, colon, hours = (os.environ.get(variable) or default).partition(":")
    return type_, _positive(variable, hours) if colon else 1.0


def _positive(variable: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{variable} must be a number above 0, got {text!r}")
    return number


def with_password_hidden(url: str) -> str:
    """A database URL without its password, for logs."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, _, credentials = head.partition("://")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{tail}"
