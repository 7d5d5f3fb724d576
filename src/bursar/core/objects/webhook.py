"""Webhooks: HMAC signatures, retries with exponential backoff, and the addresses that are never called (SSRF).

Signatures follow Standard Webhooks: an HMAC over id, timestamp and body. It proves the sender and the integrity of a
message and detects replays. Incoming payment webhooks are signed in the same form.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from typing import Final
from urllib.parse import urlsplit

SECRET_PREFIX: Final = "whsec_"  # noqa: S105
SECRET_BYTES: Final = 32
SECRET_BYTES_MIN: Final = 16
TOLERANCE_SECONDS: Final = 300
ID_CHARS_MAX: Final = 128
URL_CHARS_MAX: Final = 2048
SIGNATURES_MAX: Final = 16

BACKOFF_SECONDS: Final = 5.0
BACKOFF_SECONDS_MAX: Final = 3600.0
GIVE_UP_SECONDS: Final = 3 * 86_400

# Metadata services of clouds outside of the link-local range.
_METADATA: Final = frozenset(ipaddress.ip_address(one) for one in ("100.100.100.200", "fd00:ec2::254", "192.0.0.192"))
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")


def secret_of(random: bytes) -> str:
    return SECRET_PREFIX + base64.b64encode(random).decode()


def secret_fault(secret: str) -> str:
    """The fault of a secret that a user chose, as a sentence; empty if it is valid."""
    try:
        size = len(_key(secret))
    except (ValueError, binascii.Error):
        return f"must be {SECRET_PREFIX} and base64"
    return f"must hold at least {SECRET_BYTES_MIN} bytes" if size < SECRET_BYTES_MIN else ""


def _key(secret: str) -> bytes:
    if not secret.startswith(SECRET_PREFIX) or not secret.isascii():
        raise ValueError("not a webhook's secret")
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)


def sign(secret: str, id_: str, timestamp: int, body: bytes) -> str:
    content = b".".join((id_.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.new(_key(secret), content, hashlib.sha256).digest()).decode()


def verify(secret: str, id_: str, timestamp: str, body: bytes, signatures: str, now: float) -> bool:
    """Whether one of the signatures is valid and its timestamp is recent."""
    if signature_fault(id_, timestamp, signatures, now):
        return False
    wanted = sign(secret, id_, int(timestamp), body).encode()
    # Compare all of them, so that the time taken reveals nothing.
    return any([hmac.compare_digest(wanted, one.encode()) for one in signatures.split(" ")[:SIGNATURES_MAX]])  # noqa: C419


def signature_fault(id_: str, timestamp: str, signatures: str, now: float) -> str:
    """The fault of signature headers before any secret is tried, as a sentence; empty if there is none."""
    if not id_ or not timestamp or not signatures:
        return "webhook-id, webhook-timestamp and webhook-signature must be given"
    if len(id_) > ID_CHARS_MAX or not id_.isascii() or not id_.isprintable():
        return f"webhook-id must be at most {ID_CHARS_MAX} printable ASCII characters"
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        return "webhook-timestamp must be seconds since 1970"
    if abs(int(timestamp) - now) > TOLERANCE_SECONDS:
        return f"webhook-timestamp is more than {TOLERANCE_SECONDS} seconds away from now"
    return ""


def backoff_seconds(tries: int, chance: float) -> float:
    """The pause before the next delivery: exponential backoff with jitter. `chance` is between 0 and 1."""
    full = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS * (1 << min(tries - 1, 16)))
    return full * (0.5 + 0.5 * chance)


def url_fault(url: str) -> str:
    """The fault of a webhook's URL, as a sentence; empty if it is valid."""
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url:
        return f"must be at most {URL_CHARS_MAX} printable ASCII characters without spaces"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "must be a URL"
    if parts.scheme not in ("https", "http") or not parts.hostname:
        return "must be a URL that begins with https:// or http://"
    if port == 0:
        return "must not name port 0"
    if parts.username is not None or parts.password is not None:
        return "must not hold a user or a password: deliveries are signed instead"
    return "must not have a fragment" if parts.fragment else ""


def local_fault(address: str) -> str:
    """Why an address is only called if private addresses are allowed, as a phrase; empty if it may be called.

    IPv6 addresses that embed an IPv4 address (mapped, 6to4, Teredo, NAT64) are judged by that address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return local_fault(str(inner))
    if ip.is_loopback:
        return "a loopback address"
    if ip.is_link_local or ip in _METADATA:
        return "a link-local or metadata address"
    if ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return "not the address of a host"
    return ""
