"""Patches of objects: JSON merge patch (RFC 7396), strategic merge patch and JSON Patch (RFC 6902).

All work on plain JSON values and never change their arguments; the result may share unchanged parts with the target.
Depth, the number of operations, and the size of copies and moves are bounded, because a patch is a small program from
an untrusted client.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bursar.core.values.names import quoted

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

DEPTH_MAX: Final = 64
OPERATIONS_MAX: Final = 10_000
# In characters of keys and strings plus one for each value: about the size of the largest body that is read.
COPIED_SIZE_MAX: Final = 3 * 1024 * 1024
# Array elements that all operations together may shift to insert or remove an element.
MOVED_MAX: Final = 1_000_000
# Values that all operations together may copy or move.
HANDLED_MAX: Final = 200_000

_PATCH: Final = "$patch"
_RETAIN_KEYS: Final = "$retainKeys"
_DELETE_FROM: Final = "$deleteFromPrimitiveList/"
_SET_ORDER: Final = "$setElementOrder/"
_END: Final = "-"
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_BAD_ESCAPE: Final = re.compile(r"~(?![01])")


class PatchError(ValueError):
    """A patch that is malformed, or does not fit its target."""


class TestFailed(PatchError):
    """A failed `test` operation of a JSON Patch: the object has changed since the client read it."""


# --- JSON merge patch (RFC 7396)


def merge(target: Json, patch: Json) -> Json:
    """Apply a JSON merge patch: objects merge field by field, null removes a field, any other value replaces."""
    _require_depth(target, DEPTH_MAX)
    _require_depth(patch, DEPTH_MAX)
    return _merged(target, patch)


def _merged(target: Json, patch: Json) -> Json:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for field, value in patch.items():
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _merged(result.get(field), value)
    return result


# --- Strategic merge patch


def strategic(target: Json, patch: Json, merge_keys: Mapping[str, str]) -> Json:
    """Apply a strategic merge patch: a merge patch that also merges the lists in merge_keys and obeys `$` directives.

    merge_keys maps a list's dotted path (`spec.taints`; elements add nothing to a path) to the merge key of its
    elements, or to the empty string for a list of plain values that is merged as a set. Other lists are replaced.
    """
    if not isinstance(target, dict) or not isinstance(patch, dict):
        raise PatchError("a strategic merge patch and its target must be objects")
    _require_depth(target, DEPTH_MAX)
    _require_depth(patch, DEPTH_MAX)
    return _strategic_object(target, patch, "", merge_keys)


def _strategic_object(
    target: Json, patch: dict[str, Json], path: str, merge_keys: Mapping[str, str]
) -> dict[str, Json]:
    if _PATCH in patch:
        return _directed_object(patch, path)
    result = _retained(dict(target) if isinstance(target, dict) else {}, patch, path)
    _delete_from_lists(result, patch)
    for field, value in patch.items():
        if _is_directive(field):
            continue
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _strategic_value(result.get(field), value, _join(path, field), merge_keys)
    _order_lists(result, patch, path, merge_keys)
    return result


def _strategic_value(target: Json, patch: Json, path: str, merge_keys: Mapping[str, str]) -> Json:
    if isinstance(patch, dict):
        return _strategic_object(target, patch, path, merge_keys)
    if isinstance(patch, list):
        return _strategic_list(target if isinstance(target, list) else [], patch, path, merge_keys)
    return patch


def _directed_object(patch: dict[str, Json], path: str) -> dict[str, Json]:
    """Result of `$patch` on an object: the rest of the patch or, for delete, an empty object as in Kubernetes."""
    if _directive_of(patch, path) == "delete":
        return {}
    return {field: value for field, value in patch.items() if field != _PATCH}


def _retained(target: dict[str, Json], patch: dict[str, Json], path: str) -> dict[str, Json]:
    """The target's fields that `$retainKeys` names. Clients use it to clear the other members of a union."""
    if _RETAIN_KEYS not in patch:
        return target
    kept = {field for field in _listed(patch, _RETAIN_KEYS) if isinstance(field, str)}
    stray = [field for field in patch if not _is_directive(field) and field not in kept]
    if stray:
        raise PatchError(f"{_place(path)}: field {quoted(stray[0])} is set but not named in {_RETAIN_KEYS}")
    return {field: value for field, value in target.items() if field in kept}


