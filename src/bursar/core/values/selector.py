"""Label selectors and field selectors: conditions on objects for lists, watches and affinity terms.

Label selectors are written as `tier in (a,b),!old`; field selectors have a form of their own, with escapes. Both are
parsed into one Selector: terms that must all hold. `a=b` is the term `a in (b)`, so that there are four operators to
evaluate, store and test, and not six.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bursar.core.values import names
from bursar.core.values.names import quoted

TEXT_CHARS_MAX: Final = 4096
TERMS_MAX: Final = 64
VALUES_MAX: Final = 1024

# One term up to its comma or the end. The quantifiers are possessive: backtracking into a word never finds a match.
_TERM: Final = re.compile(
    r"""\s*+ (?: (?P<absent>!) \s*+ )? (?P<key>[^\s!=(),]++)
        (?: \s*+ (?P<equality>==|=|!=) \s*+ (?P<value>[^\s!=(),]*+)
          | \s++ (?P<set>in|notin) \s*+ \( (?P<values>[^()]*+) \) )?
        \s*+ (?P<end>,|\Z)""",
    re.VERBOSE | re.ASCII,
)
_FIELD_OPERATOR: Final = re.compile(r"==|!=|=")
_FIELD_TERM: Final = re.compile(r"(?:[^\\,]|\\.)*+", re.DOTALL)
_FIELD_VALUE: Final = re.compile(r"(?:[^\\,=]|\\[\\,=])*+")
_ESCAPED: Final = re.compile(r"\\(.)")
_TO_ESCAPE: Final = re.compile(r"[\\,=]")
_ASCII_SPACE: Final = " \t\r\n\f\v"


class SelectorError(ValueError):
    """A selector that cannot be parsed; the message quotes the part at fault."""


class Op(StrEnum):
    """An operator of a selector term, named as in matchExpressions."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    ABSENT = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class SelectorTerm:
    """One condition of a selector. Values are sorted and distinct, so that equal conditions are equal terms."""

    key: str
    op: Op
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector: conditions that must all hold. Without conditions it matches everything."""

    terms: tuple[SelectorTerm, ...] = ()
    # Every scheduling decision looks selectors up in dictionaries, so the hash is computed once.
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.terms))

    def __hash__(self) -> int:
        return self._hash


EVERYTHING: Final = Selector()


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Whether the selector matches these labels. As in Kubernetes, NotIn matches objects that lack the key."""
    return all(_holds(term, labels.get(term.key)) for term in selector.terms)


def matches_fields(selector: Selector, fields: Mapping[str, str]) -> bool:
    """Whether the selector matches these fields. An unset field equals the empty string, unlike a label."""
    return all(_holds(term, fields.get(term.key, "")) for term in selector.terms)


def parse(text: str) -> Selector:
    """Parse a label selector."""
    _require_short(text)
    return _selector(_label_terms(text)) if text.strip(_ASCII_SPACE) else EVERYTHING


def parse_fields(text: str, allowed: Collection[str]) -> Selector:
    r"""Parse a field selector: `=`, `==` and `!=` on the allowed fields, with `\,` `\=` and `\\` inside values."""
    _require_short(text)
    return _selector(_field_term(written, allowed) for written in _split_fields(text) if written)


def to_text(selector: Selector) -> str:
    """Format a selector; parsing the text gives an equal selector."""
    return ",".join(_term_text(term) for term in selector.terms)


def _holds(term: SelectorTerm, value: str | None) -> bool:
    match term.op:
        case Op.IN:
            return value is not None and value in term.values
        case Op.NOT_IN:
            return value is None or value not in term.values
        case Op.EXISTS:
            return value is not None
        case Op.ABSENT:
            return value is None


def _selector(terms: Iterator[SelectorTerm]) -> Selector:
    kept: list[SelectorTerm] = []
    for term in terms:
        if len(kept) == TERMS_MAX:
            raise SelectorError(f"selector has too many terms: at most {TERMS_MAX} are allowed")
        kept.append(term)
    return Selector(tuple(kept))


