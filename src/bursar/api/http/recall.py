"""Open streams by the credentials behind them: when these change, the streams authenticate again at once.

The process's change feed says what changed, so no stream asks the database by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from bursar.core.values.access import Identity

Recall: TypeAlias = Callable[[], None]


class OpenStreams:
    """The identity of each open stream, and the call that makes it authenticate again."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, ...], dict[Recall, Identity]] = {}

    def __len__(self) -> int:
        """The number of credentials with open streams."""
        return len(self._streams)

    def add(self, identity: Identity, recall: Recall) -> None:
        for key in _keys(identity):
            self._streams.setdefault(key, {})[recall] = identity

    def remove(self, identity: Identity, recall: Recall) -> None:
        for key in _keys(identity):
            there = self._streams.get(key, {})
            there.pop(recall, None)
            if not there:
                self._streams.pop(key, None)

    def of_token(self, token_id: str) -> Iterator[Recall]:
        """The streams that were opened with a token."""
        yield from tuple(self._streams.get(("token", token_id), ()))

    def of_user(self, tenant: str, user: str) -> Iterator[tuple[Recall, Identity]]:
        """The streams of a user of a tenant, with their identities."""
        yield from tuple(self._streams.get(("user", tenant, user), {}).items())


def _keys(identity: Identity) -> Iterator[tuple[str, ...]]:
    if identity.token_id:
        yield "token", identity.token_id
    if identity.tenant:
        yield "user", identity.tenant, identity.user
