"""Durations that users write, and ages as kubectl prints them."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.core.values import duration
from bursar.core.values.duration import SECONDS_MAX, DurationError, format_clock, format_due


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param("7200s", 7_200, id="seconds"),
        pytest.param("5m", 300, id="minutes"),
        pytest.param("1h30m", 5_400, id="hours and minutes"),
        pytest.param("24h", 86_400, id="hours"),
        pytest.param("7d", 604_800, id="days"),
        pytest.param("1d2h3m4s", 93_784, id="every unit"),
        pytest.param("90", 90, id="a plain number is seconds"),
        pytest.param(90, 90, id="so is a JSON integer"),
        pytest.param("0s", 0, id="no time at all"),
        pytest.param("3650d", SECONDS_MAX, id="ten years"),
    ],
)
def test_reads(text: str | int, seconds: int) -> None:
    assert duration.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param("", "must be like", id="nothing"),
        pytest.param("-5s", "must be like", id="a negative text"),
        pytest.param(-5, "negative", id="a negative integer"),
        pytest.param("1.5h", "must be like", id="a fraction"),
        pytest.param("30m1h", "must be like", id="units in the wrong order"),
        pytest.param("1h1h", "must be like", id="a unit twice"),
        pytest.param("5 m", "must be like", id="a space"),
        pytest.param("5m\n", "must be like", id="a newline"),
        pytest.param("5w", "must be like", id="a unknown unit"),
        pytest.param("5ms", "must be like", id="milliseconds"),
        pytest.param("٥m", "must be like", id="Arabic digits"),
        pytest.param("9" * 5_000 + "s", "must be like", id="more digits than Python reads"),
        pytest.param("3651d", "too long", id="more than ten years"),
        pytest.param("999999999d", "too long", id="much more than ten years"),
        pytest.param(10**5000, "too long", id="a huge integer"),
        pytest.param(True, "must be a string", id="a boolean"),
        pytest.param(1.0, "must be a string", id="a float"),
        pytest.param(None, "must be a string", id="null"),
    ],
)
def test_refuses(text: object, fault: str) -> None:
    with pytest.raises(DurationError, match=fault):
        duration.parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        pytest.param(-2, "<invalid>", id="the future"),
        pytest.param(-1, "0s", id="a clock slightly behind"),
        pytest.param(5, "5s", id="seconds"),
        pytest.param(119, "119s", id="seconds up to two minutes"),
        pytest.param(120, "2m", id="two minutes"),
        pytest.param(125, "2m5s", id="minutes with seconds"),
        pytest.param(599, "9m59s", id="seconds up to ten minutes"),
        pytest.param(630, "10m", id="then minutes alone"),
        pytest.param(179 * 60, "179m", id="minutes up to three hours"),
        pytest.param(3 * 3600, "3h", id="three hours"),
        pytest.param(3 * 3600 + 20 * 60, "3h20m", id="hours with minutes"),
        pytest.param(8 * 3600 + 20 * 60, "8h", id="hours alone from eight"),
        pytest.param(47 * 3600, "47h", id="hours up to two days"),
        pytest.param(52 * 3600, "2d4h", id="days with hours"),
        pytest.param(48 * 3600, "2d", id="two days"),
        pytest.param(8 * 86400 + 7200, "8d", id="days alone from eight"),
        pytest.param(400 * 86400, "400d", id="days up to two years"),
        pytest.param(730 * 86400, "2y", id="two years"),
        pytest.param(800 * 86400, "2y70d", id="years with days"),
        pytest.param(3000 * 86400, "8y", id="years alone from eight"),
    ],
)
def test_age(seconds: int, age: str) -> None:
    assert duration.format_age(seconds) == age


@given(st.integers(0, SECONDS_MAX))
def test_seconds_read_back(seconds: int) -> None:
    hours, rest = divmod(seconds, 3600)
    assert duration.parse_seconds(f"{hours}h{rest // 60}m{rest % 60}s") == seconds
    assert duration.parse_seconds(str(seconds)) == seconds


@given(st.integers(0, 729 * 86400))
def test_an_age_never_claims_more_than_has_passed(seconds: int) -> None:
    assert duration.parse_seconds(duration.format_age(seconds)) <= seconds


@given(st.text(max_size=40))
def test_any_text_is_a_duration_or_a_refusal(text: str) -> None:
    try:
        assert 0 <= duration.parse_seconds(text) <= SECONDS_MAX
    except DurationError:
        with pytest.raises(DurationError, match=r"\A[ -~]+\Z"):
            duration.parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "due"),
    [
        (-70, "70s ago"),
        (0, "now"),
        (45, "in about 45 s"),
        (600, "in about 10 min"),
        (2 * 3_600, "in about 2 h"),
        (3 * 86_400, "in about 3 days"),
    ],
)
def test_how_far_away_a_moment_is(seconds: float, due: str) -> None:
    assert format_due(seconds) == due


def test_the_clock_has_a_date_unless_it_is_todays() -> None:
    now = datetime(2024, 1, 15, 12, 28, tzinfo=UTC)
    assert format_clock(now + timedelta(minutes=10), now) == "12:38 UTC"
    assert format_clock(now + timedelta(days=1), now) == "2024-01-16 12:28 UTC"
