"""HTTP settings and failures, shared by both drivers."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

from bursar import __version__
from bursar.client.contexts import Context, is_loopback
from bursar.client.errors import ConfigError, ConnectionFailed
from bursar.client.flow import HttpRequest, Response

CONNECT_SECONDS_MAX = 5.0
RUNS = "check that the server runs (`bursar serve`), and that host and port are right"
# Each watch holds a connection of its own.
CONNECTIONS_MAX = 1000
KEPT_MAX = 100


def options(context: Context, timeout_seconds: float, trust: ssl.SSLContext | None = None) -> dict[str, Any]:
    """The arguments for httpx2's clients, sync and async alike. The trust in https servers is by default that of this
    machine, or of the context's CA file."""
    if urlsplit(context.url).scheme not in ("http", "https"):
        raise ConfigError(f"{context.url!r} is not an http or https URL", "set BURSAR_URL, or run `bursar login`")
    headers = {"user-agent": f"bursar/{__version__}"}
    if context.token:
        headers["authorization"] = f"Bearer {context.token}"
    if context.tenant:
        headers["x-bursar-tenant"] = context.tenant
    return {
        "base_url": context.url,
        "headers": headers,
        "timeout": timeouts(timeout_seconds),
        "verify": trust or _trust(context),
        "limits": httpx2.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=KEPT_MAX),
        # The environment's proxies do not lead to loopback.
        "trust_env": not is_loopback(context.url),
    }


def _trust(context: Context) -> ssl.SSLContext:
    if context.url.startswith("http:"):
        # Loading the system's certificates takes longer than a request. This context trusts no certificate.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=context.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the CA file {context.ca_file} cannot be used: {error}") from None


def timeouts(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS_MAX))


def arguments(request: HttpRequest) -> dict[str, Any]:
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
    """The error for a missing answer: it names the server, the reason, and what to check."""
    cause = _cause(error)
    reason = str(error) or str(cause) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return ConnectionFailed(
            f"the certificate of {url} is not trusted: {reason}",
            "give the file of the CA that signed it, with --ca-file or BURSAR_CA_FILE",
            passing=False,
        )
    if "WRONG_VERSION_NUMBER" in reason:
        return ConnectionFailed(f"{url} does not speak TLS", "use http:// if it serves no TLS", passing=False)
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return ConnectionFailed(f"{url} cannot be used: {reason}", "check the URL", passing=False)
    if isinstance(error, httpx2.ConnectTimeout):
        return _unreachable(url, "it did not answer in time", f"{RUNS}; a firewall may block it")
    if isinstance(error, httpx2.ConnectError):
        return _unreachable(url, *_no_connection(cause, reason, url))
    if isinstance(error, httpx2.TimeoutException):
        return ConnectionFailed(f"{url} did not answer in time", "it may be busy, or another program listens there")
    hint = "if it is served by TLS, use https://" if url.startswith("http:") else ""
    return ConnectionFailed(f"the connection to {url} was lost: {reason}", hint)


def _unreachable(url: str, why: str, check: str) -> ConnectionFailed:
    return ConnectionFailed(f"could not reach {url}: {why}", check)


def _no_connection(cause: Exception, reason: str, url: str) -> tuple[str, str]:
    """The reason, and what to check."""
    if isinstance(cause, socket.gaierror):
        name = urlsplit(url).hostname
        return f"the name {name} cannot be looked up ({cause.strerror})", "check the name, and this machine's DNS"
    if isinstance(cause, ConnectionRefusedError):
        return "the connection was refused", f"nothing listens there: {RUNS}"
    if isinstance(cause, OSError) and cause.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no route to it ({os.strerror(cause.errno)})", "check the address, and this machine's network"
    if isinstance(cause, ssl.SSLError | ConnectionResetError) and url.startswith("https:"):
        return f"TLS failed ({reason})", "check that the server serves https there, without a proxy between"
    return reason, RUNS


def _cause(error: Exception) -> Exception:
    """The operating system's error inside the HTTP library's exception."""
    found, inner = error, error.__cause__ or error.__context__
    while isinstance(inner, Exception):
        if isinstance(inner, OSError):
            found = inner
        inner = inner.__cause__ or inner.__context__
    return found
