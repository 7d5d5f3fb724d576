"""Addresses, as people and nodes write them: HOST:PORT, with brackets around the host of an IPv6 one."""

import ipaddress
import re
from typing import Final
from urllib.parse import unquote

_ADDRESS: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,64}(?:%[A-Za-z0-9._-]{1,32})?\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):([0-9]{1,5})"
)

# What gRPC takes for a kind of address and not for a host: `unix:123` is the path of a socket.
_SCHEMES: Final = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


_NUMERIC: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
_LOOPBACK_NAMES: Final = frozenset({"ip6-localhost", "ip6-loopback"})


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT, and nothing else that somebody could be made to call."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and found[1].lower() not in _SCHEMES and int(found[2]) <= 65535


def is_callable(text: str) -> bool:
    """Whether it is HOST:PORT of a machine: link-local addresses serve metadata of clouds, and groups serve nobody.

    Whether this machine's own loopback may be called depends on who names it: see `may_name`."""
    if not is_address(text):
        return False
    host = _number(host_of(text))
    if host is None:
        # Resolvers take `2852039166` and `169.254.43518` for numbers as well.
        return _NUMERIC.fullmatch(host_of(text).rstrip(".").rpartition(".")[2]) is None
    return not (host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved)


def may_name(address: str, peer: str) -> bool:
    """Whether an agent may say that it is called at this address: at a loopback address only where its own stream comes
    over loopback. `peer` is where the stream comes from, as gRPC writes it."""
    host = host_of(address).lower().rstrip(".")
    if not (is_loopback_host(host) or host.endswith((".localhost", ".localdomain")) or host in _LOOPBACK_NAMES):
        return True
    family, _, came_from = unquote(peer).partition(":")
    return family in ("ipv4", "ipv6") and is_loopback(came_from)


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback_host(host: str) -> bool:
    """Whether it is this machine itself, by its name or its number."""
    number = _number(host)
    return host == "localhost" if number is None else number.is_loopback


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """A host that is written as a number; an IPv4 one inside an IPv6 one counts as what it is."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def is_loopback(address: str) -> bool:
    """The same, of HOST:PORT."""
    return is_loopback_host(host_of(address))
