"""Selectors: reading the three forms, matching, and writing them back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values import selector
from bursar.core.values.selector import Op, Selector, SelectorError, SelectorTerm

FIELDS = ("metadata.name", "spec.nodeName", "status.phase")

KEYS = st.from_regex(r"([a-z][a-z.]{0,8}[a-z]/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?", fullmatch=True).filter(
    lambda key: ".." not in key
)
VALUES = st.one_of(st.just(""), st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,8}[A-Za-z0-9])?", fullmatch=True))
VALUE_SETS = st.sets(VALUES, min_size=1, max_size=4).map(lambda values: tuple(sorted(values)))
TERMS = st.one_of(
    st.builds(SelectorTerm, KEYS, st.sampled_from([Op.IN, Op.NOT_IN]), VALUE_SETS),
    st.builds(SelectorTerm, KEYS, st.sampled_from([Op.EXISTS, Op.ABSENT])),
)
SELECTORS = st.lists(TERMS, max_size=6).map(lambda terms: Selector(tuple(terms)))


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        pytest.param("", [], id="nothing selects everything"),
        pytest.param("  ", [], id="so does blank space"),
        pytest.param("a=b", [SelectorTerm("a", Op.IN, ("b",))], id="equality"),
        pytest.param("a==b", [SelectorTerm("a", Op.IN, ("b",))], id="double equality"),
        pytest.param("a!=b", [SelectorTerm("a", Op.NOT_IN, ("b",))], id="inequality"),
        pytest.param("a=", [SelectorTerm("a", Op.IN, ("",))], id="an empty value"),
        pytest.param("a in (x,y)", [SelectorTerm("a", Op.IN, ("x", "y"))], id="a set"),
        pytest.param("a in (y, x,y)", [SelectorTerm("a", Op.IN, ("x", "y"))], id="a set is sorted and distinct"),
        pytest.param("a in(x)", [SelectorTerm("a", Op.IN, ("x",))], id="no space before the parenthesis"),
        pytest.param("a in (,x)", [SelectorTerm("a", Op.IN, ("", "x"))], id="an empty value in a set"),
        pytest.param("a notin (x)", [SelectorTerm("a", Op.NOT_IN, ("x",))], id="outside a set"),
        pytest.param("a", [SelectorTerm("a", Op.EXISTS)], id="existence"),
        pytest.param("!a", [SelectorTerm("a", Op.ABSENT)], id="absence"),
        pytest.param(
            "in in (in)", [SelectorTerm("in", Op.IN, ("in",))], id="words of the grammar can be keys and values"
        ),
        pytest.param("notin", [SelectorTerm("notin", Op.EXISTS)], id="a key called notin"),
        pytest.param(
            " a = b , ! c ", [SelectorTerm("a", Op.IN, ("b",)), SelectorTerm("c", Op.ABSENT)], id="spaces anywhere"
        ),
        pytest.param(
            "bursar.io/tenant in (a,b),x!=y",
            [SelectorTerm("bursar.io/tenant", Op.IN, ("a", "b")), SelectorTerm("x", Op.NOT_IN, ("y",))],
            id="a comma inside a set does not end the term",
        ),
    ],
)
def test_reads_the_string_form(text: str, terms: list[SelectorTerm]) -> None:
    assert selector.parse(text) == Selector(tuple(terms))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("a=b,", "cannot be read", id="a comma at the end"),
        pytest.param(",a", "cannot be read", id="a comma at the beginning"),
        pytest.param("=b", "cannot be read", id="no key"),
        pytest.param("a=b c", "cannot be read", id="two values"),
        pytest.param("a in x", "cannot be read", id="a set without parentheses"),
        pytest.param("a in (x", "cannot be read", id="a set that is not closed"),
        pytest.param("a in ((x))", "cannot be read", id="nested parentheses"),
        pytest.param("a===b", "cannot be read", id="three equals signs"),
        pytest.param("a in ()", "at least one value", id="an empty set"),
        pytest.param("!a=b", "leading '!'", id="absence with a value"),
        pytest.param("a>1", "label key", id="comparison of numbers is not supported"),
        pytest.param("a/b/c=d", "label key", id="a bad key"),
        pytest.param("a=-b", "label value", id="a bad value"),
        pytest.param("a\u00a0=b", "label key", id="a space outside ASCII"),
        pytest.param("a" * 4097, "too long", id="a long text"),
        pytest.param(",".join(["a"] * 65), "too many terms", id="too many terms"),
    ],
)
def test_refuses_the_string_form(text: str, fault: str) -> None:
    with pytest.raises(SelectorError, match=fault):
        selector.parse(text)


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("a=1", True),
        ("a=2", False),
        ("a!=2", True),
        ("a!=1", False),
        ("a in (1,2)", True),
        ("a notin (1,2)", False),
        ("a", True),
        ("!a", False),
        ("a=1,b=2", False),
        ("", True),
        ("missing=1", False),
        ("missing=", False),
        ("missing!=1", True),
        ("missing notin (1,2)", True),
        ("missing", False),
        ("!missing", True),
        ("empty", True),
        ("empty=", True),
    ],
)
def test_matches_labels(text: str, selected: bool) -> None:
    assert selector.matches(selector.parse(text), {"a": "1", "empty": ""}) is selected


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("metadata.name=n1", True),
        ("metadata.name==n1", True),
        ("metadata.name!=n1", False),
        ("metadata.name=n1,status.phase=Running", False),
        ("spec.nodeName=", True),
        ("spec.nodeName!=", False),
        ("spec.nodeName!=x", True),
        ("", True),
        (",", True),
    ],
)
def test_matches_fields_and_takes_an_absent_one_for_empty(text: str, selected: bool) -> None:
    assert selector.matches_fields(selector.parse_fields(text, FIELDS), {"metadata.name": "n1"}) is selected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param(r"status.phase=a\,b", "a,b", id="a comma"),
        pytest.param(r"status.phase=a\=b", "a=b", id="an equals sign"),
        pytest.param(r"status.phase=a\\b", r"a\b", id="a backslash"),
        pytest.param(r"status.phase=a\\\,b", r"a\,b", id="a backslash and a comma"),
        pytest.param("status.phase=a in (b) c", "a in (b) c", id="words mean nothing in fields"),
    ],
)
def test_fields_can_be_escaped(text: str, value: str) -> None:
    assert selector.parse_fields(text, FIELDS).terms == (SelectorTerm("status.phase", Op.IN, (value,)),)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(
            "spec.color=red", "supported are metadata.name, spec.nodeName, status.phase", id="an unknown field"
        ),
        pytest.param("metadata.name", "needs one of the operators", id="no operator"),
        pytest.param("metadata.name=a=b", "must write", id="an equals sign that is not escaped"),
        pytest.param(r"metadata.name=a\b", "must write", id="an escape of something else"),
        pytest.param("metadata.name=a\\", "lone backslash", id="a backslash at the end"),
        pytest.param("metadata.name=" + "a" * 4096, "too long", id="a long text"),
        pytest.param(",".join(["metadata.name=a"] * 65), "too many terms", id="too many terms"),
    ],
)
def test_refuses_fields(text: str, fault: str) -> None:
    with pytest.raises(SelectorError, match=fault):
        selector.parse_fields(text, FIELDS)


@given(SELECTORS)
def test_the_string_form_reads_back(written: Selector) -> None:
    assert selector.parse(selector.to_text(written)) == written


@given(
    st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from([Op.IN, Op.NOT_IN]), st.text(max_size=12)), max_size=6)
)
def test_the_field_form_reads_back(parts: list[tuple[str, Op, str]]) -> None:
    written = Selector(tuple(SelectorTerm(key, op, (value,)) for key, op, value in parts))
    assert selector.parse_fields(selector.to_text(written), FIELDS) == written


@given(KEYS, VALUE_SETS, st.dictionaries(KEYS, VALUES))
def test_an_operator_and_its_opposite_divide_all_objects(
    key: str, values: tuple[str, ...], labels: dict[str, str]
) -> None:
    for op, opposite in ((Op.IN, Op.NOT_IN), (Op.EXISTS, Op.ABSENT)):
        given_values = values if op is Op.IN else ()
        one = selector.matches(Selector((SelectorTerm(key, op, given_values),)), labels)
        other = selector.matches(Selector((SelectorTerm(key, opposite, given_values),)), labels)
        assert one is not other


@given(st.text(alphabet="ab=!,() \\in", max_size=30))
def test_any_text_is_a_selector_or_a_refusal(text: str) -> None:
    for read in (selector.parse, lambda text: selector.parse_fields(text, ("a", "b"))):
        try:
            read(text)
        except SelectorError:
            continue


@pytest.mark.parametrize("text", ["a " * 2048, " " * 4095 + "(", "a in (" + "," * 4090, "\\" * 4095, "a" * 4095 + "("])
@pytest.mark.timeout(30)
def test_hostile_text_is_refused_quickly(text: str) -> None:
    with pytest.raises(SelectorError):
        selector.parse(text)
    with pytest.raises(SelectorError):
        selector.parse_fields(text, FIELDS)
