"""How a client names what it works on: `client.tenants`, `client.allocations("ml-team")`."""

from __future__ import annotations

from typing import Generic, TypeVar

from bursar.client.calls import ResourcePath
from bursar.client.flow import Retries
from bursar.wire.kinds.registry import BY_PLURAL

R = TypeVar("R")


class Kinds(Generic[R]):
    """One attribute for each kind there is, so that a new kind needs nothing here."""

    def resource(self, plural: str, namespace: str = "", *, namespaced: bool | None = None) -> R:
        """The objects of a kind. For one that only the server knows, say whether it lives in namespaces."""
        raise NotImplementedError

    def __getattr__(self, plural: str) -> R:
        if plural not in BY_PLURAL:
            raise AttributeError(f"{type(self).__name__} has no {plural!r}; the kinds are {', '.join(BY_PLURAL)}")
        return self.resource(plural)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *BY_PLURAL})


def place_of(plural: str, namespace: str, namespaced: bool | None, retries: Retries) -> ResourcePath:
    kind = BY_PLURAL.get(plural)
    if kind is None and namespaced is None:
        raise ValueError(f"unknown kind {plural!r}: say whether it is namespaced; known are {', '.join(BY_PLURAL)}")
    inside = namespaced if namespaced is not None else kind is not None and kind.namespaced
    return ResourcePath(plural, inside, retries).within(namespace)