def _delete_from_lists(result: dict[str, Json], patch: dict[str, Json]) -> None:
    for directive, field in _directives(patch, _DELETE_FROM):
        deleted = {_identity(value) for value in _listed(patch, directive)}
        present = result.get(field)
        if isinstance(present, list):
            result[field] = [value for value in present if _key_of(value, "") not in deleted]


def _strategic_list(target: list[Json], patch: list[Json], path: str, merge_keys: Mapping[str, str]) -> list[Json]:
    directives = {_directive_of(element, path) for element in patch}
    if "replace" in directives:
        return [element for element in patch if _directive_of(element, path) is None]
    key = merge_keys.get(path)
    if key is None and "delete" in directives:
        raise PatchError(f"{_place(path)}: {_PATCH}: delete needs a merge key, and this list has none")
    if key is None:
        return patch
    if key == "":
        return list({_identity(value): value for value in target + patch}.values())
    return _merged_list(target, patch, path, merge_keys)


def _merged_list(target: list[Json], patch: list[Json], path: str, merge_keys: Mapping[str, str]) -> list[Json]:
    """Merge elements of known keys in place and append new ones; `$patch: delete` removes all elements of its key."""
    key = merge_keys[path]
    deleted = {_required_key(element, key, path) for element in patch if _directive_of(element, path)}
    result = [element for element in target if _key_of(element, key) not in deleted]
    places: dict[object, int] = {}
    for index, element in enumerate(result):
        places.setdefault(_key_of(element, key), index)
    for element in patch:
        if isinstance(element, dict) and _PATCH in element:
            continue
        index = places.setdefault(_required_key(element, key, path), len(result))
        if index == len(result):
            result.append({})
        result[index] = _strategic_value(result[index], element, path, merge_keys)
    return result


def _order_lists(result: dict[str, Json], patch: dict[str, Json], path: str, merge_keys: Mapping[str, str]) -> None:
    for directive, field in _directives(patch, _SET_ORDER):
        list_path = _join(path, field)
        order, present, key = _listed(patch, directive), result.get(field), merge_keys.get(list_path)
        # A list without a merge key was replaced, so it already has the client's order.
        if isinstance(present, list) and key is not None:
            result[field] = _ordered(present, order, key, list_path)


def _ordered(elements: list[Json], order: list[Json], key: str, path: str) -> list[Json]:
    """Sort the listed elements into the client's order; other elements keep their places."""
    ranks = {_required_key(element, key, path): rank for rank, element in enumerate(order)}
    slots = [index for index, element in enumerate(elements) if _key_of(element, key) in ranks]
    listed = sorted((elements[slot] for slot in slots), key=lambda element: ranks[_key_of(element, key)])
    result = list(elements)
    for slot, element in zip(slots, listed, strict=True):
        result[slot] = element
    return result


def _required_key(element: Json, key: str, path: str) -> object:
    identity = _key_of(element, key)
    if identity is None:
        needed = f"an object with the merge key {quoted(key)}" if key else "a plain value"
        raise PatchError(f"{_place(path)}: every element must be {needed}")
    return identity


def _key_of(element: Json, key: str) -> object:
    """The element's merge key in its list; None without one."""
    value = element
    if key:
        value = element.get(key) if isinstance(element, dict) else None
    return None if value is None or isinstance(value, dict | list) else _identity(value)


def _identity(value: Json) -> object:
    """A plain value as a dictionary key. In Python true equals 1; in JSON it does not."""
    if isinstance(value, dict | list):
        raise PatchError("a list that is merged by its plain values must not hold objects or arrays")
    return isinstance(value, bool), value


def _directive_of(element: Json, path: str) -> str | None:
    if not isinstance(element, dict) or _PATCH not in element:
        return None
    directive = element[_PATCH]
    if not isinstance(directive, str) or directive not in ("delete", "replace"):
        raise PatchError(f"{_place(path)}: {_PATCH} must be delete or replace")
    return directive


def _is_directive(field: str) -> bool:
    return field.startswith("$") and (field == _RETAIN_KEYS or field.startswith((_DELETE_FROM, _SET_ORDER)))


