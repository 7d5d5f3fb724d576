"""Quantities: what is read, what is refused, and that reading and writing agree."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values import quantity
from bursar.core.values.quantity import AMOUNT_MAX, UNLIMITED, QuantityError

DIMENSIONS = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "requests.storage", "pods", "disk_bytes"])
AMOUNTS = st.integers(0, AMOUNT_MAX)


@pytest.mark.parametrize(
    ("dimension", "text", "expected"),
    [
        pytest.param("cpu", "1", 1_000, id="a whole core is a thousand thousandths"),
        pytest.param("cpu", 2, 2_000, id="a JSON integer is a quantity"),
        pytest.param("cpu", "500m", 500, id="milli"),
        pytest.param("cpu", "0.5", 500, id="a fraction"),
        pytest.param("cpu", ".5", 500, id="a fraction without its zero"),
        pytest.param("cpu", "1.0001", 1_001, id="finer than a thousandth rounds up"),
        pytest.param("cpu", "1n", 1, id="a nano-core is not nothing"),
        pytest.param("cpu", "1500u", 2, id="micro rounds up"),
        pytest.param("nvidia.com/gpu", "8", 8_000, id="extended resources are in thousandths"),
        pytest.param("pods", "10k", 10_000_000, id="kilo"),
        pytest.param("pods", "1e3", 1_000_000, id="an exponent"),
        pytest.param("pods", "1E3", 1_000_000, id="a capital exponent is not exa"),
        pytest.param("pods", "2e-3", 2, id="a negative exponent"),
        pytest.param("pods", "1e+1", 10_000, id="a signed exponent"),
        pytest.param("memory", "40Gi", 42_949_672_960, id="gibibytes"),
        pytest.param("memory", "1.5Ki", 1_536, id="a fraction of a binary unit"),
        pytest.param("memory", "1G", 10**9, id="gigabytes are decimal"),
        pytest.param("memory", "1E", 10**18, id="exa without digits is a suffix"),
        pytest.param("memory", "7Ei", 7 * 2**60, id="exbibytes"),
        pytest.param("memory", "100m", 1, id="a tenth of a byte is a byte"),
        pytest.param("memory", "0", 0, id="zero"),
        pytest.param("memory", str(AMOUNT_MAX), AMOUNT_MAX, id="the largest amount"),
        pytest.param("memory", "0" * 60 + "7", 7, id="leading zeros"),
    ],
)
def test_reads(dimension: str, text: str | int, expected: int) -> None:
    assert quantity.amount(dimension, text) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("", "is empty", id="nothing"),
        pytest.param("-1", "must not be negative", id="a negative text"),
        pytest.param(-1, "must not be negative", id="a negative integer"),
        pytest.param("5 Gi", "whitespace", id="a space before the suffix"),
        pytest.param("5\n", "whitespace", id="a newline at the end"),
        pytest.param("+1", "must be a number", id="a plus sign"),
        pytest.param("1.", "must be a number", id="a point without digits"),
        pytest.param(".", "must be a number", id="only a point"),
        pytest.param("NaN", "must be a number", id="not a number"),
        pytest.param("inf", "must be a number", id="infinity"),
        pytest.param("1_000", "must be a number", id="underscores"),
        pytest.param("1,000", "must be a number", id="thousands separators"),
        pytest.param("0x10", "must be a number", id="hexadecimal"),
        pytest.param("1K", "must be a number", id="kilo in upper case"),
        pytest.param("1ki", "must be a number", id="kibi in lower case"),
        pytest.param("1mi", "must be a number", id="milli-binary"),
        pytest.param("1GiB", "must be a number", id="suffix soup"),
        pytest.param("1e3k", "must be a number", id="an exponent and a suffix"),
        pytest.param("1e", "must be a number", id="an exponent without digits"),
        pytest.param("Gi", "must be a number", id="a suffix alone"),
        pytest.param("1e999", "exponent", id="a huge exponent"),
        pytest.param("0e-999", "exponent", id="a tiny exponent, even of zero"),
        pytest.param("１２", "outside ASCII", id="full-width digits"),
        pytest.param("٣", "outside ASCII", id="Arabic digits"),
        pytest.param("1" * 65, "longer than 64", id="a long text"),
        pytest.param("8Ei", "too large", id="more than a bigint"),
        pytest.param(UNLIMITED, "too large", id="the value that means unlimited"),
        pytest.param(10**5000, "too large", id="an integer too long to print"),
        pytest.param(True, "a boolean", id="a boolean"),
        pytest.param(0.5, "with a fraction", id="a float"),
        pytest.param(float("nan"), "with a fraction", id="a float that is no number"),
        pytest.param(None, "null", id="null"),
        pytest.param(["1"], "an array", id="an array"),
        pytest.param({"a": 1}, "an object", id="an object"),
    ],
)
def test_refuses(text: object, fault: str) -> None:
    with pytest.raises(QuantityError, match=fault):
        quantity.amount("memory", text)


def test_a_boolean_is_refused_also_after_the_number_it_equals() -> None:
    assert quantity.amount("cpu", 1) == 1_000
    with pytest.raises(QuantityError):
        quantity.amount("cpu", True)


def test_a_refusal_shows_no_more_than_the_beginning_of_a_long_text() -> None:
    with pytest.raises(QuantityError) as refused:
        quantity.amount("cpu", "9" * 1_000_000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("dimension", "amount", "expected"),
    [
        pytest.param("memory", 42_949_672_960, "40Gi", id="bytes take the largest exact suffix"),
        pytest.param("memory", 1_500, "1500", id="bytes that no suffix fits stay as they are"),
        pytest.param("memory", 0, "0", id="no bytes"),
        pytest.param("memory", 2**40, "1Ti", id="1024 of a unit is one of the next"),
        pytest.param("requests.memory", 2**33, "8Gi", id="a prefixed dimension"),
        pytest.param("pods", 10_000_000, "10000", id="whole numbers have no suffix"),
        pytest.param("cpu", 1_500, "1500m", id="thousandths"),
        pytest.param("cpu", 0, "0", id="nothing"),
        pytest.param("cpu", UNLIMITED, "unlimited", id="no limit"),
    ],
)
def test_writes(dimension: str, amount: int, expected: str) -> None:
    assert quantity.format_amount(dimension, amount) == expected


def test_quantities_come_back_canonical() -> None:
    for dimension, written, canonical in (("memory", "8192Mi", "8Gi"), ("cpu", "0.50", "500m"), ("cpu", "2000m", "2")):
        assert quantity.format_amount(dimension, quantity.amount(dimension, written)) == canonical


@pytest.mark.parametrize(
    "dimension",
    [
        "memory",
        "limits.memory",
        "ephemeral-storage",
        "requests.storage",
        "fast.storageclass.storage.k8s.io/requests.storage",
        "hugepages-2Mi",
        "requests.hugepages-1Gi",
        "disk_bytes",
    ],
)
def test_is_counted_in_bytes(dimension: str) -> None:
    assert quantity.is_bytes(dimension)


@pytest.mark.parametrize(
    "dimension", ["cpu", "nvidia.com/gpu", "storage-volumes", "nodes", "memory-hogs", "limits.cpu"]
)
def test_is_counted_in_thousandths(dimension: str) -> None:
    assert not quantity.is_bytes(dimension)


@pytest.mark.parametrize(
    ("used", "hard", "expected"),
    [
        (65, 100, "65%"),
        (2, 3, "66%"),
        (999, 1000, "99%"),
        (3, 2, "150%"),
        (0, 0, "0%"),
        (1, 0, "100%"),
        (5, UNLIMITED, "0%"),
    ],
)
def test_percent_rounds_down(used: int, hard: int, expected: str) -> None:
    assert quantity.percent(used, hard) == expected


@given(DIMENSIONS, AMOUNTS)
def test_what_is_written_reads_back(dimension: str, amount: int) -> None:
    assert quantity.amount(dimension, quantity.format_amount(dimension, amount)) == amount


@given(DIMENSIONS, AMOUNTS, AMOUNTS)
def test_more_is_never_less(dimension: str, one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert quantity.amount(dimension, f"{low}n") <= quantity.amount(dimension, f"{high}n")


@given(st.integers(0, 10**9), st.integers(0, 10**9 - 1), st.sampled_from([("", 1), ("Ki", 2**10), ("M", 10**6)]))
def test_rounds_up_by_less_than_one_unit(whole: int, fraction: int, suffix: tuple[str, int]) -> None:
    exact = (whole + Fraction(fraction, 10**9)) * suffix[1]
    text = f"{whole}.{fraction:09}{suffix[0]}"
    assert 0 <= quantity.amount("memory", text) - exact < 1
    assert 0 <= Fraction(quantity.amount("cpu", text), 1000) - exact < Fraction(1, 1000)


@given(st.text(max_size=80))
def test_any_text_is_an_amount_or_a_refusal(text: str) -> None:
    try:
        assert 0 <= quantity.amount("cpu", text) <= AMOUNT_MAX
    except QuantityError:
        with pytest.raises(QuantityError, match=r"\A[ -~]+\Z"):
            quantity.amount("cpu", text)
