"""Contexts: the server and token to use, from arguments, the environment, or the configuration file.

A context's token is sent to that context's URL only, so that another BURSAR_URL does not receive the token of the last
login.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bursar.client.errors import ConfigError
from bursar.core.values.address import is_loopback_host

URL = "BURSAR_URL"
TOKEN = "BURSAR_TOKEN"  # noqa: S105 - the variable's name
CA_FILE = "BURSAR_CA_FILE"
TENANT = "BURSAR_TENANT"
CONFIG = "BURSAR_CONFIG"
DEFAULT_URL = "http://127.0.0.1:8080"

_FILE_FIELDS = {"url": "url", "token": "token", "ca-file": "ca_file", "namespace": "namespace", "tenant": "tenant"}


@dataclass(frozen=True, slots=True)
class Context:
    """A server with its token, CA and namespace, and the tenant that requests name, for members of several. A context
    without a name is not from the file."""

    url: str
    token: str = field(default="", repr=False)
    ca_file: str = ""
    namespace: str = ""
    name: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The contents of the configuration file."""

    current: str = ""
    known: Mapping[str, Context] = field(default_factory=dict)


def resolve(
    *,
    url: str | None = None,
    token: str | None = None,
    ca_file: str | None = None,
    context: str | None = None,
    tenant: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Context:
    """The server to use: arguments override the environment, and it overrides the current context."""
    given_url = url or ("" if context else environment.get(URL, ""))
    stored = _stored(context, given_url, environment)
    return Context(
        url=(given_url or (stored.url if stored else DEFAULT_URL)).rstrip("/"),
        token=token or ("" if context else environment.get(TOKEN, "")) or (stored.token if stored else ""),
        ca_file=ca_file or environment.get(CA_FILE, "") or (stored.ca_file if stored else ""),
        namespace=stored.namespace if stored else "",
        name=stored.name if stored else "",
        tenant=tenant or ("" if context else environment.get(TENANT, "")) or (stored.tenant if stored else ""),
    )


def _stored(name: str | None, url: str, environment: Mapping[str, str]) -> Context | None:
    """The stored context: the given one, else the current one unless the URL differs from its own."""
    contexts = load(config_path(environment))
    if name:
        if name not in contexts.known:
            known = ", ".join(sorted(contexts.known)) or "none yet"
            raise ConfigError(f'context "{name}" not found', f"known contexts: {known}; `bursar login` adds one")
        stored = contexts.known[name]
        if url and url.rstrip("/") != stored.url:
            raise ConfigError(f'context "{name}" is for {stored.url}, not {url}', "give a context or a URL, not both")
        return stored
    current = contexts.known.get(contexts.current)
    return current if current and url.rstrip("/") in ("", current.url) else None


def is_loopback(url: str) -> bool:
    """Whether a URL is a loopback address."""
    return is_loopback_host(urlsplit(url).hostname or "")


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    if given := environment.get(CONFIG):
        return Path(given).expanduser()
    home = environment.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "bursar" / "config.yaml"


def load(path: Path) -> Contexts:
    """The file's contexts; none if there is no file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", f"{CONFIG} may set another path") from None
    return _parse(path, text)


def save(path: Path, contexts: Contexts) -> None:
    """Replace the file atomically, with mode 0600, because it holds tokens."""
    import yaml

    document = {
        "current-context": contexts.current,
        "contexts": {name: _shown(context) for name, context in sorted(contexts.known.items())},
    }
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Made with mode 0600 by mkstemp.
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            yaml.safe_dump(document, file, sort_keys=False)
        Path(scratch).replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", f"{CONFIG} may set another path") from None


def _parse(path: Path, text: str) -> Contexts:
    import yaml

    try:
        document = yaml.safe_load(text) or {}
        return Contexts(
            current=str(document.get("current-context") or ""),
            known={str(name): _context(str(name), one) for name, one in (document.get("contexts") or {}).items()},
        )
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is not a configuration file", "repair or remove it, then run `bursar login`"
        ) from None


def _context(name: str, document: Mapping[str, Any]) -> Context:
    values = {ours: str(document.get(theirs) or "") for theirs, ours in _FILE_FIELDS.items()}
    return Context(**{**values, "url": str(document["url"]).rstrip("/")}, name=name)


def _shown(context: Context) -> dict[str, str]:
    return {theirs: value for theirs, ours in _FILE_FIELDS.items() if (value := getattr(context, ours))}
