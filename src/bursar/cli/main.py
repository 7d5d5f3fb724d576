"""`bursar`: the table of commands. Each is in a module of its own, imported when the command is called.

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
    "describe": _entry("objects.describe", "Show an object in full, with its events.", _OBJECTS),
    "create": _entry("objects.create", "Create objects from files.", _OBJECTS),
    "apply": _entry("objects.apply", "Create or update objects from files.", _OBJECTS),
    "edit": _entry("objects.edit", "Change an object in your editor.", _OBJECTS),
    "patch": _entry("objects.patch", "Change part of an object.", _OBJECTS),
    "label": _entry("objects.label", "Set or remove labels.", _OBJECTS),
    "annotate": _entry("objects.label", "Set or remove annotations.", _OBJECTS, "annotate"),
    "delete": _entry("objects.delete", "Delete objects.", _OBJECTS),
    "release": _entry("workloads.release", "Release all allocations that match a selector.", _OBJECTS),
    "job": _entry("workloads.job", "Cancel jobs, or boost their priority.", _OBJECTS),
    "run": _entry("workloads.run", "Run a command on the cluster and print its output.", _OBJECTS),
    "logs": _entry("workloads.logs", "Print the output of an allocation or a job.", _OBJECTS),
    "status": _entry("workloads.status", "Show your active work, and why it is pending.", _OBJECTS),
    "explain": _entry("workloads.explain", "Show why work is pending, and what would help.", _OBJECTS),
    "simulate": _entry("workloads.simulate", "Show whether, where and when allocations would run.", _OBJECTS),
    "top": _entry("nodes.top", "Show the utilization of the cluster and its queues.", _OBJECTS),
    "watch": _entry("objects.watch", "Print changes as they happen.", _OBJECTS),
    "cordon": _entry("nodes.cordon", "Mark nodes unschedulable.", _OBJECTS),
    "uncordon": _entry("nodes.cordon", "Mark nodes schedulable.", _OBJECTS, "uncordon"),
    "taint": _entry("nodes.taint", "Set or remove the taints of nodes.", _OBJECTS),
    "drain": _entry("nodes.drain", "Cordon a node and evict its work.", _OBJECTS),
    "preempt": _entry("workloads.preempt", "Stop an allocation and requeue it.", _OBJECTS),
    "node": _entry("nodes.node", "Enrol, claim, wipe and fence nodes.", _OBJECTS),
    "balance": _entry("credit.credit", "Show an account's balance, and how long it lasts.", _CREDIT, "balance"),
    "credit": _entry("credit.credit", "Top up accounts, set their limits, show statements.", _CREDIT),
    "lease": _entry("credit.lease", "Open, extend and close leases, which pay for running time.", _CREDIT),
    "price": _entry("credit.price", "Show and set prices.", _CREDIT),
    "ledger": _entry("credit.ledger", "Verify the ledger, and rotate its signing key.", _CREDIT),
    "webhook": _entry("objects.webhook", "Manage webhooks, and show their pending deliveries.", _CREDIT),
    "usage": _entry("credit.usage", "Show usage and its cost.", _PEOPLE),
    "quota": _entry("quota.quota", "Show limits and usage; set, remove and request limits.", _PEOPLE),
    "approvals": _entry("approval.approvals", "List and decide requests that await approval.", _PEOPLE),
    "tenant": _entry("quota.tenant", "Show the limits and usage of tenants.", _PEOPLE),
    "admin": _entry("quota.admin", "Change the limits and settings of tenants.", _PEOPLE),
    "member": _entry("session.member", "Add, remove and list the members of tenants.", _PEOPLE),
    "token": _entry("session.token", "Create, list and revoke tokens.", _PEOPLE),
    "whoami": _entry("session.whoami", "Show the current user and role.", _PEOPLE),
    "login": _entry("session.login", "Store a server and its token.", _SETUP),
    "context": _entry("session.context", "List, choose and delete stored servers.", _SETUP),
    "kubeconfig": _entry("session.kubeconfig", "Write a configuration for kubectl.", _SETUP),
    "completion": _entry("session.completion", "Print the completion script of a shell.", _SETUP),
    "version": _entry("session.version", "Show the version.", _SETUP),
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
    Connect to one:   bursar login URL, or BURSAR_URL and BURSAR_TOKEN
    """
