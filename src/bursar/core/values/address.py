"""Network addresses in the form HOST:PORT, with brackets around an IPv6 host, and the check against SSRF.

An agent reports the address at which it can be called. It must not make the server call its own loopback, link-local
metadata services or gRPC schemes (server-side request forgery).
"""

import ipaddress
import re
from typing import Final
from urllib.parse import unquote

_ADDRESS: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,64}(?:%[A-Za-z0-9._-]{1,32})?\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):([0-9]{1,5})"
)

# gRPC reads these as the scheme of a target and not as a host: `unix:123` is the path of a socket.
_SCHEMES: Final = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


_NUMERIC: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LOOPBACK_NAMES: Final = frozenset({"ip6-localhost", "ip6-loopback"})


def is_address(text: str) -> bool:
    """Whether the text is HOST:PORT without a gRPC scheme."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and found[1].lower() not in _SCHEMES and int(found[2]) <= 65535


def is_callable(text: str) -> bool:
    """Whether it is HOST:PORT of a machine: neither link-local (cloud metadata), multicast nor reserved.

    `may_name` decides on loopback addresses, which depend on the peer.
    """
    if not is_address(text):
        return False
    host = _number(host_of(text))
    if host is None:
        # Resolvers read `2852039166` and `169.254.43518` as IPv4 addresses as well.
        return _NUMERIC.fullmatch(host_of(text).rstrip(".").rpartition(".")[2]) is None
    # ::1 counts as reserved.
    return host.is_loopback or not (host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved)


def may_name(address: str, peer: str) -> bool:
    """Whether an agent may report this address: a loopback address only if its own stream comes over loopback.

    `peer` is the source of the stream as gRPC writes it.
    """
    if not _names_loopback(address):
        return True
    family, _, came_from = unquote(peer).partition(":")
    return family in ("ipv4", "ipv6") and is_loopback(came_from)


def may_resolve_to(address: str, number: str) -> bool:
    """Whether the host of a callable address may be called at this IP address, to which its name resolved. The rules
    for IP addresses apply to the result; only the name of a loopback host, which `may_name` has checked, may resolve to
    loopback."""
    return is_callable(at_number(address, number)) and (_names_loopback(address) or not is_loopback_host(number))


def at_number(address: str, number: str) -> str:
    """Replace the host by an IP address; the port stays."""
    return f"{f'[{number}]' if ':' in number else number}:{address.rpartition(':')[2]}"


def is_number(address: str) -> bool:
    """Whether the host is an IP address, so that it needs no resolution."""
    return _number(host_of(address)) is not None


def _names_loopback(address: str) -> bool:
    host = host_of(address).lower().rstrip(".")
    return is_loopback_host(host) or host.endswith((".localhost", ".localdomain")) or host in _LOOPBACK_NAMES


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback_host(host: str) -> bool:
    """Whether the host is this machine, by name or by IP address."""
    number = _number(host)
    return host == "localhost" if number is None else number.is_loopback


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that the host writes, with IPv4-mapped IPv6 addresses as IPv4; None for a name."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def is_loopback(address: str) -> bool:
    """Whether the host of HOST:PORT is this machine."""
    return is_loopback_host(host_of(address))
