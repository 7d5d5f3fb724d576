"""Addresses, as people and nodes write them: HOST:PORT, with brackets around the host of an IPv6 one."""

import ipaddress
import re
from typing import Final

_ADDRESS: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,64}(?:%[A-Za-z0-9._-]{1,32})?\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}):([0-9]{1,5})"
)

# What gRPC takes for a kind of address and not for a host: `unix:123` is the path of a socket.
_SCHEMES: Final = frozenset({"unix", "unix-abstract", "vsock", "dns", "ipv4", "ipv6", "xds", "passthrough"})


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT, and nothing else that somebody could be made to call."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and found[1].lower() not in _SCHEMES and int(found[2]) <= 65535


def is_callable(text: str) -> bool:
    """Whether it is HOST:PORT of a machine: link-local addresses serve metadata of clouds, and groups serve nobody."""
    if not is_address(text):
        return False
    try:
        host = ipaddress.ip_address(host_of(text).partition("%")[0])
    except ValueError:
        return True
    host = getattr(host, "ipv4_mapped", None) or host
    return not (host.is_link_local or host.is_multicast or host.is_unspecified or host.is_reserved)


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def is_loopback_host(host: str) -> bool:
    """Whether it is this machine itself, by its name or its number."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_loopback(address: str) -> bool:
    """The same, of HOST:PORT."""
    return is_loopback_host(host_of(address))
