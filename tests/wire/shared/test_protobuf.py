"""Protobuf bodies as kubectl really sends them, and bytes that nobody should send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.wire.shared.protobuf import MAGIC, MEDIA_TYPE, MESSAGES, ProtobufError, decode

# Recorded from kubectl 1.32.5, by pointing it at a recording server.
CREATE_NAMESPACE = (
    "6b3873000a0f0a02763112094e616d657370616365"
    "121f0a170a076d6c2d7465616d12001a0022002a0032003800420012001a020a001a002200"
)
CREATE_QUOTA = (
    "6b3873000a130a027631120d5265736f7572636551756f746112550a190a02713112001a076d6c2d7465616d22002a0032003800420012360a0b"
    "0a0363707512040a0231300a170a0e6e76696469612e636f6d2f67707512050a03313030120e4e6f745465726d696e6174696e671a001a002200"
)
CAN_I = (
    "6b3873000a320a17617574686f72697a6174696f6e2e6b38732e696f2f7631121753656c665375626a6563744163636573735265766965771246"
    "0a100a0012001a0022002a0032003800420012280a260a0764656661756c7412066372656174651a0022002a0b616c6c6f636174696f6e733200"
    "3a001a08080012001a0020001a002200"
)
CAN_I_LIST = (
    "6b3873000a310a17617574686f72697a6174696f6e2e6b38732e696f2f7631121653656c665375626a65637452756c6573526576696577"
    "12230a100a0012001a0022002a0032003800420012090a0764656661756c741a04180022001a002200"
)
WHO_AM_I = (
    "6b3873000a2d0a1861757468656e7469636174696f6e2e6b38732e696f2f7631121153656c665375626a656374526576696577"
    "121a0a100a0012001a0022002a0032003800420012060a040a0012001a002200"
)

RECORDED = [
    (
        CREATE_NAMESPACE,
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ml-team"}, "spec": {}, "status": {}},
    ),
    (
        CREATE_QUOTA,
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q1", "namespace": "ml-team"},
            "spec": {"hard": {"cpu": "10", "nvidia.com/gpu": "100"}, "scopes": ["NotTerminating"]},
            "status": {},
        },
    ),
    (
        CAN_I,
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "metadata": {},
            "spec": {
                "resourceAttributes": {"namespace": "default", "verb": "create", "resource": "allocations"},
            },
        },
    ),
    (
        CAN_I_LIST,
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "metadata": {},
            "spec": {"namespace": "default"},
        },
    ),
    (WHO_AM_I, {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {}}),
]


@pytest.mark.parametrize(("recorded", "document"), RECORDED)
def test_what_kubectl_sends_is_read(recorded: str, document: dict[str, Any]) -> None:
    assert decode(bytes.fromhex(recorded)) == document


# A small writer, so that the other messages can be tried too.


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def integer(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def body(kind: str, raw: bytes, *rest: bytes) -> bytes:
    return MAGIC + text(1, text(1, "v1") + text(2, kind)) + text(2, raw) + b"".join(rest)


def test_zero_is_kept_where_it_was_meant() -> None:
    options = integer(1, 0) + integer(3, 0) + text(4, "Background") + text(5, "All")
    assert decode(body("DeleteOptions", options)) == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "gracePeriodSeconds": 0,
        "orphanDependents": False,
        "propagationPolicy": "Background",
        "dryRun": ["All"],
    }


def test_numbers_may_be_negative() -> None:
    assert decode(body("DeleteOptions", integer(1, -1)))["gracePeriodSeconds"] == -1


def test_an_eviction_carries_its_options() -> None:
    eviction = text(1, text(1, "job-1") + text(3, "ml-team")) + text(2, integer(1, 30) + text(2, text(1, "u-1")))
    assert decode(body("Eviction", eviction)) == {
        "apiVersion": "v1",
        "kind": "Eviction",
        "metadata": {"name": "job-1", "namespace": "ml-team"},
        "deleteOptions": {"gracePeriodSeconds": 30, "preconditions": {"uid": "u-1"}},
    }


def test_metadata_is_read_whole() -> None:
    owner = text(1, "Job") + text(3, "j") + text(4, "u") + text(5, "v1") + integer(6, 1) + integer(7, 0)
    metadata = (
        text(2, "run-")
        + text(8, integer(1, 1_705_314_600) + integer(2, 5))
        + text(11, text(1, "team") + text(2, "ml"))
        + text(11, text(1, "bare"))
        + text(12, text(1, "note") + text(2, "ü"))
        + text(13, owner)
        + text(14, "bursar.io/quota")
        + text(17, b"managed fields, which are skipped")
    )
    assert decode(body("Namespace", text(1, metadata)))["metadata"] == {
        "generateName": "run-",
        "creationTimestamp": "2024-01-15T10:30:00Z",
        "labels": {"team": "ml", "bare": ""},
        "annotations": {"note": "ü"},
        "ownerReferences": [
            {
                "kind": "Job",
                "name": "j",
                "uid": "u",
                "apiVersion": "v1",
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
        "finalizers": ["bursar.io/quota"],
    }


def test_scope_selectors_are_read() -> None:
    one = text(1, "PriorityClass") + text(2, "In") + text(3, "high") + text(3, "normal")
    spec = decode(body("ResourceQuota", text(2, text(3, text(1, one)))))["spec"]
    assert spec == {
        "scopeSelector": {
            "matchExpressions": [{"scopeName": "PriorityClass", "operator": "In", "values": ["high", "normal"]}]
        }
    }


def test_unknown_fields_are_skipped_whatever_their_form() -> None:
    unknown = integer(900, 7) + text(901, "x") + varint(902 << 3 | 1) + bytes(8) + varint(903 << 3 | 5) + bytes(4)
    assert decode(body("DeleteOptions", unknown + integer(1, 5)))["gracePeriodSeconds"] == 5


REFUSED = {
    "nothing": b"",
    "JSON": b'{"kind": "Namespace"}',
    "an empty envelope": MAGIC,
    "a kind that is not spoken": body("Pod", b""),
    "a compressed body": body("Namespace", b"", text(3, "gzip")),
    "JSON in the envelope": body("Namespace", b"{}", text(4, "application/json")),
    "a field that ends early": body("Namespace", b"\x0a\x7f"),
    "a number that ends early": body("Namespace", b"\x0a\xff"),
    "a number without end": body("DeleteOptions", b"\x08" + b"\xff" * 11),
    "a number of 70 bits": body("DeleteOptions", b"\x08" + b"\xff" * 9 + b"\x7f"),
    "field number 0": body("Namespace", b"\x00\x00"),
    "a group": body("Namespace", b"\x0b\x0c"),
    "a number for a message": body("Namespace", integer(1, 1)),
    "bytes for a number": body("DeleteOptions", text(1, "x")),
    "text that is no text": body("Namespace", text(1, text(1, b"\xff"))),
    "a name given twice": body("Namespace", text(1, text(1, "a") + text(1, "b"))),
    "a time after the year 9999": body("Namespace", text(1, text(8, integer(1, 1 << 60)))),
    "a body that is too large": MAGIC + bytes(5 << 20),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    with pytest.raises(ProtobufError):
        decode(REFUSED[case])


def test_the_envelope_may_name_its_content() -> None:
    assert decode(body("Namespace", b"", text(4, MEDIA_TYPE))) == {"apiVersion": "v1", "kind": "Namespace"}


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_else(data: bytes) -> None:
    _try(data)
    _try(MAGIC + data)


@given(st.sampled_from(sorted(MESSAGES)), st.binary(max_size=200))
def test_arbitrary_messages_raise_nothing_else(kind: str, raw: bytes) -> None:
    _try(body(kind, raw))


@given(st.sampled_from([recorded for recorded, _ in RECORDED]), st.data())
def test_damaged_messages_raise_nothing_else(recorded: str, data: st.DataObject) -> None:
    damaged = bytearray.fromhex(recorded)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _try(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


def _try(data: bytes) -> None:
    try:
        decoded = decode(data)
    except ProtobufError:
        return
    assert decoded["kind"] in MESSAGES