def _directives(patch: dict[str, Json], prefix: str) -> Iterator[tuple[str, str]]:
    return ((field, field.removeprefix(prefix)) for field in patch if field.startswith(prefix))


def _listed(patch: dict[str, Json], directive: str) -> list[Json]:
    value = patch[directive]
    if not isinstance(value, list):
        raise PatchError(f"{quoted(directive)} must be an array")
    return value


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _place(path: str) -> str:
    return quoted(path) if path else "patch"


# --- JSON Patch (RFC 6902)


@dataclass(slots=True)
class _Draft:
    """The working copy of the document, so that a patch that fails half-way has changed nothing.

    The document is the field with the empty name of `holder`, so that the root has a parent like any other value.
    """

    holder: dict[str, Json]
    copied_size: int = 0
    handled: int = 0
    moved: int = 0

    def handle(self, value: Json) -> None:
        """Count the values that are copied or moved."""
        self.handled += _count(value)
        if self.handled > HANDLED_MAX:
            raise PatchError(f"the patch copies and moves more than {HANDLED_MAX} values")

    def move(self, values: int) -> None:
        """Count shifted array elements: this work grows with the document and not with the patch."""
        self.moved += values
        if self.moved > MOVED_MAX:
            raise PatchError(f"the patch shifts more than {MOVED_MAX} array elements")


Operation: TypeAlias = Mapping[str, Json]


def json_patch(target: Json, operations: Json) -> Json:
    """Apply a JSON Patch: all operations in order; one that fails refuses the whole patch."""
    if not isinstance(operations, list):
        raise PatchError("a JSON Patch must be an array of operations")
    if len(operations) > OPERATIONS_MAX:
        raise PatchError(f"a JSON Patch may have at most {OPERATIONS_MAX} operations, not {len(operations)}")
    _require_depth(target, DEPTH_MAX)
    draft = _Draft({"": _copied(target)})
    for index, operation in enumerate(operations):
        _apply(draft, operation, f"operation {index}")
    return draft.holder[""]


def _apply(draft: _Draft, operation: Json, place: str) -> None:
    if not isinstance(operation, dict):
        raise PatchError(f"{place} must be an object")
    name = operation.get("op")
    if not isinstance(name, str) or name not in _OPERATIONS:
        raise PatchError(f"{place}: op must be one of {', '.join(_OPERATIONS)}")
    try:
        _OPERATIONS[name](draft, operation)
    except PatchError as fault:
        raise type(fault)(f"{place} ({name}): {fault}") from None


def _add(draft: _Draft, operation: Operation) -> None:
    _put(draft, _pointer(operation, "path"), _copied_value(operation))


def _remove(draft: _Draft, operation: Operation) -> None:
    _take(draft, _pointer(operation, "path"))


def _replace(draft: _Draft, operation: Operation) -> None:
    tokens, value = _pointer(operation, "path"), _copied_value(operation)
    _require_depth(value, DEPTH_MAX - len(tokens))
    parent, token = _parent(draft, tokens)
    if isinstance(parent, dict):
        parent[_present(parent, token)] = value
    else:
        parent[_index(token, len(parent))] = value


def _move(draft: _Draft, operation: Operation) -> None:
    source, destination = _pointer(operation, "from"), _pointer(operation, "path")
    if source == destination[: len(source)] and source != destination:
        raise PatchError("a value cannot be moved into itself")
    if source == destination:
        _found(draft, source)
    else:
        value = _take(draft, source)
        draft.handle(value)
        _put(draft, destination, value)


def _copy(draft: _Draft, operation: Operation) -> None:
    value = _found(draft, _pointer(operation, "from"))
    # Copying a value into itself doubles it; forty such operations would exhaust any memory.
    draft.handle(value)
    draft.copied_size += _size(value)
    if draft.copied_size > COPIED_SIZE_MAX:
        raise PatchError(f"the patch copies more than {COPIED_SIZE_MAX} characters")
    _put(draft, _pointer(operation, "path"), _copied(value))


def _test(draft: _Draft, operation: Operation) -> None:
    expected = _value(operation)
    if not _same(_found(draft, _pointer(operation, "path")), expected):
        raise TestFailed(f"the value at {quoted(str(operation['path']))} is not the expected one")


