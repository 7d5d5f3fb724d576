"""`bursar`: the commands there are, each in a module of its own that is loaded when it is called.

The server's commands are added by `bursar.main`, which may import the server; nothing here does.
"""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.shell.lazy import Entry, LazyGroup

_OBJECTS = "Objects"
_CREDIT = "Credit"
_PEOPLE = "Access and tenants"
_SETUP = "This machine"


def _entry(module: str, help: str, section: str, attribute: str = "") -> Entry:  # noqa: A002
    return Entry(f"bursar.cli.{module}:{attribute or module}", help, section)


ENTRIES = {
    "get": _entry("get", "Show one or many objects.", _OBJECTS),
    "describe": _entry("describe", "Show all there is to know about an object.", _OBJECTS),
    "create": _entry("create", "Create objects from files.", _OBJECTS),
    "apply": _entry("apply", "Make objects as files describe them.", _OBJECTS),
    "edit": _entry("edit", "Change an object in your editor.", _OBJECTS),
    "patch": _entry("patch", "Change part of an object.", _OBJECTS),
    "label": _entry("label", "Set or remove labels.", _OBJECTS),
    "annotate": _entry("label", "Set or remove annotations.", _OBJECTS, "annotate"),
    "delete": _entry("delete", "Delete objects.", _OBJECTS),
    "release": _entry("release", "Release many allocations at once.", _OBJECTS),
    "job": _entry("job", "Cancel jobs, or raise their priority for a while.", _OBJECTS),
    "run": _entry("run", "Run a command on the cluster, and see it through.", _OBJECTS),
    "logs": _entry("logs", "Print the output of an allocation or a job.", _OBJECTS),
    "status": _entry("status", "Show how your work stands, and why it waits.", _OBJECTS),
    "explain": _entry("explain", "Show why something waits, and what would help.", _OBJECTS),
    "simulate": _entry("simulate", "Show what would become of allocations, and create nothing.", _OBJECTS),
    "top": _entry("top", "Show how full the cluster is, and how its queues stand.", _OBJECTS),
    "watch": _entry("watch", "Print changes as they happen.", _OBJECTS),
    "cordon": _entry("cordon", "Keep new work away from nodes.", _OBJECTS),
    "uncordon": _entry("cordon", "Let nodes take work again.", _OBJECTS, "uncordon"),
    "taint": _entry("taint", "Set or remove the taints of nodes.", _OBJECTS),
    "drain": _entry("drain", "Empty a node: keep new work away, and evict what is placed there.", _OBJECTS),
    "preempt": _entry("preempt", "Stop an allocation so that it waits again.", _OBJECTS),
    "node": _entry("node", "Let nodes join, claim them, and give up those that are gone.", _OBJECTS),
    "balance": _entry("credit", "Show what an account has, and how long that lasts.", _CREDIT, "balance"),
    "credit": _entry("credit", "Top up accounts, limit them, and see what was spent.", _CREDIT),
    "lease": _entry("lease", "Pay for running time, also of work that is placed elsewhere.", _CREDIT),
    "price": _entry("price", "Show and set what running costs.", _CREDIT),
    "ledger": _entry("ledger", "Prove that the ledger is whole.", _CREDIT),
    "webhook": _entry("webhook", "Have notices sent, and see what was not taken.", _CREDIT),
    "usage": _entry("usage", "Show what was used, and what it costs.", _PEOPLE),
    "tenant": _entry("tenant", "Show what tenants may use, and do use.", _PEOPLE),
    "admin": _entry("admin", "Change what tenants may use.", _PEOPLE),
    "token": _entry("token", "Create, list and revoke tokens.", _PEOPLE),
    "whoami": _entry("whoami", "Show who the server takes you for.", _PEOPLE),
    "login": _entry("login", "Remember a server and a token for it.", _SETUP),
    "context": _entry("context", "List, choose and delete remembered servers.", _SETUP),
    "kubeconfig": _entry("kubeconfig", "Write a configuration for kubectl.", _SETUP),
    "completion": _entry("completion", "Print the completion script of a shell.", _SETUP),
    "version": _entry("version", "Show versions.", _SETUP),
}


@click.group(
    cls=LazyGroup,
    entries=ENTRIES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def cli(**_: Any) -> None:
    """Bursar decides who gets which GPUs, when, and who pays.

    \b
    Start a server:   bursar serve
    Point at one:     bursar login URL, or BURSAR_URL and BURSAR_TOKEN
    """
