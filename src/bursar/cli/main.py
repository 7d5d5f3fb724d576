"""`bursar`: the commands there are, each in a module of its own that is loaded when it is called.

The server's commands are added by `bursar.main`, which may import the server; nothing here does.
"""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.shell.lazy import CommandEntry, LazyGroup

_OBJECTS = "Objects"
_CREDIT = "Credit"
_PEOPLE = "Access and tenants"
_SETUP = "This machine"


def _entry(module: str, help: str, section: str, attribute: str = "") -> CommandEntry:  # noqa: A002
    return CommandEntry(f"bursar.cli.{module}:{attribute or module.rpartition('.')[2]}", help, section)


ENTRIES = {
    "get": _entry("objects.get", "Show one or many objects.", _OBJECTS),
    "describe": _entry("objects.describe", "Show all there is to know about an object.", _OBJECTS),
    "create": _entry("objects.create", "Create objects from files.", _OBJECTS),
    "apply": _entry("objects.apply", "Make objects as files describe them.", _OBJECTS),
    "edit": _entry("objects.edit", "Change an object in your editor.", _OBJECTS),
    "patch": _entry("objects.patch", "Change part of an object.", _OBJECTS),
    "label": _entry("objects.label", "Set or remove labels.", _OBJECTS),
    "annotate": _entry("objects.label", "Set or remove annotations.", _OBJECTS, "annotate"),
    "delete": _entry("objects.delete", "Delete objects.", _OBJECTS),
    "release": _entry("workloads.release", "Release many allocations at once.", _OBJECTS),
    "job": _entry("workloads.job", "Cancel jobs, or raise their priority for a while.", _OBJECTS),
    "run": _entry("workloads.run", "Run a command on the cluster, and see it through.", _OBJECTS),
    "logs": _entry("workloads.logs", "Print the output of an allocation or a job.", _OBJECTS),
    "status": _entry("workloads.status", "Show how your work stands, and why it waits.", _OBJECTS),
    "explain": _entry("workloads.explain", "Show why something waits, and what would help.", _OBJECTS),
    "simulate": _entry("workloads.simulate", "Show what would become of allocations, and create nothing.", _OBJECTS),
    "top": _entry("nodes.top", "Show how full the cluster is, and how its queues stand.", _OBJECTS),
    "watch": _entry("objects.watch", "Print changes as they happen.", _OBJECTS),
    "cordon": _entry("nodes.cordon", "Keep new work away from nodes.", _OBJECTS),
    "uncordon": _entry("nodes.cordon", "Let nodes take work again.", _OBJECTS, "uncordon"),
    "taint": _entry("nodes.taint", "Set or remove the taints of nodes.", _OBJECTS),
    "drain": _entry("nodes.drain", "Empty a node: keep new work away, and evict what is placed there.", _OBJECTS),
    "preempt": _entry("workloads.preempt", "Stop an allocation so that it waits again.", _OBJECTS),
    "node": _entry("nodes.node", "Let nodes join, claim them, and give up those that are gone.", _OBJECTS),
    "balance": _entry("credit.credit", "Show what an account has, and how long that lasts.", _CREDIT, "balance"),
    "credit": _entry("credit.credit", "Top up accounts, limit them, and see what was spent.", _CREDIT),
    "lease": _entry("credit.lease", "Pay for running time, also of work that is placed elsewhere.", _CREDIT),
    "price": _entry("credit.price", "Show and set what running costs.", _CREDIT),
    "ledger": _entry("credit.ledger", "Prove that the ledger is whole.", _CREDIT),
    "webhook": _entry("objects.webhook", "Have notices sent, and see what was not taken.", _CREDIT),
    "usage": _entry("credit.usage", "Show what was used, and what it costs.", _PEOPLE),
    "tenant": _entry("quota.tenant", "Show what tenants may use, and do use.", _PEOPLE),
    "admin": _entry("quota.admin", "Change what tenants may use.", _PEOPLE),
    "token": _entry("session.token", "Create, list and revoke tokens.", _PEOPLE),
    "whoami": _entry("session.whoami", "Show who the server takes you for.", _PEOPLE),
    "login": _entry("session.login", "Remember a server and a token for it.", _SETUP),
    "context": _entry("session.context", "List, choose and delete remembered servers.", _SETUP),
    "kubeconfig": _entry("session.kubeconfig", "Write a configuration for kubectl.", _SETUP),
    "completion": _entry("session.completion", "Print the completion script of a shell.", _SETUP),
    "version": _entry("session.version", "Show versions.", _SETUP),
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
