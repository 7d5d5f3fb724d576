"""Signatures, backoff, and which addresses are never called."""

import pytest

from bursar.core.objects.webhook import (
    BACKOFF_SECONDS_MAX,
    backoff_seconds,
    local_fault,
    secret_fault,
    secret_of,
    sign,
    signature_fault,
    url_fault,
    verify,
)

# The example of the Standard Webhooks specification.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, TIMESTAMP = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_specifications_own_example() -> None:
    assert sign(SECRET, ID, TIMESTAMP, BODY) == SIGNATURE


def is_right(**change: object) -> bool:
    given = {"id_": ID, "timestamp": str(TIMESTAMP), "body": BODY, "signatures": SIGNATURE, "now": TIMESTAMP + 10}
    return verify(SECRET, **(given | change))  # type: ignore[arg-type]


def test_whatever_is_changed_it_is_no_longer_right() -> None:
    assert is_right()
    assert is_right(signatures=f"v1,abc {SIGNATURE} v2,whatever")
    assert not is_right(id_="msg_other")
    assert not is_right(body=BODY + b" ")
    assert not is_right(timestamp=str(TIMESTAMP + 1))
    assert not is_right(signatures=SIGNATURE[:-2])
    assert not is_right(signatures="v1,ä")
    assert not is_right(now=TIMESTAMP + 301)
    assert not is_right(now=TIMESTAMP - 301)
    assert not verify(secret_of(bytes(32)), ID, str(TIMESTAMP), BODY, SIGNATURE, TIMESTAMP)


@pytest.mark.parametrize(
    ("id_", "timestamp", "signatures"),
    [("", "1", "v1,x"), ("a", "", "v1,x"), ("a", "1", ""), ("a" * 200, "1", "v1,x"), ("a", "1.5", "v1,x"),
     ("a", "-1", "v1,x"), ("a\n", "1", "v1,x"), ("a", "9" * 30, "v1,x"), ("a", "²", "v1,x")],
)  # fmt: skip
def test_headers_that_cannot_be_right_are_told(id_: str, timestamp: str, signatures: str) -> None:
    assert signature_fault(id_, timestamp, signatures, 1.0)


def test_secrets() -> None:
    assert secret_fault(secret_of(bytes(32))) == ""
    for bad in ("", "whsec_", "whsec_!!!!", "whsec_AAAA", "abc", "whsec_ä"):
        assert secret_fault(bad), bad


def test_each_try_waits_longer_up_to_a_point_and_never_all_at_once() -> None:
    waits = [backoff_seconds(tries, 1.0) for tries in range(1, 30)]
    assert waits[:4] == [5, 10, 20, 40]
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_SECONDS_MAX
    assert backoff_seconds(3, 0.0) == 10
    assert backoff_seconds(10_000, 1.0) == BACKOFF_SECONDS_MAX


@pytest.mark.parametrize(
    "url",
    ["https://a.example/hook", "http://10.0.0.1:8080/x?y=1", "https://[2001:db8::1]/x"],
)
def test_urls_that_will_do(url: str) -> None:
    assert url_fault(url) == ""


@pytest.mark.parametrize(
    "url",
    ["", "a.example", "ftp://a.example", "https://", "https://a:b@a.example/", "https://u@a.example/",
     "https://a.example/#x", "https://a.example:99999/", "https://a.example:0/", "https://a b/", "https://ä.example/",
     "file:///etc/passwd", "https://a.example/" + "x" * 3000, "http://[::1", "https://a.example/\n"],
)  # fmt: skip
def test_urls_that_will_not(url: str) -> None:
    assert url_fault(url)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.9.10", "::1", "169.254.169.254", "fe80::1", "fe80::1%eth0", "100.100.100.200", "fd00:ec2::254",
     "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1", "::ffff:169.254.169.254",
     "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"],
)  # fmt: skip
def test_addresses_that_are_never_called(address: str) -> None:
    assert local_fault(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "10.0.0.7", "192.168.1.1", "2606:4700::1111", "fd12:3456::1"])
def test_addresses_that_may_be_called(address: str) -> None:
    assert local_fault(address) == ""
