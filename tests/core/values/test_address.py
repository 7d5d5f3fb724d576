"""What is an address, and what is this machine."""

import pytest

from bursar.core.values.address import is_address, is_callable, is_loopback, may_name, may_resolve_to


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("10.0.0.1:1", False),
        ("bursar:1", False),
    ],
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


@pytest.mark.parametrize(
    ("text", "callable_"),
    [
        ("10.1.2.3:8443", True),
        ("gpu-1.example.org:8443", True),
        ("127.0.0.1:8443", True),
        ("[::1]:8443", True),
        ("[2001:db8::1]:8443", True),
        ("169.254.169.254:80", False),
        ("[::ffff:169.254.169.254]:80", False),
        ("[fe80::1%eth0]:80", False),
        ("0.0.0.0:80", False),
        ("224.0.0.1:80", False),
        ("2852039166:80", False),
        ("169.254.43518:80", False),
        ("0xA9FEA9FE:80", False),
        ("gpu-1.7b:80", True),
        ("unix:123", False),
    ],
)
def test_agents_are_called_at_addresses_of_machines_only(text: str, callable_: bool) -> None:
    assert is_callable(text) is callable_


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:22", "[::1]:22", "[::ffff:127.9.9.9]:22", "LOCALHOST.:22", "a.localhost:22", "ip6-localhost:22"],
)
def test_only_who_comes_over_loopback_is_called_there(address: str) -> None:
    assert may_name(address, "ipv4:127.0.0.1:40000")
    assert may_name(address, "ipv6:%5B::1%5D:40000")
    for peer in ("ipv4:10.1.2.3:40000", "ipv6:%5B2001:db8::1%5D:40000", "unix:/run/127.0.0.1:1", "unix:", ""):
        assert not may_name(address, peer)


def test_who_comes_from_elsewhere_names_any_machine() -> None:
    assert may_name("10.1.2.4:22", "ipv4:10.1.2.3:40000")


@pytest.mark.parametrize(
    ("address", "number", "allowed"),
    [
        ("gpu-1.example:8443", "10.0.0.9", True),
        ("gpu-1.example:8443", "fd00::9", True),
        ("gpu-1.example:8443", "127.0.0.1", False),
        ("gpu-1.example:8443", "127.0.1.1", False),
        ("gpu-1.example:8443", "::1", False),
        ("gpu-1.example:8443", "::ffff:127.0.0.1", False),
        ("gpu-1.example:8443", "169.254.169.254", False),
        ("gpu-1.example:8443", "::ffff:169.254.169.254", False),
        ("gpu-1.example:8443", "fe80::1%eth0", False),
        ("gpu-1.example:8443", "0.0.0.0", False),
        ("gpu-1.example:8443", "::", False),
        ("gpu-1.example:8443", "224.0.0.1", False),
        ("localhost:8443", "127.0.0.1", True),
        ("agent.localhost.:8443", "::1", True),
        ("localhost:8443", "169.254.169.254", False),
    ],
)
def test_a_name_may_not_lead_where_a_number_may_not(address: str, number: str, allowed: bool) -> None:
    assert may_resolve_to(address, number) is allowed
