"""What a certificate of ours says, and to whom it belongs: names only, so that the server and the agents agree on them.

A certificate says whose it is in URIs among its alternative names; the common name is for people to read. A node's also
says its generation, a number that rises when the node is enrolled anew, disowned or deleted: certificates of an older
generation count no more. And it has a host name under a suffix that no host has, for calls in the other direction:
nodes have addresses that nobody vouches for, and what a node is called must never pass for a host of the server's.
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
    """A node as its certificate names it."""

    node: str
    generation: int


def node_uris(identity: NodeIdentity) -> tuple[str, str]:
    return f"{_NODE}{identity.node}", f"{_GENERATION}{identity.generation}"


def identity_in(uris: Iterable[str]) -> NodeIdentity | None:
    """The node that a certificate with these alternative names belongs to; None when it is not a node's."""
    names = list(uris)
    nodes = [uri.removeprefix(_NODE) for uri in names if uri.startswith(_NODE)]
    generations = [uri.removeprefix(_GENERATION) for uri in names if uri.startswith(_GENERATION)]
    if len(nodes) != 1 or len(generations) != 1 or not nodes[0]:
        return None
    # They count from 1: no certificate can say that it has none.
    if not (generations[0].isascii() and generations[0].isdigit()) or int(generations[0]) == 0:
        return None
    return NodeIdentity(nodes[0], int(generations[0]))


def is_control_plane(uris: Iterable[str]) -> bool:
    """Whether a certificate with these alternative names is the control plane's, calling an agent."""
    return CONTROL_PLANE_URI in uris


def server_name(node: str) -> str:
    """The host name in a node's certificate, to be expected by whoever calls its agent at whatever address."""
    name = f"{node}{_SERVER_SUFFIX}"
    if len(name) <= _SERVER_NAME_CHARS_MAX:
        return name
    return f"{hashlib.sha256(node.encode()).hexdigest()}{_SERVER_SUFFIX}"
