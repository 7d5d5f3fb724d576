"""Whatever the OpenAPI document allows, and much that it does not: no crash, no answer that it does not document."""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import bursar
from bursar.api.http.route import Answer, Outcome
from bursar.api.site.routes import build_routes
from support.process.server import Server, migrated_directory, started

SOAK = os.environ.get("BURSAR_SOAK") == "1"
EXAMPLES = 300 if SOAK else 4
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def _document() -> dict[str, Any]:
    """The document as it is served."""
    (route,) = [one for one in build_routes(bursar.__version__) if one.path == "/openapi.json"]

    async def served() -> Outcome:
        return await route.handler(None)  # type: ignore[arg-type]

    answer = asyncio.run(served())
    assert isinstance(answer, Answer)
    document: dict[str, Any] = json.loads(answer.body)
    return document


schema = schemathesis.openapi.from_dict(_document())


@pytest.fixture(scope="module")
def victim() -> Iterator[Server]:
    """A server of its own: what is generated may delete whatever there is."""
    with migrated_directory() as data, started(data) as running:
        yield running


@schema.parametrize()
@seed(1)
@settings(
    max_examples=EXAMPLES,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_is_documented(case: Any, victim: Server) -> None:
    if "watch" in (case.query or {}):
        case.query["watch"] = "false"  # a watch has no end to wait for, and tests of its own
    case.call_and_validate(
        base_url=victim.url, headers={"Authorization": f"Bearer {victim.token}"}, checks=CHECKS, timeout=30
    )
