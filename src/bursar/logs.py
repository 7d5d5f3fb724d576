"""Structured logging on standard error: JSON lines, or a readable form if standard error is a terminal.

Every log event has a stable snake_case name, and a sentence for people beside it:
`log.info("node_joined", message="the node has joined the cluster", node=name)`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

# structlog imports rich if it is there, for tracebacks that are not used here: a fifth of the start of an agent. So
# processes that log import this module first.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]
try:
    import structlog
finally:
    if _rich is None:
        del sys.modules["rich"]
    else:
        sys.modules["rich"] = _rich


def set_up_logs() -> None:
    # Plain tracebacks: the values of variables may be secrets.
    console = structlog.dev.ConsoleRenderer(event_key="message", exception_formatter=structlog.dev.plain_traceback)
    renderer: Any = console if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
