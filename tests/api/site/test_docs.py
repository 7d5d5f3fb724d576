"""The page for people: whole, self-contained, and safe with whatever stands in a description."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from bursar.api.site.docs import CONTENT_SECURITY_POLICY, SCRIPT, STYLE, curl, page
from bursar.api.site.openapi import document
from support.api.sample_routes import ROUTES

DOCUMENT = document(ROUTES, release="1.2.3")
PAGE = page(DOCUMENT).decode()


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(text)
    return parser.found


def test_every_operation_and_schema_is_on_the_page_once() -> None:
    ids = [attributes["id"] for _, attributes in _elements(PAGE) if "id" in attributes]
    assert len(ids) == len(set(ids))
    operations = [one for item in DOCUMENT["paths"].values() for key, one in item.items() if key != "parameters"]
    assert {f"op-{one['operationId']}" for one in operations} <= set(ids)
    assert {f"schema-{name}" for name in DOCUMENT["components"]["schemas"]} <= set(ids)


def test_every_link_on_the_page_leads_somewhere() -> None:
    elements = _elements(PAGE)
    ids = {attributes.get("id") for _, attributes in elements}
    for tag, attributes in elements:
        href = attributes.get("href")
        if tag == "a" and href and href.startswith("#"):
            assert href[1:] in ids, href


def test_nothing_comes_from_another_host() -> None:
    for tag, attributes in _elements(PAGE):
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attributes
        assert "//" not in (attributes.get("href") or "")
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_the_policy_allows_exactly_the_style_and_the_script_of_the_page() -> None:
    (style,) = re.findall("<style>(.*?)</style>", PAGE, re.DOTALL)
    (script,) = re.findall("<script>(.*?)</script>", PAGE, re.DOTALL)
    assert (style, script) == (STYLE, SCRIPT)
    for text in (style, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    # Inline handlers and styles would be blocked, so there are none.
    assert not [name for _, attributes in _elements(PAGE) for name in attributes if name.startswith("on")]
    assert not [attributes for _, attributes in _elements(PAGE) if "style" in attributes]


def test_descriptions_cannot_bring_markup() -> None:
    hostile: dict[str, Any] = {
        **DOCUMENT,
        "info": {**DOCUMENT["info"], "title": "<script>alert(1)</script>", "description": "a `<b>` & 'c'"},
    }
    text = page(hostile).decode()
    assert "<script>alert" not in text
    assert "a <code>&lt;b&gt;</code> &amp; &#x27;c&#x27;" in text


def test_curl_examples_can_be_pasted() -> None:
    item = DOCUMENT["paths"]["/api/v1/namespaces/{namespace}/allocations"]
    operation = {**item["post"], "parameters": [*item["parameters"], *item["post"]["parameters"]]}
    assert curl("post", "/api/v1/namespaces/{namespace}/allocations", operation) == (
        "curl -X POST \\\n"
        '  -H "Authorization: Bearer $BURSAR_TOKEN" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        "  -d @ml-training-job-42.json \\\n"
        '  "$BURSAR_URL/api/v1/namespaces/ml-team/allocations"'
    )


def test_public_operations_are_shown_without_a_token() -> None:
    assert curl("get", "/healthz", {"parameters": [], "security": []}) == 'curl \\\n  "$BURSAR_URL/healthz"'
