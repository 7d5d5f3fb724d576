"""Connection options of every command that calls the server, and the client made from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bursar.cli.shell import completers
from bursar.cli.shell.problem import NOT_FOUND, Problem

if TYPE_CHECKING:
    from bursar.cli.shell.resource_arg import ResourceType
    from bursar.client import Client, Resource
    from bursar.client.errors import BursarError, NotFound

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_NAMESPACE = "default"
NAMESPACES_LISTED_MAX = 20
_WORK = {"allocations": "allocation", "jobs": "job"}  # kinds that users look for in the wrong namespace
_MISSING = re.compile(r'(allocations|jobs) "([^"]+)" not found')


@dataclass(frozen=True, slots=True)
class Connection:
    """A client, and the namespaces that a command works on."""

    client: Client
    namespace: str = ""
    all_namespaces: bool = False

    @property
    def effective_namespace(self) -> str:
        return self.namespace or self.client.context.namespace or DEFAULT_NAMESPACE

    def resource(self, noun: ResourceType, namespace: str = "") -> Resource:
        """The objects of a kind, in the given namespace, else in the command's."""
        everything = self.client.resource(noun.plural, namespaced=noun.namespaced)
        if not noun.namespaced or (self.all_namespaces and not namespace):
            return everything
        return everything(namespace or self.effective_namespace)

    def located(self, error: BursarError) -> Exception:
        """The error. For work not found, it names the searched namespace and the namespaces where the work exists."""
        from bursar.client.errors import NotFound

        missing = _MISSING.fullmatch(error.message) if isinstance(error, NotFound) else None
        if missing is None or self.all_namespaces:
            return error
        plural, name = missing.groups()
        there = sorted(set(self.spaces_with(plural, name)) - {self.effective_namespace})
        where = f"; it exists in {', '.join(there)}" if there else ""
        message = f'{_WORK[plural]} "{name}" not found in namespace {self.effective_namespace}{where}'
        return Problem(message, error.hint, NOT_FOUND)

    def spaces_with(self, plural: str, name: str) -> Iterator[str]:
        """The visible namespaces that hold an object of this name."""
        from bursar.client.errors import BursarError
        from bursar.core.values.selector import Op, Selector, SelectorTerm, to_text

        selector = to_text(Selector((SelectorTerm("metadata.name", Op.IN, (name,)),)))
        with suppress(BursarError):
            for one in self.client.resource(plural, namespaced=True).list(field_selector=selector):
                yield str(one["metadata"]["namespace"])


def connected(command: F) -> F:
    """Decorate a command: add the connection options, and pass a Connection as its first argument."""

    @wraps(command)
    def with_connection(
        *args: Any, context: str | None, url: str | None, token: str | None, ca_file: str | None, **kwargs: Any
    ) -> Any:
        namespace = kwargs.pop("namespace", None) or ""
        all_namespaces = kwargs.pop("all_namespaces", False)
        from bursar.client.errors import NotFound

        with make_client(context=context, url=url, token=token, ca_file=ca_file) as client:
            connection = Connection(client, namespace, all_namespaces)
            try:
                return command(connection, *args, **kwargs)
            except NotFound as error:
                if hint := _namespace_hint(connection, error):
                    raise Problem(error.message, hint, NOT_FOUND) from error
                raise connection.located(error) from error

    wrapped: Any = all_of(*_OPTIONS)(with_connection)
    return wrapped  # type: ignore[no-any-return]


def _namespace_hint(connection: Connection, error: NotFound) -> str:
    """The user's namespaces, if none was given and `default` does not exist for this user; else empty."""
    usual = f'namespaces "{DEFAULT_NAMESPACE}" not found'
    if error.message != usual or connection.namespace or connection.effective_namespace != DEFAULT_NAMESPACE:
        return ""
    if visible := visible_namespaces(connection.client):
        return (
            f"give -n NAME: yours {'are' if len(visible) > 1 else 'is'} {', '.join(visible)}; `bursar login` stores one"
        )
    return "you have no namespace yet: ask your tenant's administrator for one"


def visible_namespaces(client: Client) -> list[str]:
    """The first namespaces by name, as many as fit into a sentence; none where the user may not list them."""
    from bursar.client import BursarError

    try:
        found = client.namespaces.list(limit=NAMESPACES_LISTED_MAX)
    except BursarError:
        return []
    return sorted(str(one["metadata"]["name"]) for one in found)[:NAMESPACES_LISTED_MAX]


def all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Combine several options into one decorator, in the order in which --help shows them."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def make_client(
    *,
    context: str | None = None,
    url: str | None = None,
    token: str | None = None,
    ca_file: str | None = None,
    tenant: str | None = None,
    seconds_max: float = 10.0,
    timeout_seconds: float = 30.0,
) -> Client:
    """A client with shorter retries than the SDK's default, because a person is waiting."""
    from bursar.client import Client, Retries

    return Client(
        url,
        token,
        ca_file=ca_file,
        context=context,
        tenant=tenant,
        timeout_seconds=timeout_seconds,
        retries=Retries(attempts_max=3, seconds_max=seconds_max),
    )


_OPTIONS = (
    click.option(
        "--context",
        metavar="NAME",
        help="The context to use; else the current one.",
        shell_complete=completers.context_name,
    ),
    click.option("--url", help="The server's URL.  [env: BURSAR_URL]"),
    click.option("--token", help="The token. Prefer BURSAR_TOKEN: process lists show options."),
    click.option("--ca-file", type=click.Path(dir_okay=False), help="The CA of the server's certificate."),
)

namespace_option = click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    help="The namespace; else the context's.",
    shell_complete=completers.named("namespaces"),
)
all_namespaces_option = click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
label_selector_option = click.option("-l", "--selector", "label_selector", default="", help="Such as app=train,!old.")
field_selector_option = click.option("--field-selector", default="", help="Such as status.phase=Running.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Check everything on the server, change nothing.")