def _require_short(text: str) -> None:
    if len(text) > TEXT_CHARS_MAX:
        raise SelectorError(f"selector is too long: at most {TEXT_CHARS_MAX} characters are allowed")


def _label_terms(text: str) -> Iterator[SelectorTerm]:
    position, end = 0, ","
    while end:
        written = _TERM.match(text, position)
        if written is None:
            raise SelectorError(
                f"selector cannot be read at {quoted(text[position:])}: expected a term such as a=b, a in (b,c) or !a"
            )
        yield _label_term(written)
        position, end = written.end(), written["end"]


def _label_term(written: re.Match[str]) -> SelectorTerm:
    key = written["key"]
    if written["absent"]:
        if written["equality"] or written["set"]:
            raise SelectorError(f"selector term {quoted(written[0])} must not have both a leading '!' and an operator")
        return _checked(key, Op.ABSENT, [])
    if written["equality"]:
        return _checked(key, Op.NOT_IN if written["equality"] == "!=" else Op.IN, [written["value"]])
    if written["set"]:
        return _checked(key, Op.IN if written["set"] == "in" else Op.NOT_IN, _set_values(written["values"]))
    return _checked(key, Op.EXISTS, [])


def _set_values(text: str) -> list[str]:
    # Empty parentheses hold no value; a comma separates values that may be empty.
    return [value.strip(_ASCII_SPACE) for value in text.split(",")] if text.strip(_ASCII_SPACE) else []


def _checked(key: str, op: Op, values: list[str]) -> SelectorTerm:
    """Make a term of a key and values that a label can have."""
    if op in (Op.IN, Op.NOT_IN) and not values:
        raise SelectorError(f"selector for {quoted(key)} needs at least one value for {op}")
    if len(values) > VALUES_MAX:
        raise SelectorError(f"selector for {quoted(key)} has too many values: at most {VALUES_MAX} are allowed")
    for fault in names.label_key(key) + [fault for value in values for fault in names.label_value(value)]:
        raise SelectorError(f"selector: {fault}")
    return SelectorTerm(key, op, tuple(sorted(set(values))))


def _split_fields(text: str) -> Iterator[str]:
    """Split a field selector at its unescaped commas."""
    position = 0
    while position <= len(text):
        written = _FIELD_TERM.match(text, position)
        if written is None or text[written.end() : written.end() + 1] not in ("", ","):
            raise SelectorError("field selector ends in a lone backslash")
        yield written[0]
        position = written.end() + 1


def _field_term(written: str, allowed: Collection[str]) -> SelectorTerm:
    operator = _FIELD_OPERATOR.search(written)
    if operator is None:
        raise SelectorError(f"field selector term {quoted(written)} needs one of the operators =, == and !=")
    key, value = written[: operator.start()].strip(_ASCII_SPACE), written[operator.end() :]
    if key not in allowed:
        raise SelectorError(
            f"field {quoted(key)} is not supported in a field selector: supported are {', '.join(sorted(allowed))}"
        )
    if not _FIELD_VALUE.fullmatch(value):
        raise SelectorError(rf"field selector value {quoted(value)} must write ',' '=' and '\' as '\,' '\=' and '\\'")
    return SelectorTerm(key, Op.NOT_IN if operator[0] == "!=" else Op.IN, (_ESCAPED.sub(r"\1", value),))


def _term_text(term: SelectorTerm) -> str:
    match term.op:
        case Op.EXISTS:
            return term.key
        case Op.ABSENT:
            return f"!{term.key}"
    if len(term.values) == 1:
        # Only values of fields can hold characters to escape; values of labels cannot.
        value = _TO_ESCAPE.sub(r"\\\g<0>", term.values[0])
        return f"{term.key}{'=' if term.op is Op.IN else '!='}{value}"
    return f"{term.key} {'in' if term.op is Op.IN else 'notin'} ({','.join(term.values)})"
