"""The common part of both clients, with kinds as attributes: `client.tenants`, `client.allocations("ml-team")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bursar.client import http
from bursar.client.calls import ROOT, ResourcePath
from bursar.client.contexts import Context, resolve
from bursar.client.flow import Retries

if TYPE_CHECKING:
    import ssl

    from bursar.wire.shared.kind import Kind

R = TypeVar("R")


class Kinds(Generic[R]):
    """The part that both clients share: the server, and one attribute for each registered kind.

    `_transport` is the HTTP client of one, and `_resource` the objects of one kind over it.
    """

    _transport: ClassVar[Any]
    _resource: ClassVar[Any]

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        ca_file: str | None = None,
        context: str | None = None,
        tenant: str | None = None,
        timeout_seconds: float = 30.0,
        retries: Retries | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.context: Context = resolve(url=url, token=token, ca_file=ca_file, context=context, tenant=tenant)
        self._subject = retries or Retries()
        self._http = self._transport(**http.options(self.context, timeout_seconds, ssl_context))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.context.url!r})"

    def resource(self, plural: str, namespace: str = "", *, namespaced: bool | None = None) -> R:
        """The objects of a kind. `namespaced` is needed for a kind that only the server knows."""
        found: R = self._resource(self._http, place_of(plural, namespace, namespaced, self._subject))
        return found

    def __getattr__(self, plural: str) -> R:
        if plural not in (kinds := _kinds()):
            raise AttributeError(f"{type(self).__name__} has no {plural!r}; the kinds are {', '.join(kinds)}")
        return self.resource(plural)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_kinds()})


def _kinds() -> Mapping[str, Kind]:
    """The registered kinds by plural. Loading them takes longer than a request: who needs none does not pay for it."""
    from bursar.wire.kinds.registry import BY_PLURAL

    return BY_PLURAL


def place_of(plural: str, namespace: str, namespaced: bool | None, retries: Retries) -> ResourcePath:
    kind = _kinds().get(plural)
    if kind is None and namespaced is None:
        raise ValueError(f"unknown kind {plural!r}: give namespaced=; known kinds: {', '.join(_kinds())}")
    inside = namespaced if namespaced is not None else kind is not None and kind.namespaced
    root = kind.root if kind is not None else ROOT
    return ResourcePath(plural, inside, retries, root=root).within(namespace)
