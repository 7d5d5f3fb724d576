"""The Python SDK: `Client` and `AsyncClient`, with the same calls.

    with Client() as client:
        client.allocations("ml-team").create({"metadata": {"name": "train"}, "spec": {...}})

Names are imported when first used, so that a program that only handles errors or settings does not load HTTP.
Read `flow.py` first: the logic of each call, without I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bursar.client.aio import AsyncClient, AsyncResource
    from bursar.client.apply import Applied
    from bursar.client.errors import (
        ApiError,
        BursarError,
        ConfigError,
        Conflict,
        ConnectionFailed,
        CreditRefused,
        Forbidden,
        Gone,
        Invalid,
        NotFound,
        QuotaExceeded,
        RateLimited,
        Unauthorized,
        Unavailable,
    )
    from bursar.client.flow import Document, Retries
    from bursar.client.log import LogPiece
    from bursar.client.sync import Client, Resource
    from bursar.client.watch import Event

_HOMES = {
    "aio": ("AsyncClient", "AsyncResource"),
    "errors": (
        "ApiError", "BursarError", "ConfigError", "Conflict", "ConnectionFailed", "CreditRefused", "Forbidden", "Gone",
        "Invalid",
        "NotFound", "QuotaExceeded", "RateLimited", "Unauthorized", "Unavailable",
    ),
    "apply": ("Applied",),
    "flow": ("Document", "Retries"),
    "log": ("LogPiece",),
    "sync": ("Client", "Resource"),
    "watch": ("Event",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ApiError",
    "Applied",
    "AsyncClient",
    "AsyncResource",
    "BursarError",
    "Client",
    "ConfigError",
    "Conflict",
    "ConnectionFailed",
    "CreditRefused",
    "Document",
    "Event",
    "Forbidden",
    "Gone",
    "Invalid",
    "LogPiece",
    "NotFound",
    "QuotaExceeded",
    "RateLimited",
    "Resource",
    "Retries",
    "Unauthorized",
    "Unavailable",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
