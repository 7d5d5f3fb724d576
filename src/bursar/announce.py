"""The output of `bursar serve` when it is ready: its URL, the admin token, and the next commands to try."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from bursar.client.contexts import DEFAULT_URL
from bursar.config import ServerSettings


def announce(settings: ServerSettings, listener: socket.socket, token: str | None, ca: Path | None) -> None:
    """Print the ready line; before it a new admin token, once."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_cert else "http"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    if token is not None and settings.admin_token_file is None:
        print(f"admin token (shown once): {token}", flush=True)
    if settings.show_token and settings.admin_token_file is not None:
        print(f"admin token: {settings.admin_token_file.read_text().strip()}", flush=True)
    parts = [f"bursar is ready on {url}"]
    if settings.admin_token_file is not None:
        parts.append(f"admin token in {settings.admin_token_file}")
    if ca is not None:
        parts.append(f"CA in {ca}")
    print(", ".join(parts), flush=True)
    if settings.show_token and settings.admin_token_file is not None:
        print(_next_step(settings, url, ca), flush=True)


def _next_step(settings: ServerSettings, url: str, ca: Path | None) -> str:
    """Commands for another terminal, with the same program path as this process."""
    program = sys.argv[0] if "/" in sys.argv[0] and not sys.argv[0].startswith("/") else "bursar"
    assert settings.admin_token_file is not None
    if ca is not None:
        login = f"{program} login {url} --ca-file {ca} --token - < {settings.admin_token_file}"
        return f"Next, in another terminal: {login}; {program} get nodes"
    token = settings.admin_token_file.read_text().strip()
    where = "" if url == DEFAULT_URL else f" BURSAR_URL={url}"
    return f"Next, in another terminal: export BURSAR_TOKEN={token}{where}; {program} run -- hostname"
