"""The node's papers as they stand: loaded, joined for, renewed, and joined for again once they are no longer good.

The token is read from its file when it is needed, so that whoever puts a new one there need not restart the agent. One
that was refused is not tried again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import grpc
import structlog

from bursar.agent.control import identity as node
from bursar.agent.control.identity import AgentIdentity, EnrolmentRefused, IdentityError
from bursar.client.errors import ApiError, ConnectionFailed

log = structlog.get_logger()

# One address is one connection of its own, tried anew when we say so. A wanted set may be long.
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


class NodeCredentials(Protocol):
    """What a stream needs to speak as the node."""

    @property
    def addresses(self) -> Sequence[str]: ...

    async def ensure(self) -> None:
        """Have papers that are good now. Raises IdentityError, or BursarError while nobody answers."""

    def channel(self, address: str) -> grpc.aio.Channel: ...

    def due_request(self) -> bytes:
        """A request for a new certificate, when it is time for one; else nothing."""

    def renew(self, certificate: bytes) -> None: ...

    def refused(self) -> None:
        """The control plane does not take these papers."""


class NoCredentials:
    """For a control plane on this machine that asks for none."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)

    async def ensure(self) -> None:
        return

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    def due_request(self) -> bytes:
        return b""

    def renew(self, certificate: bytes) -> None:
        del certificate

    def refused(self) -> None:
        return


class NodeCertificates:
    """Those of a node that joined. `addresses` are where to dial, if not where the control plane says it listens."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *,
        urls: Sequence[str],
        token_file: Path | None,
        document: Callable[[], Mapping[str, Any]],
        ca_file: str = "",
        addresses: Sequence[str] = (),
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._directory = directory
        self._name = name
        self._urls = tuple(urls)
        self._token_file = token_file
        self._document = document
        self._ca_file = ca_file
        self._addresses = tuple(addresses)
        self._now = now
        self._useless: set[bytes] = set()  # digests of tokens that need not be tried again
        self._doubtful = False  # the control plane does not take what we have
        self.identity: AgentIdentity | None = node.load(directory, name)

    @property
    def addresses(self) -> Sequence[str]:
        if self._addresses:
            return self._addresses
        return self.identity.addresses if self.identity else ()

    async def ensure(self) -> None:
        identity = self.identity
        if identity is not None and identity.is_good(self._now()) and not (self._doubtful and self._has_new_token()):
            return
        token = self._token()
        if hashlib.sha256(token.encode()).digest() in self._useless:
            raise IdentityError(f"node {self._name!r} needs a new token to join", self._next_step)
        await self._join(token)

    async def _join(self, token: str) -> None:
        """Ask one server after the other; the first that answers decides. If none does, why is said of each."""
        troubles: list[ConnectionFailed | ApiError] = []
        for url in self._urls:
            try:
                self.identity = await node.enrol(
                    self._directory,
                    name=self._name,
                    url=url,
                    token=token,
                    node=self._document(),
                    ca_file=self._ca_file,
                )
            except EnrolmentRefused:
                self._useless.add(hashlib.sha256(token.encode()).digest())
                raise
            except (ConnectionFailed, ApiError) as error:
                troubles.append(error)
            else:
                self._useless.add(hashlib.sha256(token.encode()).digest())
                self._doubtful = False
                log.info("the node has joined", node=self._name, expires=self.identity.expires.isoformat())
                return
        if len(troubles) == 1:
            raise troubles[0]
        raise ConnectionFailed(
            "; ".join(error.message for error in troubles) or "no server is named",
            troubles[0].hint if troubles else "give --server URL",
            passing=any(error.passing for error in troubles) or not troubles,
        )

    def _token(self) -> str:
        if self._token_file is None:
            raise IdentityError(f"node {self._name!r} has not joined yet", self._next_step)
        try:
            token = self._token_file.read_text().strip()
        except OSError as error:
            raise IdentityError(f"the token cannot be read: {error}", self._next_step) from None
        if not token:
            raise IdentityError(f"{self._token_file} is empty", self._next_step)
        return token

    def _has_new_token(self) -> bool:
        try:
            return hashlib.sha256(self._token().encode()).digest() not in self._useless
        except IdentityError:
            return False

    @property
    def _next_step(self) -> str:
        where = f"in {self._token_file}" if self._token_file else "in a file, and give it with --token-file"
        return f"make a token with `bursar node token --name {self._name}`, and put it {where}"

    def channel(self, address: str) -> grpc.aio.Channel:
        assert self.identity is not None, "papers are ensured before they are shown"
        credentials = grpc.ssl_channel_credentials(
            self.identity.authority, self.identity.key, self.identity.certificate
        )
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

    def due_request(self) -> bytes:
        if self.identity is None or not self.identity.is_due(self._now()):
            return b""
        return node.certificate_request(self.identity.key, self._name)

    def renew(self, certificate: bytes) -> None:
        assert self.identity is not None, "who has no papers gets no new ones"
        self.identity = node.renewed(self._directory, self.identity, certificate)
        log.info("the certificate was renewed", node=self._name, expires=self.identity.expires.isoformat())

    def refused(self) -> None:
        self._doubtful = True
