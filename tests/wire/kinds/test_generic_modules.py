"""Generic modules ask a kind's hooks and never its name: none says the name or the plural of a kind, or imports it."""

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import bursar
from bursar.core.values.access import RESERVED_WORK
from bursar.loops.informer import TREE_KINDS
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.kinds.registry import KINDS
from bursar.wire.shared.kind import Kind

SOURCE = Path(bursar.__file__).parent
PACKAGES = ("core", "store", "wire/shared", "wire/reports", "commands", "ops", "api", "loops", "rpc", "client", "cli")
NAMES = {name for kind in KINDS for name in (kind.name, kind.plural)}

# Modules that are about a kind, by pattern: the names that they may say, and what they are.
ABOUT = {
    # Words that are no kinds: dimensions of quotas, fields of reports, a quota's enforcement and scope, parts of gangs.
    "core/*": ("nodes", "allocations", "tenants"),
    "core/objects/pending_reason.py": ("members",),
    "core/quota/satisfiable.py": ("members",),
    "core/quota/tenant_tree.py": ("Queue", "PriorityClass"),
    "cli/quota/*": ("Namespace", "Tenant", "tenants", "tiers", "Queue"),
    "cli/approval/*": ("Namespace", "Tenant", "User", "tenants"),
    "cli/shell/limit_notes.py": ("tenants", "Queue"),
    # Placements are of allocations.
    "core/nodes/node.py": ("Allocation",),
    "store/nodes/heartbeat.py": ("Allocation",),
    "store/credit/agentless_billing.py": ("Allocation",),
    # The tree is made of these, and the cluster state of the leader too: each has its own place there.
    "commands/quota/*": ("Namespace", "PriorityClass", "ResourceQuota", "Settings", "Tenant", "Tier"),
    "ops/write_path/tenant_tree_write.py": ("Namespace", "PriorityClass", "Queue", "ResourceQuota", "Tenant"),
    "loops/informer.py": (*TREE_KINDS, "Allocation", "Job", "Node", "Queue"),
    # Registries: which kinds have commands, creations, routes and figures of their own.
    "commands/lifecycle/dispatch.py": ("Allocation", "Job", "Namespace", "Node"),
    "ops/lifecycle/create.py": ("Allocation", "Job", "Node", "Queue", "QuotaRequest"),
    # The kinds whose approval does more than charge, and the one that changes a tenant.
    "ops/approval/decide.py": ("Job", "QuotaRequest"),
    "commands/approval/limits.py": ("Tenant",),
    "api/site/routes.py": ("Allocation", "Node", "Tenant"),
    "api/objects/figures.py": ("Allocation", "Node", "ResourceQuota", "User"),
    # The first objects of a new installation.
    "ops/lifecycle/bootstrap.py": ("Namespace", "PriorityClass", "Queue", "Settings", "Tenant"),
    # What is asked about tenants: their quotas, their usage, their budgets.
    "api/quota/*": ("Tenant",),
    "api/usage/*": ("Tenant", "users"),
    "commands/usage/budget_alert.py": ("Tenant",),
    # OpenShift's names for namespaces, identities and members.
    "api/openshift/*": ("Identity", "Member", "Namespace", "Tenant", "User"),
    # A discovery document, a review and a seat have fields of these names.
    "api/access/review.py": ("groups",),
    "api/http/seats.py": ("users",),
    # Every object may ask for a priority class that a permit must know.
    "commands/objects/object.py": ("PriorityClass",),
    # Work, and what is asked about it.
    "api/workloads/*": ("Allocation", "Job", "Node", "Queue", "allocations"),
    "api/objects/queue_position.py": ("Allocation", "Job"),
    "commands/workloads/*": ("Allocation", "Queue"),
    "commands/workloads/allocation.py": ("nodes",),
    "ops/workloads/*": ("Allocation", "Job", "PriorityClass", "Queue"),
    "loops/jobs.py": ("Allocation", "Job"),
    "ops/scheduling/plan_commands.py": ("Allocation",),
    "rpc/codec.py": ("Job",),
    "cli/workloads/*": ("Allocation", "Job", "allocations", "jobs", "nodes", "priorityclasses", "queues", "Namespace"),
    "cli/workloads/status.py": ("User",),
    # Nodes, and what their agents are told.
    "api/nodes/*": ("Allocation", "Node"),
    "loops/drain.py": ("Node",),
    "rpc/hub.py": ("Allocation", "Node", "Settings", "Tenant"),
    "cli/nodes/*": ("Node", "Queue", "User", "nodes"),
    "cli/shell/options.py": ("nodes",),
    # Namespaces that are emptied; tenants whose budgets are watched.
    "loops/housekeeping.py": ("Namespace", "namespaces"),
    "loops/budget.py": ("Tenant",),
    "loops/quota_warning.py": ("Tenant",),
    # Kubernetes' own: paths inside a namespace, and what kubectl sends as protobuf.
    "api/site/discovery.py": ("groups", "namespaces"),
    "wire/shared/protobuf.py": ("Namespace", "ResourceQuota"),
    # Commands that take a tenant, a node or a namespace, or print one.
    "cli/credit/*": ("User", "tenants"),
    "cli/session/*": ("Namespace", "Node", "Tenant", "User", "nodes", "tenants", "users"),
    "cli/objects/create.py": ("Namespace",),
    "cli/objects/describe.py": ("Namespace",),
    "cli/objects/edit.py": ("tenants",),
    "cli/objects/webhook.py": ("Tenant", "tenants"),
    "cli/shell/completers.py": ("allocations",),
    "cli/shell/connection.py": ("allocations", "jobs", "namespaces"),
    "cli/shell/output.py": ("Namespace",),
}


