"""The mapping from ColdFront's attributes to Bursar's dimensions, read from a TOML file.

[attributes."GPU Count"]
dimension = "nvidia.com/gpu"

[attributes."Memory (GB)"]
dimension = "memory"
multiplier = 1      # quantity = static + multiplier × value, followed by the unit
static = 0
unit = "Gi"
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path


class MappingError(Exception):
    """A mapping file or an attribute's value that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the value of an attribute becomes a quantity of a dimension."""

    dimension: str
    multiplier: Decimal = Decimal(1)
    static: Decimal = Decimal(0)
    unit: str = ""

    def quantity(self, attribute: str, value: object) -> str:
        """The quantity of a value: `static + multiplier × value`, with the unit."""
        try:
            number = Decimal(str(value))
        except InvalidOperation:
            raise MappingError(f"attribute {attribute!r} has the value {value!r}, which is no number") from None
        if not number.is_finite() or number < 0:
            raise MappingError(f"attribute {attribute!r} has the value {value!r}: it must be 0 or more")
        return f"{_plain(self.static + self.multiplier * number)}{self.unit}"


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def load_rules(path: Path) -> dict[str, Rule]:
    """The rules of a file, by attribute."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise MappingError(f"the mapping {path} cannot be read: {error}") from error
    rules: dict[str, Rule] = {}
    for name, said in document.get("attributes", {}).items():
        unknown = set(said) - {"dimension", "multiplier", "static", "unit"}
        if unknown or not said.get("dimension"):
            what = f"unknown {', '.join(sorted(unknown))}" if unknown else "names no dimension"
            raise MappingError(f"the mapping {path}: attribute {name!r}: {what}")
        multiplier, static = Decimal(str(said.get("multiplier", 1))), Decimal(str(said.get("static", 0)))
        rules[name] = Rule(said["dimension"], multiplier, static, said.get("unit", ""))
    return rules


def quantities(rules: Mapping[str, Rule], attributes: Iterable[tuple[str, object]]) -> dict[str, str]:
    """The quantities of an allocation's attributes; attributes without a rule mean nothing to Bursar."""
    return {rules[name].dimension: rules[name].quantity(name, value) for name, value in attributes if name in rules}
