"""The journal: what was appended is known to the next life, whatever a crash did to the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.agent.executor import journal as journals
from bursar.agent.executor.journal import Journal, JournalBegan, JournalGone, JournalOver, Line
from bursar.agent.machine.types import Run

RUN = Run(
    "a",
    1,
    "lab",
    "train",
    requests={"cpu": "1"},
    devices={"nvidia.com/gpu": (0, 3)},
    command=("sh", "-c", "é"),
    env={"A": "b"},
    nodes=("n1", "n2"),
    leased=True,
)


def reopened(path: Path, *lines: Line) -> Journal:
    journal = Journal(path)
    journal.append(lines)
    journal.close()
    return closed(path)


def closed(path: Path) -> Journal:
    journal = Journal(path)
    journal.close()
    return journal


def test_everything_comes_back(tmp_path: Path) -> None:
    over = JournalOver("a", 1, 3, "OOMKilled", "too much", stopped=False)
    known = reopened(tmp_path / "journal", JournalBegan(RUN, 5.0), over, JournalGone("b", 2)).known
    assert known.began == {("a", 1): JournalBegan(RUN, 5.0)}
    assert known.over == {("a", 1): over}
    assert list(known.gone) == [("b", 2)]


def test_what_is_gone_is_only_remembered_by_name(tmp_path: Path) -> None:
    known = reopened(
        tmp_path / "journal", JournalBegan(RUN, 5.0), JournalOver("a", 1), JournalGone("a", 1), JournalBegan(RUN, 6.0)
    ).known
    assert (known.began, known.over, list(known.gone)) == ({}, {}, [("a", 1)])


@given(cut=st.integers(1, 400), rubbish=st.binary(max_size=40))
def test_a_torn_tail_costs_only_what_was_in_it(
    tmp_path_factory: pytest.TempPathFactory, cut: int, rubbish: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    reopened(path, JournalBegan(RUN, 5.0), JournalGone("b", 1))
    whole = path.read_bytes()
    journal = Journal(path)
    journal.append([JournalBegan(Run("c", 1, "lab", "c"), 6.0)])
    journal.close()
    path.write_bytes(path.read_bytes()[: -min(cut, len(path.read_bytes()) - len(whole))] + rubbish.replace(b"\n", b""))
    known = reopened(path, JournalGone("d", 1)).known
    assert ("a", 1) in known.began
    assert {("b", 1), ("d", 1)} <= set(known.gone)


def test_a_line_that_is_damaged_does_not_hide_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reopened(path, JournalBegan(RUN, 5.0), JournalGone("b", 1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first.replace(b"b", b"x") + second)
    journal = closed(path)
    assert (journal.bad_lines, list(journal.known.gone), list(journal.known.began)) == (1, [], [("a", 1)])
    assert closed(path).bad_lines == 0


def test_the_file_is_written_anew_when_most_of_it_is_of_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "SPARE_LINES", 10)
    monkeypatch.setattr(journals, "REMEMBERED_MAX", 5)
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append([JournalBegan(RUN, 5.0)])
    for n in range(200):
        journal.append(
            [JournalBegan(Run(f"u{n}", 1, "lab", "x"), 1.0), JournalOver(f"u{n}", 1, 0), JournalGone(f"u{n}", 1)]
        )
    journal.close()
    assert len(path.read_bytes().splitlines()) < 40
    known = closed(path).known
    assert list(known.began) == [("a", 1)]
    assert list(known.gone) == [(f"u{n}", 1) for n in range(195, 200)]
