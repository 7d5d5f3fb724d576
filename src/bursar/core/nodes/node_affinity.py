"""Node affinity, taints and tolerations: whether a node's labels and taints match, and whether any node's ever could.

Labels change, so requirements that no node meets today are valid. Requirements that contradict each other are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from bursar.core.objects.ask import Effect, Operator, Requirement, Requirements, Taint, Toleration, Where

INTEGER_DIGITS_MAX: Final = 18  # so that every number fits into 64 bits
VALUES_SHOWN_MAX: Final = 4
VALUE_CHARS_SHOWN_MAX: Final = 63

# Taints of Bursar that everybody may tolerate.
OPEN_KEYS: Final = frozenset({"bursar.io/simulated"})

_COMPARING: Final = frozenset({Operator.ABOVE, Operator.BELOW, Operator.AT_LEAST, Operator.AT_MOST})


def holds(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets a requirement. A missing label meets NotIn and DoesNotExist."""
    value = labels.get(requirement.key)
    match requirement.operator:
        case Operator.IN:
            return value is not None and value in requirement.values
        case Operator.NOT_IN:
            return value is None or value not in requirement.values
        case Operator.EXISTS:
            return value is not None
        case Operator.ABSENT:
            return value is None
    number = integer(value) if value is not None else None
    return number is not None and _compares(requirement, number)


def integer(text: str) -> int | None:
    """Parse a label or value as an integer; None for any other text."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= INTEGER_DIGITS_MAX):
        return None
    return int(text)


def _compares(requirement: Requirement, number: int) -> bool:
    bound = integer(requirement.values[0]) if requirement.values else None
    if bound is None:
        return False
    match requirement.operator:
        case Operator.ABOVE:
            return number > bound
        case Operator.BELOW:
            return number < bound
        case Operator.AT_LEAST:
            return number >= bound
    return number <= bound


# Taints.


def is_reserved(reserved: Sequence[str], key: str) -> bool:
    """Whether a taint's key is reserved, by its name or by a prefix that ends in a star."""
    return key not in OPEN_KEYS and any(
        key.startswith(one[:-1]) if one.endswith("*") else key == one for one in reserved
    )


def tolerates(tolerations: Iterable[Toleration], taint: Taint, reserved: Sequence[str] = ()) -> bool:
    """Whether one of the tolerations matches a taint. A reserved taint needs a toleration with its key."""
    return any(
        one.effect in ("", taint.effect)
        and (one.key == taint.key or (not one.key and not is_reserved(reserved, taint.key)))
        and (one.exists or one.value == taint.value)
        for one in tolerations
    )


def untolerated(
    tolerations: tuple[Toleration, ...], taints: Iterable[Taint], reserved: Sequence[str] = ()
) -> tuple[Taint, ...]:  # fmt: skip
    """The taints that are not tolerated, without PreferNoSchedule, which only lowers the score."""
    return tuple(
        taint
        for taint in taints
        if taint.effect is not Effect.PREFER_NO_SCHEDULE and not tolerates(tolerations, taint, reserved)
    )


# Contradictions.


def contradiction(where: Where) -> str:
    """Why no node can ever match, whatever its labels; empty if one could."""
    if not where.required:
        return ""
    named = tuple(Requirement(key, Operator.IN, (value,)) for key, value in where.node_labels)
    clashes = [_clash(named, term) for term in where.required]
    if not all(clashes):
        return ""
    if len(clashes) == 1:
        return clashes[0]
    return f"none of the {len(clashes)} terms can ever hold; the first: {clashes[0]}"


def _clash(named: Requirements, term: Requirements) -> str:
    if not term:
        return "a term without expressions matches no node"
    by_key: dict[str, list[Requirement]] = {}
    for one in chain(named, term):
        by_key.setdefault(one.key, []).append(one)
    for key, asked in by_key.items():
        if not _can_hold(asked):
            return f"no label {key} can be all of: {', '.join(_texts(asked, named))}"
    return ""


def _can_hold(asked: list[Requirement]) -> bool:
    """Whether some value of one label, or its absence, meets all of these requirements.

    A number in a range has infinitely many spellings (7, 07, 007), so excluded values matter only against a list of
    allowed ones.
    """
    if all(one.operator in (Operator.ABSENT, Operator.NOT_IN) for one in asked):
        return True
    if any(one.operator is Operator.ABSENT for one in asked):
        return False
    least, most = _range([one for one in asked if one.operator in _COMPARING])
    lists = [one.values for one in asked if one.operator is Operator.IN]
    if not lists:
        return least <= most
    excluded = chain.from_iterable(one.values for one in asked if one.operator is Operator.NOT_IN)
    allowed = set(lists[0]).intersection(*lists[1:]).difference(excluded)
    if not any(one.operator in _COMPARING for one in asked):
        return bool(allowed)
    return any(least <= number <= most for value in allowed if (number := integer(value)) is not None)


def _range(comparing: list[Requirement]) -> tuple[int, int]:
    """The least and the greatest integer that meet the comparisons; least > most if there is none."""
    least, most = -(10**INTEGER_DIGITS_MAX) + 1, 10**INTEGER_DIGITS_MAX - 1
    for one in comparing:
        bound = integer(one.values[0]) if one.values else None
        if bound is None:
            return 1, 0
        match one.operator:
            case Operator.ABOVE:
                least = max(least, bound + 1)
            case Operator.BELOW:
                most = min(most, bound - 1)
            case Operator.AT_LEAST:
                least = max(least, bound)
            case _:
                most = min(most, bound)
    return least, most


def _texts(asked: list[Requirement], named: Requirements) -> Iterator[str]:
    for one in asked:
        if one in named:
            yield f"nodeSelector {_shown(one.values)}"
        elif one.operator in (Operator.IN, Operator.NOT_IN):
            yield f"{one.operator} ({_shown(one.values)})"
        else:
            yield f"{one.operator} {_shown(one.values)}".rstrip()


def _shown(values: tuple[str, ...]) -> str:
    shown = [value[:VALUE_CHARS_SHOWN_MAX] for value in values[:VALUES_SHOWN_MAX]]
    return ", ".join([*shown, f"and {len(values) - len(shown)} more"] if len(values) > len(shown) else shown)
