"""What gRPC proves itself with, in both directions: all of it is signed by our own authority, and so is whoever calls.

The certificates are made for this process and live as long as it: their keys are never written anywhere.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import grpc
import psutil

from bursar.core.certificate import server_name
from bursar.ops.authority import ensure_authority
from bursar.ops.certificate import sign_client, sign_server
from bursar.ops.office import now
from bursar.store.database import Database

ALWAYS = ("localhost", "127.0.0.1", "::1")
# Addresses to listen on that nobody can call.
ANY_HOST = frozenset({"0.0.0.0", "::", ""})  # noqa: S104


async def server_credentials(database: Database, hosts: Sequence[str]) -> grpc.ServerCredentials:
    """For a server that agents call at these hosts. Who calls must show a certificate of our authority."""
    authority = await ensure_authority(database)
    pair = sign_server(authority, _names(hosts), now())
    return grpc.ssl_server_credentials(
        [(pair.key, pair.certificate)], root_certificates=authority.pem, require_client_auth=True
    )


def _names(hosts: Sequence[str]) -> set[str]:
    """What the server may be called by. One that listens everywhere is called by any address of the machine."""
    named = {*ALWAYS, socket.gethostname(), *hosts}
    if named & ANY_HOST:
        there = (one for addresses in psutil.net_if_addrs().values() for one in addresses)
        named |= {one.address.partition("%")[0] for one in there if one.family in (socket.AF_INET, socket.AF_INET6)}
    return named - ANY_HOST


async def client_credentials(database: Database) -> grpc.ChannelCredentials:
    """For calling agents. Open the channel with `channel_options(node)`, or its certificate will not be believed."""
    authority = await ensure_authority(database)
    pair = sign_client(authority, now())
    return grpc.ssl_channel_credentials(
        root_certificates=authority.pem, private_key=pair.key, certificate_chain=pair.certificate
    )


def channel_options(node: str) -> tuple[tuple[str, str], ...]:
    """Whatever address the node gave, the one who answers there must be this node."""
    return (("grpc.ssl_target_name_override", server_name(node)),)
