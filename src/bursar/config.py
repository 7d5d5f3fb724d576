"""Settings, read once: flags first, then the environment, then the defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bursar.api.oidc import OidcSettings
from bursar.api.ratelimit import LIMIT_PER_MINUTE_DEFAULT
from bursar.core.address import is_loopback_host


class ConfigError(Exception):
    """A setting that cannot be used; the message says which, and what would do."""


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
class Settings:
    """What a server process needs to know."""

    http: Address
    grpc: Address | None = None
    database_url: str = ""
    redis_url: str = ""
    admin_token_file: Path | None = None
    show_token: bool = False
    workers: int = 1
    requests_per_minute: int = LIMIT_PER_MINUTE_DEFAULT
    tls_cert: Path | None = None
    tls_key: Path | None = None
    oidc: OidcSettings | None = None
    grpc_advertise: Address | None = None
    grpc_hosts: tuple[str, ...] = ()
    grpc_insecure: bool = False  # no certificates, on loopback only

    @property
    def grpc_address(self) -> str:
        """Where agents are told to call; empty where that is not known."""
        return str(self.grpc_advertise or self.grpc or "")

    @property
    def grpc_names(self) -> tuple[str, ...]:
        """The hosts that agents may call gRPC by."""
        named = (one.host for one in (self.grpc, self.grpc_advertise) if one is not None)
        return (*named, *self.grpc_hosts)


def oidc_from_environment() -> OidcSettings | None:
    issuer = os.environ.get("BURSAR_OIDC_ISSUER", "")
    if not issuer:
        return None
    audience = os.environ.get("BURSAR_OIDC_AUDIENCE", "")
    if not audience:
        raise ConfigError("BURSAR_OIDC_ISSUER needs BURSAR_OIDC_AUDIENCE: tokens meant for others must not work here")
    return OidcSettings(
        issuer=issuer,
        audience=audience,
        jwks=os.environ.get("BURSAR_OIDC_JWKS", ""),
        ca_file=os.environ.get("BURSAR_OIDC_CA_FILE", ""),
    )


def requests_per_minute_from_environment() -> int:
    text = os.environ.get("BURSAR_REQUESTS_PER_MINUTE", "")
    if not text:
        return LIMIT_PER_MINUTE_DEFAULT
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigError(f"BURSAR_REQUESTS_PER_MINUTE must be a number from 1 on, got {text!r}")
    return int(text)


def with_password_hidden(url: str) -> str:
    """A database URL fit for logs."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, _, credentials = head.partition("://")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{tail}"
