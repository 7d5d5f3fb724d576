"""Maps from dimension to quantity, on the wire and as exact amounts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from msgspec import UnsetType

from bursar.core.quota.units import EVERY_DIMENSION
from bursar.core.values.names import qualified_name
from bursar.core.values.quantity import QuantityError, amount, format_amount
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.meta import Quantity

DIMENSIONS_MAX = 64
MARKS_MAX = 8  # warnings of one dimension


def quantity_text(value: Quantity) -> str | int:
    """The text of a quantity. YAML reads unquoted text as numbers; `repr` returns the shortest equal text."""
    return repr(value) if isinstance(value, float) else value


def dimension_name(name: str) -> str:
    """Normalise a dimension's name: `requests.cpu` is another name of `cpu`."""
    return name.removeprefix("requests.")


# Submissions repeat a few pairs. Only valid entries are cached, and valid entries are short.
@lru_cache(8192, typed=True)
def _read(name: str, value: Quantity) -> tuple[str, int]:
    """Parse (dimension, amount) of one entry; raises QuantityError for a fault in either."""
    if faults := qualified_name(name):
        raise QuantityError(faults[0])
    dimension = dimension_name(name)
    return dimension, amount(dimension, quantity_text(value))


def amounts(given: Mapping[str, Quantity] | UnsetType) -> dict[str, int]:
    """Parse exact amounts; call it only on a map without `amounts_faults`."""
    if isinstance(given, UnsetType):
        return {}
    return dict([_read(name, value) for name, value in given.items()])


def canonical(given: Mapping[str, Quantity]) -> dict[str, str]:
    return {
        name: format_amount(dimension_name(name), amount(dimension_name(name), quantity_text(value)))
        for name, value in given.items()
    }


def amounts_faults(field: str, given: Mapping[str, Quantity] | UnsetType) -> list[Cause]:
    if isinstance(given, UnsetType):
        return []
    if len(given) > DIMENSIONS_MAX:
        return [field_fault(field, f"at most {DIMENSIONS_MAX} dimensions may be named, got {len(given)}")]
    faults: list[Cause] = []
    seen: dict[str, str] = {}
    for name, value in given.items():
        try:
            dimension, _ = _read(name, value)
        except QuantityError as error:
            faults.append(field_fault(f"{field}[{name[:63]}]", str(error)))
            continue
        if dimension in seen:
            faults.append(field_fault(f"{field}[{name}]", f"names the same dimension as {seen[dimension]}"))
        seen[dimension] = name
    return faults


def warn_at_of(given: Mapping[str, list[int]] | UnsetType) -> dict[str, tuple[int, ...]] | None:
    """Percentages of limits at which to warn, by dimension or `*`; None if they are not given."""
    if isinstance(given, UnsetType):
        return None
    return {name if name == EVERY_DIMENSION else dimension_name(name): tuple(sorted(at)) for name, at in given.items()}


def warn_at_faults(field: str, given: Mapping[str, list[int]] | UnsetType) -> list[Cause]:
    if isinstance(given, UnsetType):
        return []
    faults = amounts_faults(field, {name: 0 for name in given if name != EVERY_DIMENSION})
    for name, marks in given.items():
        if len(marks) > MARKS_MAX or len(set(marks)) < len(marks) or not all(1 <= one <= 100 for one in marks):
            message = f"must be at most {MARKS_MAX} different percentages from 1 to 100"
            faults.append(field_fault(f"{field}[{name[:63]}]", message))
    return faults


def show_amounts(given: object) -> str:
    if not isinstance(given, Mapping) or not given:
        return "<none>"
    return ", ".join(f"{name}: {value}" for name, value in sorted(given.items()))
