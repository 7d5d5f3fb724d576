"""Refusals quote what was asked for, and do not grow with it."""

import pytest

from bursar.core.values.refusal import (
    CAUSE_CHARS_MAX,
    MESSAGE_CHARS_MAX,
    WORD_CHARS_MAX,
    Cause,
    Code,
    Refusal,
    field_fault,
    invalid,
    shortened,
)

LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", ""),
        ("queue 'a' not found", "queue 'a' not found"),
        ("x" * WORD_CHARS_MAX, "x" * WORD_CHARS_MAX),
        (f"queue {LONG} not found", f"queue {'x' * (WORD_CHARS_MAX - 1)}… not found"),
        (f'queue "{LONG}" not found', f'queue "{"x" * (WORD_CHARS_MAX - 3)}…" not found'),
        (f"{LONG}\n{LONG}", f"{'x' * (WORD_CHARS_MAX - 1)}…\n{'x' * (WORD_CHARS_MAX - 1)}…"),
        ("a " * 50_000, ("a " * MESSAGE_CHARS_MAX)[: MESSAGE_CHARS_MAX - 1] + "…"),
        ("'" * 50_000, "…''''"),
    ],
)
def test_words_are_cut_before_the_text_is(text: str, short: str) -> None:
    assert shortened(text) == short


def test_every_text_of_a_refusal_is_bounded() -> None:
    cause = Cause(LONG[:10], f"{LONG} is wrong", field=LONG, dimension=LONG, scope=LONG)
    assert cause.message.endswith("… is wrong")
    assert max(map(len, (cause.message, cause.field, cause.dimension, cause.scope))) == CAUSE_CHARS_MAX
    assert len(field_fault("a", "a " * 5_000).message) == CAUSE_CHARS_MAX
    refusal = Refusal(Code.NOT_FOUND, f"queue {LONG} not found", f"Create {LONG}.")
    assert (len(refusal.message), len(refusal.hint)) == (len("queue  not found") + WORD_CHARS_MAX, 127)
    assert len(invalid("a " * 5_000).message) == MESSAGE_CHARS_MAX