def _fields(tree: ast.AST) -> set[int]:
    """Constants that name a field of a document: document["nodes"], row.get("nodes")."""
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Constant() as field):
                found.add(id(field))
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant() as field, *_]):
                found.add(id(field))
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    """The names of kinds that are imported: `from bursar.wire.kinds.job import JOB`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bursar.wire.kinds."):
            module = import_module(str(node.module))
            kinds = (getattr(module, alias.name) for alias in node.names)
            yield from (kind.name for kind in kinds if isinstance(kind, Kind))


def _said() -> dict[str, set[str]]:
    """Names of kinds by module."""
    said: dict[str, set[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        fields = _fields(tree)
        words = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in fields
        } | set(_imported(tree))
        if path == SOURCE / "core/values/access.py":
            words -= set(RESERVED_WORK)
        if words:
            said[path.relative_to(SOURCE).as_posix()] = {str(word) for word in words}
    return said


def test_no_generic_module_says_the_name_of_a_kind() -> None:
    for module, words in _said().items():
        allowed = {word for pattern, names in ABOUT.items() if fnmatch(module, pattern) for word in names}
        assert words <= allowed, f"{module} asks for a kind by name, where a hook of Kind could answer"


def test_every_exception_is_needed() -> None:
    said = _said()
    for pattern, names in ABOUT.items():
        there = set().union(*(words for module, words in said.items() if fnmatch(module, pattern)))
        assert set(names) <= there, f"{pattern} no longer says {set(names) - there}"


def test_statements_and_the_index_of_the_tree_list_its_kinds() -> None:
    """PostgreSQL uses the partial index only where a statement repeats its list. Queues change with the tree, but are
    no part of it."""
    tree = {kind.name for kind in KINDS if kind.in_tree} - {QUEUE.name}
    assert tree == TREE_KINDS
    sql = (SOURCE / "store/sql/quota/tenant_tree.sql").read_text(encoding="utf-8")
    index = (SOURCE / "store/sql/migrations/0014_permits.sql").read_text(encoding="utf-8")
    lists = [set(re.findall(r"'(\w+)'", found)) for found in re.findall(r"kind IN \(([^)]*)\)", sql + index)]
    assert lists.count(tree) == 3
    assert all(found <= tree for found in lists)
