"""The node's client certificate through its life: loaded from disk, enrolled, renewed, and enrolled again after expiry.

The join token is read from its file at each attempt, so a new token needs no restart. A token that was refused or used
is not sent again.
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

# One connection per address; `stream.py` decides when to reconnect. A wanted set may be long.
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


class NodeCredentials(Protocol):
    """The credentials with which a stream authenticates as the node."""

    @property
    def addresses(self) -> Sequence[str]: ...

    async def ensure(self) -> None:
        """Ensure that a certificate is valid now. Raises IdentityError, or BursarError while no server answers."""

    def channel(self, address: str) -> grpc.aio.Channel: ...

    def due_request(self) -> bytes:
        """A certificate signing request if renewal is due; else empty."""

    def renew(self, certificate: bytes) -> None: ...

    def refused(self) -> None:
        """The control plane rejected the certificate."""


class NoCredentials:
    """No certificates: for a control plane on the same machine that was started with --grpc-insecure."""

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
    """The credentials of a node that joined. `addresses` replaces the gRPC addresses that the control plane reports."""

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
        self._useless: set[bytes] = set()  # digests of tokens that were used or refused
        self._doubtful = False  # the control plane rejected the certificate
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
        """Try each server in order; the first that answers decides. If none answers, the error names each failure."""
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
                log.info(
                    "node_joined", message="the node has joined the cluster",
                    node=self._name, expires=self.identity.expires.isoformat(),
                )  # fmt: skip
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
        assert self.identity is not None, "ensure() comes first"
        credentials = grpc.ssl_channel_credentials(
            self.identity.authority, self.identity.key, self.identity.certificate
        )
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)

    def due_request(self) -> bytes:
        if self.identity is None or not self.identity.is_due(self._now()):
            return b""
        return node.certificate_request(self.identity.key, self._name)

    def renew(self, certificate: bytes) -> None:
        assert self.identity is not None, "only a node with a certificate renews it"
        self.identity = node.renewed(self._directory, self.identity, certificate)
        log.info(
            "certificate_renewed", message="the node's certificate was renewed",
            node=self._name, expires=self.identity.expires.isoformat(),
        )  # fmt: skip

    def refused(self) -> None:
        self._doubtful = True
