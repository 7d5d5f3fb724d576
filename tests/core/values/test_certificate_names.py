"""What certificates say, without certificates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values.certificate import (
    CONTROL_PLANE_URI,
    NodeIdentity,
    identity_in,
    is_control_plane,
    node_uris,
    server_name,
)

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True)


@given(NAMES, st.integers(1, 2**62))
def test_what_is_said_is_read(name: str, generation: int) -> None:
    identity = NodeIdentity(name, generation)
    assert identity_in(["gpu-1.node.bursar.internal", *node_uris(identity)]) == identity
    assert not is_control_plane(node_uris(identity))


@given(NAMES)
def test_names_to_be_called_by_are_never_too_long_and_never_those_of_a_host(name: str) -> None:
    assert len(server_name(name)) <= 253
    assert server_name(name).endswith(".node.bursar.internal")


def test_long_names_to_be_called_by_differ() -> None:
    assert server_name("a" * 252 + "b") != server_name("a" * 252 + "c")


@pytest.mark.parametrize(
    "uris",
    [
        [],
        [CONTROL_PLANE_URI],
        ["bursar://node/gpu-1"],
        ["bursar://generation/1"],
        ["bursar://node/", "bursar://generation/1"],
        ["bursar://node/gpu-1", "bursar://generation/-1"],
        ["bursar://node/gpu-1", "bursar://generation/0"],
        ["bursar://node/gpu-1", "bursar://generation/one"],
        ["bursar://node/gpu-1", "bursar://node/gpu-2", "bursar://generation/1"],
        ["bursar://node/gpu-1", "bursar://generation/1", "bursar://generation/2"],
        ["spiffe://node/gpu-1", "bursar://generation/1"],
    ],
)
def test_whatever_is_unclear_is_nobody(uris: list[str]) -> None:
    assert identity_in(uris) is None


def test_the_control_plane_is_no_node() -> None:
    assert is_control_plane([CONTROL_PLANE_URI])
    assert not is_control_plane(["bursar://control-plane/", "bursar://node/control-plane"])
