"""Redaction: copies of objects without the values of their environment variables.

Passwords and keys reach commands through their environment. The object itself shows them to its own tenant; events, the
audit log, exports, webhooks and other views show the names of the variables only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

HIDDEN: Final = "(hidden)"
# The annotation in which `kubectl apply` keeps the whole manifest, environment included.
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

_ENVIRONMENT: Final = "env"


def redacted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a document, or a part of one, without the values of environment variables."""
    return {name: _redacted(name, value) for name, value in document.items() if name != LAST_APPLIED}


def in_environment(path: Sequence[str | int]) -> bool:
    """Whether a path in a document leads to environment variables, such as spec.env[0].value."""
    return _ENVIRONMENT in path


def variable_name(text: str) -> str:
    """The name of a variable, also from the form NAME=VALUE."""
    return text.partition("=")[0]


def _redacted(name: str, value: Any) -> Any:
    # A label may also be named `env`; its value is plain text.
    if name == _ENVIRONMENT and isinstance(value, Mapping):
        return {variable_name(one): HIDDEN for one in value}
    if name == _ENVIRONMENT and isinstance(value, list):
        return [_variable(one) for one in value]
    if isinstance(value, Mapping):
        return redacted(value)
    return [_redacted("", one) for one in value] if isinstance(value, list) else value


def _variable(one: Any) -> Any:
    return {**one, "value": HIDDEN} if isinstance(one, Mapping) else HIDDEN
