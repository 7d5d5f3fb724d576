"""Objects as they are shown beside themselves name environment variables, and hold none of their values."""

import json
from typing import Any

import pytest

from bursar.core.values.redaction import HIDDEN, LAST_APPLIED, redacted

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"PASSWORD": SECRET, "A": ""}, {"PASSWORD": HIDDEN, "A": HIDDEN}),
        ({f"PASSWORD={SECRET}": ""}, {"PASSWORD": HIDDEN}),
        (
            [{"name": "PASSWORD", "value": SECRET}, {"name": "A"}],
            [{"name": "PASSWORD", "value": HIDDEN}, {"name": "A", "value": HIDDEN}],
        ),
        ([f"PASSWORD={SECRET}"], [HIDDEN]),
        ({}, {}),
        ([], []),
    ],
)
def test_variables_are_named_and_not_shown(env: Any, shown: Any) -> None:
    spec = {"command": ["train"], "env": env}
    assert redacted({"spec": spec}) == {"spec": {"command": ["train"], "env": shown}}
    job = redacted({"kind": "Job", "spec": {"completions": 3, "template": {"spec": spec}}})
    assert job == {
        "kind": "Job",
        "spec": {"completions": 3, "template": {"spec": {"command": ["train"], "env": shown}}},
    }
    listed = redacted({"items": [{"spec": spec}]})
    assert listed == {"items": [{"spec": {"command": ["train"], "env": shown}}]}
    assert spec["env"] == env, "it is a copy"


def test_the_manifest_that_kubectl_keeps_is_left_out() -> None:
    manifest = json.dumps({"spec": {"env": {"PASSWORD": SECRET}}})
    metadata = {"name": "a", "annotations": {LAST_APPLIED: manifest, "note": "mine"}, "labels": {"env": "prod"}}
    shown = {"name": "a", "annotations": {"note": "mine"}, "labels": {"env": "prod"}}
    assert redacted({"metadata": metadata}) == {"metadata": shown}
    assert redacted(metadata) == shown
