"""What is an address, and what is this machine."""

import pytest

from bursar.core.address import is_address, is_loopback


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("10.0.0.1:1", False), ("bursar:1", False)],
)
def test_what_is_this_machine_itself(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(
    "text", ["a:1", "gpu-01.lab_2:65535", "10.0.0.1:0", "[::]:0", "[fd00::1]:7", "[fe80::1%eth0]:7"]
)
def test_what_can_be_called(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a:",
        ":1",
        "a:65536",
        "a:1\n",
        "h\0st:1",
        "::1:1",
        "-a:1",
        "a/b:1",
        "unix:123",
        "UNIX:123",
        "dns:1",
        "unix:/run/x:1",
        "[x]:1",
        "ipv4:1",
    ],
)
def test_what_is_none(text: str) -> None:
    assert not is_address(text)
