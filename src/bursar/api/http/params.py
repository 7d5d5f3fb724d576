"""Paths and query parameters that routes of several areas share."""

from __future__ import annotations

from bursar.api.http.route import Param
from bursar.wire.shared.kind import Kind

ROOT = "/api/v1"

DRY_RUN = Param("dryRun", "All: dry run: validate and answer, but change nothing.")
VALIDATION = Param("fieldValidation", "Handling of unknown fields: Strict (refuse, the default), Warn or Ignore.")
MANAGER = Param("fieldManager", "Accepted for compatibility.")
PRETTY = Param("pretty", "Accepted for compatibility.")
SELECTORS = (
    Param("labelSelector", "As in app=web,tier in (a,b),!old."),
    Param("fieldSelector", "As in status.phase=Running."),
)
WATCHING = (
    Param("watch", "true: stream changes instead of listing.", "boolean"),
    Param("resourceVersion", "Watch for changes after this revision."),
    Param("allowWatchBookmarks", "true: send bookmarks.", "boolean"),
    Param("sendInitialEvents", "true: begin the watch with the present state, and mark its end.", "boolean"),
    Param("timeoutSeconds", "End the watch after this many seconds.", "integer"),
)


def base_path(kind: Kind) -> str:
    """The path of a kind's collection."""
    return f"{kind.root}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"{kind.root}/{kind.plural}"
