"""Refusals of `bursar run` in the words of its options: `--mem`, not `spec.resources.requests[memory]`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bursar.client.errors import ApiError
    from bursar.core.values.refusal import Cause

# Which option wrote a field of the allocation. A field with parts, such as `spec.env[0].name`, is one option too.
FLAGS: Final = {
    "metadata.name": "--name",
    "metadata.namespace": "-n",
    "spec.resources.requests[cpu]": "--cpus",
    "spec.resources.requests[memory]": "--mem",
    "spec.resources.limits[memory]": "--mem",
    "spec.resources.requests[nvidia.com/gpu]": "--gpus",
    "spec.nodes": "--nodes",
    "spec.command": "COMMAND",
    "spec.env": "--env",
    "spec.workingDir": "--workdir",
    "spec.priorityClass": "--priority-class",
    "spec.queue": "--queue",
    "spec.ttl": "--ttl",
    "spec.sensitive": "--sensitive",
    "spec.stdin": "--stdin",
    "spec.scheduling.tolerations": "--simulated",
}
_PATHS: Final = "|".join(re.escape(path) for path in sorted(FLAGS, key=len, reverse=True))
_FIELD: Final = re.compile(rf"(?<![\w.])({_PATHS})((?:\[[^\]]*\]|\.\w+)*)(?!\w)")


def in_flags(text: str) -> str:
    return _FIELD.sub(lambda found: FLAGS[found[1]], text)


def told_in_flags(error: ApiError) -> ApiError:
    """The same refusal for somebody who typed options. A fault that two fields share is told once."""
    causes = tuple(dict.fromkeys(map(_cause, error.causes)))
    message = in_flags(error.message)
    if error.code == "invalid" and causes and all(one.field for one in causes):
        message = "; ".join(f"{one.field}: {one.message}" for one in causes)
        causes = ()
    return type(error)(
        message,
        status=error.status,
        reason=error.reason,
        code=error.code,
        hint=in_flags(error.hint),
        causes=causes,
        retry_after=error.retry_after,
        request_id=error.request_id,
        details=error.details,
    )


def _cause(one: Cause) -> Cause:
    return replace(one, field=in_flags(one.field), message=in_flags(one.message))