_OPERATIONS: Final[dict[str, Callable[[_Draft, Operation], None]]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "move": _move,
    "copy": _copy,
    "test": _test,
}


def _value(operation: Operation) -> Json:
    if "value" not in operation:
        raise PatchError("value is missing")
    return operation["value"]


def _copied_value(operation: Operation) -> Json:
    value = _value(operation)
    _require_depth(value, DEPTH_MAX)
    return _copied(value)


def _pointer(operation: Operation, member: str) -> list[str]:
    """Parse a JSON pointer (RFC 6901) into its tokens."""
    pointer = operation.get(member)
    if not isinstance(pointer, str):
        raise PatchError(f"{member} is missing or not a string")
    if pointer and not pointer.startswith("/"):
        raise PatchError(f"{member} {quoted(pointer)} must be empty or begin with '/'")
    if _BAD_ESCAPE.search(pointer):
        raise PatchError(f"{member} {quoted(pointer)} must write '~' as '~0'")
    tokens = [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]
    if len(tokens) > DEPTH_MAX:
        raise PatchError(f"{member} is deeper than {DEPTH_MAX} levels")
    return tokens


def _found(draft: _Draft, tokens: Sequence[str]) -> Json:
    value = draft.holder[""]
    for token in tokens:
        value = _child(value, token)
    return value


def _child(value: Json, token: str) -> Json:
    if isinstance(value, dict):
        return value[_present(value, token)]
    if isinstance(value, list):
        return value[_index(token, len(value))]
    raise PatchError(f"{quoted(token)} is asked of a value that is neither object nor array")


def _parent(draft: _Draft, tokens: Sequence[str]) -> tuple[dict[str, Json] | list[Json], str]:
    if not tokens:
        return draft.holder, ""
    parent = _found(draft, tokens[:-1])
    if not isinstance(parent, dict | list):
        raise PatchError(f"{quoted(tokens[-1])} is asked of a value that is neither object nor array")
    return parent, tokens[-1]


def _put(draft: _Draft, tokens: Sequence[str], value: Json) -> None:
    _require_depth(value, DEPTH_MAX - len(tokens))
    parent, token = _parent(draft, tokens)
    if isinstance(parent, dict):
        parent[token] = value
    else:
        # The index just behind the last element appends, as '-' does.
        index = len(parent) if token == _END else _index(token, len(parent) + 1)
        draft.move(len(parent) - index)
        parent.insert(index, value)


def _take(draft: _Draft, tokens: Sequence[str]) -> Json:
    if not tokens:
        raise PatchError("the whole document cannot be removed")
    parent, token = _parent(draft, tokens)
    if isinstance(parent, dict):
        return parent.pop(_present(parent, token))
    index = _index(token, len(parent))
    draft.move(len(parent) - index)
    return parent.pop(index)


def _present(parent: dict[str, Json], token: str) -> str:
    if token not in parent:
        raise PatchError(f"field {quoted(token)} does not exist")
    return token


def _index(token: str, end: int) -> int:
    if not _INDEX.fullmatch(token):
        raise PatchError(f"{quoted(token)} is not an index of an array")
    if int(token) >= end:
        raise PatchError(f"index {token} is beyond the end of the array")
    return int(token)


def _same(left: Json, right: Json) -> bool:
    """Equality of JSON values: 1 equals 1.0, and true does not equal 1 as it does in Python."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(value, right[field]) for field, value in left.items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


def _copied(value: Json) -> Json:
    if isinstance(value, dict):
        return {field: _copied(inner) for field, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def _size(value: Json) -> int:
    if isinstance(value, dict):
        return 1 + sum(len(field) + _size(inner) for field, inner in value.items())
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + len(value) if isinstance(value, str) else 1


def _count(value: Json) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    return 1 + sum(map(_count, value)) if isinstance(value, list) else 1


def _require_depth(value: Json, levels: int) -> None:
    """Refuse a value nested deeper than this, before other code recurses into it. An empty object has one level."""
    if not isinstance(value, dict | list):
        return
    if levels <= 0:
        raise PatchError(f"objects and arrays are nested deeper than {DEPTH_MAX} levels")
    for inner in value.values() if isinstance(value, dict) else value:
        _require_depth(inner, levels - 1)
