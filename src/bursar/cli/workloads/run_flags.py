"""Refusals of `bursar run` with option names: `--mem`, not `spec.resources.requests[memory]`."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bursar.client.errors import ApiError
    from bursar.core.values.refusal import Cause

# The option that sets a field of the allocation. Parts of a field, such as `spec.env[0].name`, belong to its option.
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


def with_flags(error: ApiError) -> ApiError:
    """The same refusal with option names. A fault that two fields share appears once."""
    causes = tuple(dict.fromkeys(map(_cause, error.causes)))
    message = in_flags(error.message)
    if error.code == "invalid" and causes and all(one.field for one in causes):
        message = "; ".join(f"{one.field}: {one.message}" for one in causes)
        causes = ()
    shown = copy(error)
    shown.args, shown.hint, shown.causes = (message,), in_flags(error.hint), causes
    return shown


def _cause(one: Cause) -> Cause:
    return replace(one, field=in_flags(one.field), message=in_flags(one.message))
