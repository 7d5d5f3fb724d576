"""Edits as values: the next version of an object is decided without a database."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bursar.commands.command import Unchanged
from bursar.commands.lifecycle.edit import SPEC_REMOVED, Edit
from bursar.commands.objects.object import ChangeObject
from bursar.core.objects.object import Key, Origin, Stored
from bursar.core.quota import tenant_tree
from bursar.core.quota.tenant_tree import Tree
from bursar.core.values.access import Identity, Role
from bursar.core.values.patch import PatchError, merge
from bursar.core.values.refusal import Code, Refusal
from bursar.wire.kinds.namespace import NAMESPACE
from bursar.wire.kinds.queue import QUEUE
from bursar.wire.kinds.tenant import TENANT
from bursar.wire.shared.document import decode, encode
from bursar.wire.shared.kind import Kind
from bursar.wire.shared.reading import ObjectPath

ADMIN = Identity("root", Role.SYSTEM_ADMIN)
BOSS = Identity("boss", Role.TENANT_ADMIN, tenant="ml")
TREE = Tree(tenants={name: tenant_tree.Tenant(name) for name in ("ml", "physics")})


def stored(kind: Kind, spec: dict[str, Any], *, tenant: str = "", labels: dict[str, str] | None = None) -> Stored:
    metadata = {"name": "one", "uid": "u-1", "generation": 1, "labels": labels or {}}
    doc = encode({"apiVersion": "v1", "kind": kind.name, "metadata": metadata, "spec": spec})
    return Stored(Key(kind.name, "", "one"), "u-1", tenant, labels or {}, {}, doc, b"{}", revision=7)


def edit_of(kind: Kind, patch: Callable[[dict[str, Any]], Any], who: Identity = ADMIN, **options: Any) -> Edit:
    origin = Origin(who.actor, "patch")
    return Edit(kind=kind, at=ObjectPath(name="one"), patch=patch, identity=who, origin=origin, tree=TREE, **options)


def next_of(kind: Kind, before: Stored, patch: dict[str, Any], *, who: Identity = ADMIN, **options: Any) -> Any:
    """The stored object after a merge patch."""
    edit = edit_of(kind, lambda document: merge(document, patch), who, **options)
    return edit.next(before, decode(before.doc, before.status, before.revision))


def test_the_next_version_is_a_command_for_the_version_that_was_read() -> None:
    command = next_of(QUEUE, stored(QUEUE, {"profile": "ml"}), {"spec": {"profile": "hpc"}})
    assert isinstance(command, ChangeObject)
    assert command.expected == 7
    after = msgspec.json.decode(command.draft.doc)
    assert (after["spec"], after["metadata"]["generation"]) == ({"profile": "hpc"}, 2)


@pytest.mark.parametrize("patch", [{}, {"spec": {"profile": "ml"}}, {"metadata": {"uid": "u-1"}}])
def test_an_edit_that_changes_nothing_is_no_command(patch: dict[str, Any]) -> None:
    before = stored(QUEUE, {"profile": "ml"})
    assert next_of(QUEUE, before, patch) == Unchanged(before)


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ({"spec": {"profile": "nonsense"}}, Code.INVALID),
        ({"spec": {"unknown": 1}}, Code.INVALID),
        ({"metadata": {"resourceVersion": "6"}}, Code.CONFLICT),
        ({"metadata": {"uid": "u-2"}}, Code.CONFLICT),
        ({"metadata": {"name": "two"}}, Code.INVALID),
        ({"spec": None}, Code.INVALID),
    ],
)
def test_an_edit_may_be_refused(patch: dict[str, Any], code: Code) -> None:
    refused = next_of(QUEUE, stored(QUEUE, {"profile": "ml"}), patch)
    assert isinstance(refused, Refusal)
    assert refused.code is code


def test_a_spec_is_lost_only_where_that_is_said() -> None:
    before = stored(TENANT, {"weight": 2})
    assert next_of(TENANT, before, {"spec": None}).message == SPEC_REMOVED
    assert isinstance(next_of(TENANT, before, {"spec": None}, lacks_spec=False), ChangeObject)


def test_a_status_write_leaves_the_rest_and_another_write_the_status() -> None:
    before = stored(TENANT, {"weight": 2})
    condition = {"type": "BudgetWarning", "status": "True"}
    both = {"spec": {"weight": 3}, "status": {"conditions": [condition]}}
    status = next_of(TENANT, before, both, status=True)
    assert msgspec.json.decode(status.draft.doc)["spec"] == {"weight": 2}
    assert msgspec.json.decode(status.draft.status) == {"conditions": [condition]}
    whole = next_of(TENANT, before, both)
    assert msgspec.json.decode(whole.draft.doc)["spec"] == {"weight": 3}
    assert whole.draft.status == b"{}"


def test_nobody_moves_a_namespace_into_a_tenant_that_they_do_not_see() -> None:
    before = stored(NAMESPACE, {}, tenant="ml", labels={"bursar.io/tenant": "ml"})
    moved = {"metadata": {"labels": {"bursar.io/tenant": "physics"}}}
    refused = next_of(NAMESPACE, before, moved, who=BOSS)
    assert (refused.code, refused.message) == (Code.FORBIDDEN, "you may not put a namespace into tenant 'physics'")
    assert next_of(NAMESPACE, before, moved).draft.tenant == "physics"


def test_what_the_kind_does_to_the_checked_object_is_stored() -> None:
    def pin(queue: Any) -> None:
        queue.spec.description = "pinned"

    command = next_of(QUEUE, stored(QUEUE, {"profile": "ml"}), {"spec": {"profile": "hpc"}}, settle=pin)
    assert msgspec.json.decode(command.draft.doc)["spec"]["description"] == "pinned"


def test_a_patch_that_cannot_be_applied_is_refused() -> None:
    def broken(_: dict[str, Any]) -> Any:
        raise PatchError("no such path")

    before = stored(QUEUE, {})
    refused = edit_of(QUEUE, broken).next(before, decode(before.doc, before.status, before.revision))
    assert isinstance(refused, Refusal)
    assert refused.message == "the patch cannot be applied: no such path"
