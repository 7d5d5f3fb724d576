"""Mutations of good requests: one or more parts replaced by values that break parsers, at random but reproducible."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from support.api.operations import Filled
from support.api.raw_http import request

TEXTS = (
    "", " ", "\x00", "a\x00b", "../..", "%2e%2e", "é", "\u202e", "𝟙", "null", "-0", "NaN", "Infinity", "1e400",
    "1e-400", "0x10", "1_000", "+1", "9" * 400, "a" * 300, "a" * 20_000, "{}", "[]", "{{", "$(id)", "' OR 1=1 --",
    "\\", '"', "\r\nX: y", "2026-13-45T99:99:99Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999Z", "-1",
    "5 Gi", "1Ei", "=", "a=b,c!=", "a in (", "a notin ()", ",,,", "*", "system:", "bsr_", "NAME@UID", "/" * 40,
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 0.1, -0.0, 1e308, 5e-324)
QUERIES = (
    "continue", "limit", "fieldSelector", "labelSelector", "resourceVersion", "resourceVersionMatch", "dryRun",
    "fieldValidation", "fieldManager", "force", "propagationPolicy", "gracePeriodSeconds", "pretty", "account",
    "tenant", "user", "node", "at", "from", "to", "period", "by", "format", "epoch", "offset", "limitBytes",
    "tailLines", "job_id", "anchor", "after", "days", "class", "resource", "includeObject", "unknown",
)  # fmt: skip
HEADERS = (
    "Accept", "Content-Type", "Authorization", "Idempotency-Key", "Content-Length", "Transfer-Encoding", "Expect",
    "X-Request-Id", "Host", "Range", "If-Match", "Accept-Encoding", "Content-Encoding", "Forwarded", "Connection",
)  # fmt: skip
# More than the server reads, and less than it hangs up on.
BODY_BYTES_MAX = 8_000_000
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get")
MEDIA = (
    "application/json", "application/yaml", "application/json-patch+json", "application/merge-patch+json",
    "application/apply-patch+yaml", "application/strategic-merge-patch+json", "text/plain",
    "application/json; charset=x",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """The bytes of a request. `is_http` says whether they still are one, so that an answer is due."""

    raw: bytes
    is_http: bool = True

    @property
    def asked(self) -> bytes:
        return self.raw


def mutate(filled: Filled, token: str | None, chance: random.Random) -> Mutant:
    """One request with up to three mutations of its structure, and now and then of its bytes."""
    parts = _Parts(filled, token, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(_MUTATIONS)(parts)
    raw = parts.raw()
    return Mutant(_torn(raw, chance), is_http=False) if chance.random() < 0.05 else Mutant(raw, parts.is_http)


class _Parts:
    """A request that is taken apart."""

    def __init__(self, filled: Filled, token: str | None, chance: random.Random) -> None:
        self.chance = chance
        self.method = filled.operation.method
        self.path = filled.path
        self.query = dict(filled.query)
        self.headers = filled.headers(token)
        self.body = filled.body
        self.is_http = True

    def raw(self) -> bytes:
        query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in self.query.items())
        return request(self.method, self.path + (f"?{query}" if query else ""), self.headers, self.body)

    def value(self) -> Any:
        """Any JSON value, most of them wrong wherever they stand."""
        chance = self.chance
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: chance.choice(TEXTS),
            lambda: chance.choice(NUMBERS),
            lambda: chance.choice((None, True, False, [], {}, [None], {"": None}, [[]], {"a": {"b": {"c": []}}})),
            lambda: [chance.choice(TEXTS)] * chance.choice((1, 3, 300)),
            lambda: {
                f"{chance.choice(TEXTS)}{number}": chance.choice((*NUMBERS, [], {}))
                for number in range(chance.choice((2, 200, 600)))
            },
            lambda: _deep(chance.choice((5, 60, 300))),
        )
        return chance.choice(kinds)()


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _change_body(parts: _Parts) -> None:
    """Replace, remove, rename or repeat one value somewhere in a JSON body."""
    if not parts.body:
        parts.body = json.dumps(parts.value()).encode()
        return
    try:
        document = json.loads(parts.body)
    except ValueError:
        return
    parent, key = _somewhere(document, parts.chance)
    if parent is None:
        document = parts.value()
    elif (how := parts.chance.random()) < 0.6:
        parent[key] = parts.value()
    elif how < 0.75:
        del parent[key]
    elif isinstance(parent, dict):
        parent[parts.chance.choice(TEXTS)] = parent.pop(key) if how < 0.9 else parent[key]
    else:
        parent.extend(parent[:] * 20)
    parts.body = json.dumps(document).encode()[:BODY_BYTES_MAX]


def _somewhere(document: Any, chance: random.Random) -> tuple[Any, Any]:
    """A container in the document and one of its keys; None where the document itself is meant."""
    parent, key, value = None, None, document
    while isinstance(value, dict | list) and value and chance.random() < 0.8:
        parent = value
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        value = parent[key]
    return parent, key


def _tear_body(parts: _Parts) -> None:
    parts.body = _torn(parts.body or b"{}", parts.chance)


def _repeat_key(parts: _Parts) -> None:
    if parts.body and parts.body.startswith(b"{"):
        parts.body = b'{"metadata": {"name": "twice"}, ' + parts.body[1:]


def _torn(raw: bytes, chance: random.Random) -> bytes:
    """Cut, flip, insert or swap some bytes."""
    place = chance.randrange(len(raw) + 1)
    match chance.randrange(4):
        case 0:
            return raw[:place]
        case 1:
            return raw[:place] + bytes(chance.randrange(256) for _ in range(chance.choice((1, 4, 40)))) + raw[place:]
        case 2:
            return raw[:place] + bytes([chance.randrange(256)]) + raw[place + 1 :]
        case _:
            return raw[place:] + raw[:place]


def _change_path(parts: _Parts) -> None:
    steps = parts.path.split("/")
    steps[parts.chance.randrange(len(steps))] = parts.chance.choice(
        (quote(parts.chance.choice(TEXTS), safe=""), "%2F", "%00", "%ff", "%", "..", ".", "", "a" * 20_000)
    )
    parts.path = "/".join(steps) or "/"


def _change_query(parts: _Parts) -> None:
    parts.query[parts.chance.choice(QUERIES)] = parts.chance.choice(TEXTS)[:9000]


def _change_header(parts: _Parts) -> None:
    name = parts.chance.choice(HEADERS)
    value = parts.chance.choice((*MEDIA, *TEXTS[:40])).replace("\r", "").replace("\n", "")
    parts.headers.append((name, value))
    # A second length, chunks that do not come: no answer may be due, or another one than to this request.
    parts.is_http = parts.is_http and name not in ("Content-Length", "Transfer-Encoding", "Connection")


def _change_media(parts: _Parts) -> None:
    parts.headers = [one for one in parts.headers if one[0] != "Content-Type"]
    parts.headers.append(("Content-Type", parts.chance.choice(MEDIA)))


def _change_method(parts: _Parts) -> None:
    parts.method = parts.chance.choice(METHODS)
    parts.is_http = parts.is_http and parts.method != "CONNECT"  # what follows its head is no body


_MUTATIONS: tuple[Callable[[_Parts], None], ...] = (
    *[_change_body] * 8, *[_change_query] * 4, *[_change_path] * 2, *[_change_header] * 2, _change_media, _tear_body,
    _repeat_key, _change_method,
)  # fmt: skip
