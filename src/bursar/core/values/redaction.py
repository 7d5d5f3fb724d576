"""Redaction: an object without the values of its environment variables, for whoever does not read the object itself.

Passwords and keys reach commands through their environment. The object shows them, to its own tenant; events, audit,
exports, webhooks and other views of it name the variables and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

HIDDEN: Final = "(hidden)"
# The annotation in which `kubectl apply` keeps the whole manifest, environment included.
LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

_ENVIRONMENT: Final = "env"


def redacted(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a document, or of a part of one, that names environment variables and holds none of their values."""
    return {name: _redacted(name, value) for name, value in document.items() if name != LAST_APPLIED}


def in_environment(path: Sequence[str | int]) -> bool:
    """Whether a path of a document leads to environment variables, as spec.env[0].value does."""
    return _ENVIRONMENT in path


def variable_name(text: str) -> str:
    """The name alone, where somebody wrote NAME=VALUE for it."""
    return text.partition("=")[0]


def _redacted(name: str, value: Any) -> Any:
    # A label may be called so as well; its value is plain text.
    if name == _ENVIRONMENT and isinstance(value, Mapping):
        return {variable_name(one): HIDDEN for one in value}
    if name == _ENVIRONMENT and isinstance(value, list):
        return [_variable(one) for one in value]
    if isinstance(value, Mapping):
        return redacted(value)
    return [_redacted("", one) for one in value] if isinstance(value, list) else value


def _variable(one: Any) -> Any:
    return {**one, "value": HIDDEN} if isinstance(one, Mapping) else HIDDEN
