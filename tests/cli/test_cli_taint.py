"""`bursar taint`: what is typed, and what becomes of a node's taints."""

import click
import pytest

from bursar.cli.nodes.taint import Changes, split, tainted
from bursar.cli.shell.problem import Problem

OLD = {"key": "team", "value": "physics", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("words", "names", "changes"),
    [
        ("n1 team=physics:NoSchedule", ["n1"], Changes([OLD], [])),
        ("n1 n2 flaky:NoExecute", ["n1", "n2"], Changes([{"key": "flaky", "effect": "NoExecute"}], [])),
        ("node n1 team-", ["n1"], Changes([], [("team", "")])),
        ("node/n1 team:NoSchedule-", ["n1"], Changes([], [("team", "NoSchedule")])),
        ("node team-", ["node"], Changes([], [("team", "")])),
        ("team=physics:NoSchedule team-", [], Changes([OLD], [("team", "")])),
        (
            "example.com/a=b-c:NoSchedule",
            [],
            Changes([{"key": "example.com/a", "value": "b-c", "effect": "NoSchedule"}], []),
        ),
    ],
)
def test_nodes_and_changes_are_told_apart(words: str, names: list[str], changes: Changes) -> None:
    assert split(words.split()) == (names, changes)


@pytest.mark.parametrize(("words", "said"), [("n1 team=physics", "team=physics:NoSchedule"), ("team- n1", "'n1'")])
def test_what_makes_no_sense_is_said(words: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        split(words.split())


def test_a_key_has_one_value_for_each_effect() -> None:
    new = {**OLD, "value": "biology"}
    other = {"key": "team", "effect": "NoExecute"}
    assert tainted("node/n1", [], Changes([OLD], []), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD], Changes([OLD], []), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD], Changes([other], []), overwrite=False) == [OLD, other]
    assert tainted("node/n1", [OLD, other], Changes([new], []), overwrite=True) == [new, other]
    assert tainted("node/n1", [OLD, other], Changes([], [("team", "NoExecute")]), overwrite=False) == [OLD]
    assert tainted("node/n1", [OLD, other], Changes([], [("team", "")]), overwrite=False) == []
    assert tainted("node/n1", [{"key": "team"}], Changes([], [("team", "NoSchedule")]), overwrite=False) == []
    with pytest.raises(Problem, match="already has team=physics:NoSchedule"):
        tainted("node/n1", [OLD], Changes([new], []), overwrite=False)
