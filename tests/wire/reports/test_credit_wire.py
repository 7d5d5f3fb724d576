"""Times, durations, tables and exact numbers as the credit API writes and reads them."""

from __future__ import annotations

import csv
import io
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bursar.core.credit.statement import Forecast, Item, LeaseLine, Statement
from bursar.core.values.money import NANO, MoneyError, credits_of, nanocredits
from bursar.wire.reports.credit import credit_faults, zone_faults
from bursar.wire.reports.statement import forecast_view, lasting, statement_csv, statement_view
from bursar.wire.reports.usage_events import NewUsage, event_of, usage_faults
from bursar.wire.shared.instant import InstantError, micros_of, time_text

LAST = micros_of("9998-12-31T23:59:59.999999Z")


@given(st.integers(0, LAST))
@example(0)
@example(LAST)
def test_a_time_is_read_as_it_was_written(micros: int) -> None:
    assert micros_of(time_text(micros)) == micros


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2026-11-16", "2026-11-16T00:00:00Z"),
        ("2026-11-16T09:00:00.5+02:00", "2026-11-16T07:00:00.500000Z"),
        ("2026-11-16t07:00:00z", "2026-11-16T07:00:00Z"),
        ("2026-11-16 07:00:00-00:30", "2026-11-16T07:30:00Z"),
        ("2024-02-29", "2024-02-29T00:00:00Z"),
    ],
)
def test_times_in_other_words(text: str, same: str) -> None:
    assert time_text(micros_of(text)) == same


@pytest.mark.parametrize(
    "text",
    [
        "", "now", "2026", "2026-11", "2026-13-01", "2026-02-30", "2026-11-16T07:00:00", "2026-11-16T07:00Z",
        "2026-11-16T24:00:01Z", "2026-11-16T07:00:60Z", "1969-12-31", "9999-12-31T23:59:59-23:59", "20261116T070000Z",
        "2026-W47-1", "2026-11-16T07:00:00.1234567Z", "２０２６-11-16", "2026-11-16T07:00:00+99:00",
    ],
)  # fmt: skip
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(InstantError):
        micros_of(text)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s"), (3_600, "1 h"), (11_520, "3 h 12 min"),
        (11_579, "3 h 12 min"), (86_400, "1 d"), (90_061, "1 d 1 h"), (86_399, "23 h 59 min"),
    ],
)  # fmt: skip
def test_how_long_it_lasts(seconds: int, words: str) -> None:
    assert lasting(seconds) == words


def test_a_forecast_beyond_all_dates_has_no_date() -> None:
    rich = Forecast(1, 0, 10**18, 10**18, 1, 10**24, 10**24, 1)
    view = forecast_view("physics", rich)
    assert view.runs_out_at is None
    assert view.runs_out_in_seconds == 10**18


@given(st.integers(-(4 * 10**18), 4 * 10**18))
def test_an_amount_is_read_as_it_was_written(amount: int) -> None:
    text = credits_of(amount)
    assert nanocredits(text) == amount
    assert Decimal(text) * NANO == amount


@given(st.floats())
def test_a_float_is_no_amount(value: float) -> None:
    with pytest.raises(MoneyError):
        nanocredits(value)
    assert [one.field for one in credit_faults("amount", value)] == ["amount"]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Zurich", "America/Argentina/Buenos_Aires", "Etc/GMT+5"])
def test_time_zones(zone: str) -> None:
    assert zone_faults("time_zone", zone) == []


@pytest.mark.parametrize(
    "zone", ["", "/etc/localtime", "../UTC", "Europe/../UTC", "Mars/Base", "UTC\n", "Europe", "x" * 99]
)
def test_what_is_no_time_zone(zone: str) -> None:
    assert [one.field for one in zone_faults("time_zone", zone)] == ["time_zone"]


@given(st.text(max_size=12), st.text(max_size=12))
def test_a_table_says_what_was_said_and_begins_no_formula(job: str, reason: str) -> None:
    line = LeaseLine(7, -5, -5, 0, 0, 1_500_000, 1, 2, 1, job=job)
    item = Item(1, 0, "topup", 9, reason=reason)
    found = Statement(1, "physics", 0, 10, 0, 4, {"topup": 9, "debit": -5}, (item,), (line,))
    rows = list(csv.DictReader(io.StringIO(statement_csv(statement_view(found)), newline="")))
    assert [row["amount"] for row in rows] == ["0", "0.000000009", "-0.000000005", "0.000000004"]
    assert rows[2]["seconds"] == "1.5"
    for said, shown in ((job, rows[2]["job_id"]), (reason, rows[1]["reason"])):
        assert shown in (said, f"'{said}")
        assert shown[:1] not in tuple("=+-@\t\r")


def usage(**more: Any) -> NewUsage:
    times = {"start_ts": "2026-11-16T07:00:00Z", "end_ts": "2026-11-16T07:00:05.5Z"}
    return NewUsage(job_id="a", seq=1, **{**times, **more})


@pytest.mark.parametrize(
    ("seconds", "micros"), [(None, 5_500_000), ("5.25", 5_250_000), (5, 5_000_000), (0.1, 100_000), ("0.0000009", 0)]
)
def test_seconds_are_counted_to_the_microsecond(seconds: Any, micros: int) -> None:
    assert usage_faults("", usage(seconds=seconds)) == []
    assert event_of(usage(seconds=seconds)).micros == micros
