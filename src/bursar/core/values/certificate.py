"""Names in X.509 certificates: the subject alternative names by which the server and the agents identify each other.

URIs among the subject alternative names identify the owner; the common name is for people. A node's certificate also
holds its generation, a number that rises when the node is enrolled again, disowned or deleted: certificates of an older
generation are not accepted. For calls from the server to an agent it holds a host name under a reserved suffix: nobody
vouches for a node's address, and a node's name must never pass for a host of the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

CONTROL_PLANE_URI = "bursar://control-plane"
COMMON_NAME_CHARS_MAX = 64

_NODE = "bursar://node/"
_GENERATION = "bursar://generation/"
_SERVER_SUFFIX = ".node.bursar.internal"
_SERVER_NAME_CHARS_MAX = 253


class NodeIdentity(NamedTuple):
    """The node and its generation in a node's certificate."""

    node: str
    generation: int


def node_uris(identity: NodeIdentity) -> tuple[str, str]:
    return f"{_NODE}{identity.node}", f"{_GENERATION}{identity.generation}"


def identity_in(uris: Iterable[str]) -> NodeIdentity | None:
    """The node that a certificate with these subject alternative names belongs to; None if it is not a node's."""
    names = list(uris)
    nodes = [uri.removeprefix(_NODE) for uri in names if uri.startswith(_NODE)]
    generations = [uri.removeprefix(_GENERATION) for uri in names if uri.startswith(_GENERATION)]
    if len(nodes) != 1 or len(generations) != 1 or not nodes[0]:
        return None
    # Generations count from 1, so 0 never passes for "no generation".
    if not (generations[0].isascii() and generations[0].isdigit()) or int(generations[0]) == 0:
        return None
    return NodeIdentity(nodes[0], int(generations[0]))


def is_control_plane(uris: Iterable[str]) -> bool:
    """Whether these subject alternative names are the control plane's."""
    return CONTROL_PLANE_URI in uris


def server_name(node: str) -> str:
    """The host name in a node's certificate, which callers of its agent expect at any address."""
    name = f"{node}{_SERVER_SUFFIX}"
    if len(name) <= _SERVER_NAME_CHARS_MAX:
        return name
    return f"{hashlib.sha256(node.encode()).hexdigest()}{_SERVER_SUFFIX}"
