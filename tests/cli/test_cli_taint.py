"""`bursar taint`: what is typed, and what becomes of a node's taints."""

import click
import pytest

from bursar.cli.nodes.taint import TaintChanges, split, tainted
from bursar.cli.shell.problem import Problem

OLD = {"key": "team", "value": "physics", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("words", "names", "changes"),
    [
        ("n1 team=physics:NoSchedule", ["n1"], TaintChanges([OLD], [])),
        ("n1 n2 flaky:NoExecute", ["n1", "n2"], TaintChanges([{"key": "flaky", "effect": "NoExecute"}], [])),
        ("node n1 team-", ["n1"], TaintChanges([], [("team", "")])),
        ("node/n1 team:NoSchedule-", ["n1"], TaintChanges([], [("team", "NoSchedule")])),
        ("node team-", ["node"], TaintChanges([], [("team", "")])),
        ("team=physics:NoSchedule team-", [], TaintChanges([OLD], [("team", "")])),
        (
            "example.com/a=b-c:NoSchedule",
            [],
            TaintChanges([{"key": "example.com/a", "value": "b-c", "effect": "NoSchedule"}], []),
        ),
    ],
)
def test_nodes_and_changes_are_told_apart(words: str, names: list[str], changes: TaintChanges) -> None:
    assert split(words.split()) == (names, changes)


@pytest.mark.parametrize(("words", "said"), [("n1 team=physics", "team=physics:NoSchedule"), ("team- n1", "'n1'")])
def test_what_makes_no_sense_is_said(words: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        split(words.split())


def test_a_key_has_one_value_for_each_effect() -> None:
    new = {**OLD, "value": "biology"}
    other = {"key": "team", "effect": "NoExecute"}
    assert tainted("node/n1", [], TaintChanges([OLD], []), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD], TaintChanges([OLD], []), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD], TaintChanges([other], []), overwrite=False) == [OLD, other]
    assert tainted("node/n1", [OLD, other], TaintChanges([new], []), overwrite=True) == [new, other]
    assert tainted("node/n1", [OLD, other], TaintChanges([], [("team", "NoExecute")]), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD, other], TaintChanges([], [("team", "")]), overwrite=False) == []
    assert tainted("node/n1", [{"key": "team"}], TaintChanges([], [("team", "NoSchedule")]), overwrite=False) == []
    with pytest.raises(Problem, match="already has team=physics:NoSchedule"):
        tainted("node/n1", [OLD], TaintChanges([new], []), overwrite=False)
