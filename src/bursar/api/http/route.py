"""`Route`, the entry of the route table (site/routes.py), which the server, discovery and OpenAPI all read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from bursar.core.values.access import Identity
from bursar.core.values.refusal import Refusal
from bursar.wire.shared.kind import Kind

if TYPE_CHECKING:
    from bursar.api.http.context import ApiContext

JSON = "application/json"
NO_STORE = {"Cache-Control": "no-store"}  # for responses with a secret
UNREAD: Any = object()  # a body that is not decoded yet


@dataclass(slots=True)
class Call:
    """One authenticated request with its body."""

    context: ApiContext
    route: Route
    identity: Identity
    request_id: str
    parameters: Mapping[str, str]  # from the path
    query: Mapping[str, str]
    headers: Mapping[str, str]  # lower-case names
    body: bytes = b""
    subject: str = ""  # the object's name in the body, if the path has none
    document: Any = UNREAD  # the decoded body, if it was decoded before the handler

    @property
    def media_type(self) -> str:
        """The body's content type without parameters; JSON by default."""
        return self.headers.get("content-type", JSON).partition(";")[0].strip().lower() or JSON


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed response: the application sends each piece as it arrives, and closes `pieces` on disconnect."""

    pieces: Any  # AsyncGenerator[bytes, None]
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)
    breaks: bool = False  # a truncated response breaks the connection


class BrokenOff(Exception):
    """A stream cannot continue now; the message says why."""


Outcome: TypeAlias = Answer | Stream | Refusal
Handler: TypeAlias = Callable[[Call], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter."""

    name: str
    description: str
    type: str = "string"  # string, integer or boolean


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str  # /api/v1/namespaces/{namespace}/allocations/{name}
    handler: Handler
    summary: str
    verb: str = "get"  # the verb in core.values.access
    resource: str = ""  # plural noun
    subresource: str = ""
    kind: Kind | None = None
    params: tuple[Param, ...] = ()
    body: type | None = None  # msgspec type of the body
    body_media: tuple[str, ...] = (JSON,)
    # The msgspec type of the response, or one of several; None: any JSON object.
    answer: type | tuple[type, ...] | None = None
    answer_media: tuple[str, ...] = (JSON,)
    is_list: bool = False  # the response is a list of `answer`
    status: int = 200
    refusals: tuple[int, ...] = ()
    public: bool = False  # needs no token
    free: bool = False  # not counted by the rate limit

    @property
    def offers_dry_run(self) -> bool:
        return any(one.name == "dryRun" for one in self.params)

    @property
    def answers(self) -> tuple[type, ...]:
        """The types of its responses."""
        if isinstance(self.answer, tuple):
            return self.answer
        return () if self.answer is None else (self.answer,)
