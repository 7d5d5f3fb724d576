"""Syntax of names, labels and annotations, as in Kubernetes.

Every check returns all faults as sentences, and an empty list for a valid value, so that one answer lists everything
that is wrong with an object. The rules are those of Kubernetes, because its clients rely on them; the limits on the
number of labels and the size of annotations are Bursar's.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Final

LABELS_MAX: Final = 64
ANNOTATIONS_BYTES_MAX: Final = 256 * 1024

_LABEL_CHARS_MAX: Final = 63
_SUBDOMAIN_CHARS_MAX: Final = 253
_FAULTS_MAX: Final = 64
_SHOWN_CHARS_MAX: Final = 63
_HASHED: Final = "sha256-"
_HASH_CHARS: Final = 40

_DNS_LABEL: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")

# The whole key in one pattern: almost every key is valid, and one match accepts it.
_KEY: Final = re.compile(rf"(?:{_DNS_SUBDOMAIN.pattern}/)?{_NAME.pattern}")

_DNS_LABEL_RULE: Final = (
    "a lowercase RFC 1123 label may hold only lowercase letters, digits and '-', "
    "and begins and ends with a letter or digit"
)
_DNS_SUBDOMAIN_RULE: Final = (
    "a lowercase RFC 1123 subdomain may hold only lowercase letters, digits, '-' and '.', "
    "and each part between dots begins and ends with a letter or digit"
)
_NAME_RULE: Final = (
    "may hold only letters, digits, '-', '_' and '.', "
    "and begins and ends with a letter or digit (for example 'gpu-type')"
)


def dns_label(value: str) -> list[str]:
    """Faults of a DNS label, such as the name of a namespace."""
    return _faults(value, _DNS_LABEL, _LABEL_CHARS_MAX, _DNS_LABEL_RULE)


def dns_subdomain(value: str) -> list[str]:
    """Faults of a DNS subdomain, such as the name of an object."""
    return _faults(value, _DNS_SUBDOMAIN, _SUBDOMAIN_CHARS_MAX, _DNS_SUBDOMAIN_RULE)


def path_segment(value: str) -> list[str]:
    """Faults of a name that people choose elsewhere, such as a user's: whatever one segment of a path can hold."""
    if len(value) > _SUBDOMAIN_CHARS_MAX:
        return [f"{quoted(value)}: must be no longer than {_SUBDOMAIN_CHARS_MAX} characters"]
    if value in ("", ".", "..") or not value.isprintable() or any(character in value for character in "/%"):
        return [f"{quoted(value)}: must be printable, not empty, not '.' or '..', and without '/' and '%'"]
    return []


def member_name(tenant: str, user: str) -> str:
    """The name of a user's membership of a tenant: TENANT.USER, or a hash in place of a user that is no DNS label.

    Two memberships never have the same name: no DNS label has a dot, and none that looks like a hash stands for itself.
    """
    name = f"{tenant}.{member_part(user)}"
    return name if len(name) <= _SUBDOMAIN_CHARS_MAX else f"{_hash(tenant)}.{member_part(user)}"


def member_part(user: str) -> str:
    """The last part of the names of a user's memberships, by which they are found."""
    return user if not dns_label(user) and not user.startswith(_HASHED) else _hash(user)


def label_key(value: str) -> list[str]:
    """Faults of a key of labels or annotations: a name, optionally behind a DNS prefix and a slash."""
    return _prefixed("label key", value)


def qualified_name(value: str) -> list[str]:
    """Faults of the name of a resource or quota dimension, such as `nvidia.com/gpu` or `requests.cpu`."""
    return _prefixed("qualified name", value)


def label_value(value: str) -> list[str]:
    """Faults of a label's value; the empty value is valid."""
    if not value or (len(value) <= _LABEL_CHARS_MAX and _is_name(value)):
        return []
    return _faults(value, _NAME, _LABEL_CHARS_MAX, f"a label value {_NAME_RULE}")


def labels(mapping: Mapping[str, object]) -> list[str]:
    """Faults of a set of labels. Too many labels are one fault, which bounds the answer to a label bomb."""
    if len(mapping) > LABELS_MAX:
        return [f"{len(mapping)} labels are too many: at most {LABELS_MAX} are allowed"]
    return list(islice(_label_faults(mapping), _FAULTS_MAX))


def annotations(mapping: Mapping[str, object]) -> list[str]:
    """Faults of a set of annotations. Values are free text of bounded total size."""
    size_bytes = sum(_utf8_bytes(key) + _utf8_bytes(value) for key, value in mapping.items())
    if size_bytes > ANNOTATIONS_BYTES_MAX:
        return [f"annotations take {size_bytes} bytes: at most {ANNOTATIONS_BYTES_MAX} are allowed in total"]
    return list(islice(_annotation_faults(mapping), _FAULTS_MAX))


def quoted(value: str) -> str:
    """Quote a user's text for a message: escaped to ASCII and cut, so that the message stays short."""
    if len(value) <= _SHOWN_CHARS_MAX:
        return json.dumps(value)
    return json.dumps(value[:_SHOWN_CHARS_MAX]) + "..."


# Requests repeat the same few keys and values.
@lru_cache(4096)
def _is_key(value: str) -> bool:
    return _KEY.fullmatch(value) is not None


@lru_cache(4096)
def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None


def _faults(value: str, shape: re.Pattern[str], chars_max: int, rule: str) -> list[str]:
    fault = _fault(value, shape, chars_max, rule)
    return [f"{quoted(value)}: {fault}"] if fault else []


def _prefixed(noun: str, value: str) -> list[str]:
    if len(value) <= _LABEL_CHARS_MAX and _is_key(value):
        return []
    prefix, slash, name = value.rpartition("/")
    faults = [("name part", _fault(name, _NAME, _LABEL_CHARS_MAX, _NAME_RULE))]
    if slash:
        faults += [("prefix part", _fault(prefix, _DNS_SUBDOMAIN, _SUBDOMAIN_CHARS_MAX, _DNS_SUBDOMAIN_RULE))]
    return [f"{noun} {quoted(value)}: {part}: {fault}" for part, fault in faults if fault]


def _fault(value: str, shape: re.Pattern[str], chars_max: int, rule: str) -> str | None:
    # Check the length first: it bounds the work of the pattern.
    if len(value) > chars_max:
        return f"must be no longer than {chars_max} characters"
    if not value:
        return "must not be empty"
    return None if shape.fullmatch(value) else rule


def _label_faults(mapping: Mapping[str, object]) -> Iterator[str]:
    for key, value in mapping.items():
        yield from label_key(key)
        if isinstance(value, str):
            yield from (f"label {quoted(key)}: {fault}" for fault in label_value(value))
        else:
            yield f"label {quoted(key)}: the value must be a string"


def _annotation_faults(mapping: Mapping[str, object]) -> Iterator[str]:
    for key, value in mapping.items():
        yield from label_key(key)
        if not isinstance(value, str):
            yield f"annotation {quoted(key)}: the value must be a string"
        elif "\0" in value:
            # PostgreSQL's text type cannot hold NUL.
            yield f"annotation {quoted(key)}: the value must not contain a NUL character"


def _hash(text: str) -> str:
    return _HASHED + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARS]


def _utf8_bytes(value: object) -> int:
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0
