"""Names, labels and annotations: what is accepted, and how faults are told."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values import names

Check = Callable[[str], list[str]]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        pytest.param(names.dns_label, "physics", id="a label"),
        pytest.param(names.dns_label, "a", id="a label of one letter"),
        pytest.param(names.dns_label, "7-of-9", id="a label with digits and hyphens"),
        pytest.param(names.dns_label, "a" * 63, id="the longest label"),
        pytest.param(names.dns_subdomain, "node-1.rack-2.example.com", id="a subdomain"),
        pytest.param(names.dns_subdomain, "a" * 253, id="the longest subdomain"),
        pytest.param(names.label_key, "tier", id="a key without a prefix"),
        pytest.param(names.label_key, "bursar.io/tenant", id="a key with a prefix"),
        pytest.param(names.label_key, "Some_Key.v1", id="a key in capitals"),
        pytest.param(names.label_value, "", id="an empty value"),
        pytest.param(names.label_value, "A100-80GB", id="a value in capitals"),
        pytest.param(names.qualified_name, "nvidia.com/gpu", id="an extended resource"),
        pytest.param(names.qualified_name, "max-x", id="a dimension with a hyphen"),
        pytest.param(names.qualified_name, "requests.cpu", id="a dimension with a dot"),
        pytest.param(names.qualified_name, "requests.nvidia.com/gpu", id="requests of an extended resource"),
        pytest.param(names.qualified_name, "sensitive_pool_size", id="a dimension with underscores"),
    ],
)
def test_accepts(check: Check, value: str) -> None:
    assert check(value) == []


@pytest.mark.parametrize(
    ("check", "value", "fault"),
    [
        pytest.param(names.dns_label, "", "must not be empty", id="an empty label"),
        pytest.param(names.dns_label, "Physics", "lowercase", id="a label in capitals"),
        pytest.param(names.dns_label, "-a", "begins and ends", id="a label that begins with a hyphen"),
        pytest.param(names.dns_label, "a-", "begins and ends", id="a label that ends with a hyphen"),
        pytest.param(names.dns_label, "a.b", "RFC 1123 label", id="a label with a dot"),
        pytest.param(names.dns_label, "a\n", "RFC 1123 label", id="a label that ends in a newline"),
        pytest.param(names.dns_label, "é", "RFC 1123 label", id="a label outside ASCII"),
        pytest.param(names.dns_label, "a" * 64, "no longer than 63", id="a long label"),
        pytest.param(names.dns_subdomain, "a..b", "between dots", id="an empty part"),
        pytest.param(names.dns_subdomain, "a.b.", "between dots", id="a dot at the end"),
        pytest.param(names.dns_subdomain, "../etc/passwd", "subdomain", id="a path"),
        pytest.param(names.dns_subdomain, "a" * 254, "no longer than 253", id="a long subdomain"),
        pytest.param(names.label_key, "/x", "prefix part: must not be empty", id="an empty prefix"),
        pytest.param(names.label_key, "a/", "name part: must not be empty", id="a prefix alone"),
        pytest.param(names.label_key, "a/b/c", "prefix part", id="two slashes"),
        pytest.param(names.label_key, "Bursar.io/x", "prefix part", id="a prefix in capitals"),
        pytest.param(names.label_key, "x" * 64, "no longer than 63", id="a long key"),
        pytest.param(names.label_value, "a b", "a label value may hold", id="a value with a space"),
        pytest.param(names.label_value, ".a", "begins and ends", id="a value that begins with a dot"),
        pytest.param(names.label_value, "x" * 64, "no longer than 63", id="a long value"),
        pytest.param(names.qualified_name, "nvidia.com/", "qualified name", id="a resource without a name"),
    ],
)
def test_names_the_fault_and_the_value(check: Check, value: str, fault: str) -> None:
    (told,) = check(value)
    assert fault in told
    assert names.quoted(value) in told


def test_both_parts_of_a_key_are_told_at_once() -> None:
    assert len(names.label_key("Bad/also bad")) == 2


def test_every_fault_of_a_set_of_labels_is_told() -> None:
    faults = names.labels({"ok": "fine", "bad key": "fine", "tier": "bad value", "n": 3})
    assert len(faults) == 3
    assert 'label "tier"' in faults[1]
    assert faults[2] == 'label "n": the value must be a string'


def test_a_label_bomb_is_one_fault() -> None:
    assert names.labels({f"k{index}": "" for index in range(64)}) == []
    (fault,) = names.labels({f"bad key {index}": "" for index in range(10_000)})
    assert "10000 labels are too many" in fault


def test_annotations_hold_free_text() -> None:
    assert names.annotations({"kubectl.kubernetes.io/last-applied-configuration": '{"a": "é\\n"}\n'}) == []


def test_annotations_are_bounded_in_bytes_of_utf8() -> None:
    assert names.annotations({"k": "x" * (names.ANNOTATIONS_BYTES_MAX - 1)}) == []
    (fault,) = names.annotations({"k": "é" * (names.ANNOTATIONS_BYTES_MAX // 2)})
    assert "262145 bytes" in fault


def test_annotations_that_cannot_be_stored_are_refused() -> None:
    assert names.annotations({"k": "a\0b"}) == ['annotation "k": the value must not contain a NUL character']
    assert names.annotations({"k": None}) == ['annotation "k": the value must be a string']


def test_the_list_of_faults_is_bounded() -> None:
    assert len(names.annotations({f"bad key {index}": "" for index in range(5_000)})) == 64


@given(st.text())
def test_a_shown_value_is_short_printable_ascii(value: str) -> None:
    shown = names.quoted(value)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 2 + 12 * 63 + 3


@given(st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True))
def test_a_label_is_also_a_subdomain_a_key_and_a_value(value: str) -> None:
    for check in (names.dns_label, names.dns_subdomain, names.label_key, names.label_value, names.qualified_name):
        assert check(value) == []
    assert names.label_key(f"{value}/{value}") == []


@given(st.text(max_size=70))
def test_what_is_accepted_is_plain_ascii(value: str) -> None:
    for check in (names.dns_label, names.dns_subdomain, names.label_key, names.label_value):
        if not check(value):
            assert value.isascii()
            assert not set(value) & set(" \t\r\n'\"\\,=()")
