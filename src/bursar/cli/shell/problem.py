"""Error messages: what failed, a hint, and an exit code that a script can act on."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bursar.client import BursarError
    from bursar.core.values.refusal import Cause

FAILED = 1
USAGE = 2
NOT_FOUND = 3
DENIED = 4
CONFLICT = 5
QUOTA_EXCEEDED = 6
UNAVAILABLE = 7
INTERRUPTED = 130
PIPE_CLOSED = 141  # as a shell reports a program that SIGPIPE ended

WHICH_SERVER = "--url, BURSAR_URL or `bursar context` choose the server"


class Problem(Exception):
    """An error that the client found itself, before calling the server or in its answer."""

    def __init__(self, message: str, hint: str = "", exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code


def report(error: Exception) -> int:
    """Print an error on standard error and return its exit code. An unexpected error is raised again."""
    from bursar.client.errors import ApiError, BursarError

    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, Problem):
        click.echo(rendered(str(error), error.hint), err=True)
        return error.exit_code
    if not isinstance(error, BursarError):
        raise error
    causes = error.causes if isinstance(error, ApiError) else ()
    click.echo(rendered(error.message, _hint(error), causes), err=True)
    return exit_code(error)


def exit_code(error: Exception) -> int:
    from bursar.client import errors

    table = (
        (errors.NotFound, NOT_FOUND),
        (errors.Unauthorized, DENIED),
        (errors.CreditRefused, QUOTA_EXCEEDED),
        (errors.Forbidden, DENIED),
        (errors.Conflict, CONFLICT),
        (errors.QuotaExceeded, QUOTA_EXCEEDED),
        (errors.RateLimited, UNAVAILABLE),
        (errors.Unavailable, UNAVAILABLE),
        (errors.ConnectionFailed, UNAVAILABLE),
    )
    return next((code for kind, code in table if isinstance(error, kind)), FAILED)


def rendered(message: str, hint: str = "", causes: Iterable[Cause] = ()) -> str:
    """The message, then the hint, then each cause that adds to the message."""
    lines = [f"Error: {message}"]
    # Some messages, as the specification writes them, end in their own hint.
    if hint and hint not in message:
        lines.append(f"  hint: {hint}")
    # The message already names the limit of an account.
    shown = [one for one in causes if not one.scope.startswith("account:")]
    whys = (f"{one.field}: {one.message}" if one.field not in one.message else one.message for one in shown)
    aligned = (why.replace("\n", "\n    ") for why in dict.fromkeys(whys) if why and not _said(why, message))
    lines += [f"  - {why}" for why in aligned]
    # Only the cause's scope names the ResourceQuota that is exceeded.
    named = dict.fromkeys(one.scope.removeprefix("quota:") for one in causes if one.scope.startswith("quota:"))
    lines += [f"  quota: {name}" for name in named]
    return "\n".join(lines)


def _said(why: str, message: str) -> bool:
    return why in message or why.partition(": ")[2] == message


def _hint(error: BursarError) -> str:
    """The server's hint, else one that the client knows, with the time to retry."""
    from bursar.client import errors

    match error:
        case errors.Unauthorized() if not error.hint:
            return "run `bursar login URL`, or set BURSAR_TOKEN"
        case errors.ConnectionFailed() if error.hint and error.passing:
            return f"{error.hint}; {WHICH_SERVER}"
        case errors.ApiError() if error.status == 500 and error.request_id:
            return f"see the server's log for request id {error.request_id}"
        case errors.ApiError() if error.retry_after:
            return "; ".join(filter(None, (error.hint.rstrip("."), f"try again in {error.retry_after:g} s")))
    return error.hint


def nearest(word: str, words: Iterable[str]) -> str:
    """The most similar of the words, if any is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(words), 1)), "")


class Outcomes:
    """The failures of a command on several objects: each is printed at once, the first gives the exit code."""

    def __init__(self) -> None:
        self._code = 0

    @contextmanager
    def each(self, located: Callable[[BursarError], Exception] = lambda error: error) -> Iterator[None]:
        """One of the objects: its errors are failures, which `located` may explain first."""
        from bursar.client.errors import BursarError

        try:
            yield
        except BursarError as error:
            self.failed(located(error))
        except (Problem, click.ClickException) as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        sys.stdout.flush()
        code = report(error)
        self._code = self._code or code

    def leave(self) -> None:
        if self._code:
            raise click.exceptions.Exit(self._code)
