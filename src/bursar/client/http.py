"""What the two drivers share: how a client for HTTP is set up, and what its failures mean."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from bursar import __version__
from bursar.client.contexts import Context, is_loopback
from bursar.client.errors import ConfigError, ConnectionFailed
from bursar.client.flow import Request, Response

CONNECT_SECONDS_MAX = 5.0
# Each watch holds a connection of its own.
CONNECTIONS_MAX = 1000
KEPT_MAX = 100


def options(context: Context, timeout_seconds: float) -> dict[str, Any]:
    """The arguments for httpx2's clients, sync and async alike."""
    if urlsplit(context.url).scheme not in ("http", "https"):
        raise ConfigError(f"{context.url!r} is not an http or https URL", "set BURSAR_URL, or run `bursar login`")
    headers = {"user-agent": f"bursar/{__version__}"}
    if context.token:
        headers["authorization"] = f"Bearer {context.token}"
    return {
        "base_url": context.url,
        "headers": headers,
        "timeout": timeouts(timeout_seconds),
        "verify": _trust(context),
        "limits": httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=KEPT_MAX),
        # No proxy that the environment names leads to this machine itself.
        "trust_env": not is_loopback(context.url),
    }


def _trust(context: Context) -> ssl.SSLContext:
    if context.url.startswith("http:"):
        # Loading the system's certificates takes longer than a request does. This one trusts nobody.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=context.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the CA file {context.ca_file} cannot be used: {error}") from None


def timeouts(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS_MAX))


def arguments(request: Request) -> dict[str, Any]:
    """The arguments of `build_request`."""
    given: dict[str, Any] = {
        "method": request.method,
        "url": request.path,
        "params": dict(request.query) or None,
        "headers": dict(request.headers),
        "content": request.body or None,
    }
    if request.silence_seconds_max is not None:
        given["timeout"] = timeouts(request.silence_seconds_max)
    return given


def response_of(response: httpx2.Response, body: bytes) -> Response:
    headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}
    return Response(response.status_code, headers, body)


def failure(error: Exception, url: str) -> ConnectionFailed:
    """Why there is no answer, in words that name the server."""
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return ConnectionFailed(
            f"the certificate of {url} is not trusted: {reason}",
            "give the CA's file with --ca-file, BURSAR_CA_FILE or `bursar login --ca-file`",
            passing=False,
        )
    if "WRONG_VERSION_NUMBER" in reason:
        return ConnectionFailed(f"{url} does not speak TLS", "use http:// if that is meant", passing=False)
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return ConnectionFailed(f"{url} cannot be used: {reason}", "check the URL", passing=False)
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError):
        return ConnectionFailed(
            f"cannot connect to {url}: {reason}", "is `bursar serve` running? set BURSAR_URL or run `bursar login`"
        )
    if isinstance(error, httpx2.TimeoutException):
        return ConnectionFailed(f"{url} did not answer in time")
    return ConnectionFailed(f"the connection to {url} was lost: {reason}")
