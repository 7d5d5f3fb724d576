"""Faults of a command: its arguments, its environment, its working directory.

The bounds are those of the Linux kernel, so that every accepted command can be started on a node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import UNSET, UnsetType

from bursar.core.values.redaction import variable_name
from bursar.core.values.refusal import Cause, field_fault
from bursar.wire.shared.meta import Text, Wire
from bursar.wire.shared.scheduling import count_faults

ENV_MAX = 1000
WORDS_MAX = 10_000
# Linux takes up to 128 KiB for one word or variable, and some 2 MiB for all of them.
WORD_BYTES_MAX = 100_000
ALL_BYTES_MAX = 1_000_000
DIRECTORY_BYTES_MAX = 4095

_NAME = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]{0,252}", re.ASCII)


class EnvVar(Wire):
    name: str
    value: Text = UNSET


Env = Sequence[EnvVar] | Mapping[str, str]


def command_faults(
    path: str, command: Sequence[str] | UnsetType, env: Env | UnsetType, directory: str | UnsetType
) -> Iterator[Cause]:
    words = command if not isinstance(command, UnsetType) else ()
    variables = list(_variables(env)) if not isinstance(env, UnsetType) else []
    counted = [*count_faults(f"{path}.command", command, WORDS_MAX), *count_faults(f"{path}.env", env, ENV_MAX)]
    if counted:
        yield from counted
        return
    yield from _word_faults(f"{path}.command", words)
    yield from _variable_faults(f"{path}.env", variables, named=isinstance(env, Mapping))
    total = sum(map(_size, words)) + sum(_size(name) + _size(value) for name, value in variables)
    if total > ALL_BYTES_MAX:
        yield field_fault(f"{path}.command", f"has with its environment {total} bytes; at most {ALL_BYTES_MAX} fit")
    if directory:
        yield from _directory_faults(f"{path}.workingDir", directory)


def _variables(env: Env) -> Iterable[tuple[str, str]]:
    if isinstance(env, Mapping):
        return env.items()
    return ((one.name, one.value or "") for one in env)


def _word_faults(path: str, words: Sequence[str]) -> Iterator[Cause]:
    if words and not words[0]:
        yield field_fault(f"{path}[0]", "must name a program")
    for index, word in enumerate(words):
        yield from _text_faults(f"{path}[{index}]", word)


def _variable_faults(path: str, variables: Sequence[tuple[str, str]], *, named: bool) -> Iterator[Cause]:
    for index, (name, value) in enumerate(variables):
        where = f"{path}[{variable_name(name)[:64]}]" if named else f"{path}[{index}]"
        if not _NAME.fullmatch(name):
            rule = "letters, digits and _ . - only, not beginning with a digit, at most 253 of them"
            yield field_fault(where if named else f"{where}.name", f"is not the name of a variable: {rule}")
        yield from _text_faults(where if named else f"{where}.value", value)
    twice = (name for name, count in Counter(name for name, _ in variables).items() if count > 1)
    for name in islice(twice, 10):
        yield field_fault(path, f"names {variable_name(name)[:64]} more than once")


def _text_faults(path: str, text: str) -> Iterator[Cause]:
    if "\0" in text:
        yield field_fault(path, "must not contain a NUL character")
    if (size := _size(text)) > WORD_BYTES_MAX:
        yield field_fault(path, f"has {size} bytes; at most {WORD_BYTES_MAX} are allowed")


def _directory_faults(path: str, directory: str) -> Iterator[Cause]:
    if not directory.startswith("/"):
        yield field_fault(path, "must be an absolute path, as in /data/train")
    if "\0" in directory:
        yield field_fault(path, "must not contain a NUL character")
    if _size(directory) > DIRECTORY_BYTES_MAX:
        yield field_fault(path, f"must have at most {DIRECTORY_BYTES_MAX} bytes")


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
