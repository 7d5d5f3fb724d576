"""The node's identity: a private key that never leaves the node, and a certificate signed by the control plane's CA.

The data directory holds `key.pem`, `ca.pem`, `server.json` and, written last, `cert.pem`. A node enrols with a join
token that works once. Afterwards it renews its certificate over its own stream. A node whose certificate has expired
needs a new token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bursar.client import AsyncClient
from bursar.client.calls import ROOT, segment
from bursar.client.errors import ApiError
from bursar.client.flow import ONCE
from bursar.core.values.certificate import COMMON_NAME_CHARS_MAX, identity_in

KEY, CERTIFICATE, AUTHORITY, SERVER = "key.pem", "cert.pem", "ca.pem", "server.json"
ENROL_SECONDS_MAX = 10.0
RENEW_AFTER = 2 / 3  # of its life
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - wildcard addresses, which cannot be dialled


class IdentityError(Exception):
    """The node has no usable identity; `hint` is the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class EnrolmentRefused(IdentityError):
    """The control plane refused the token or the node."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The node's name, key and certificate; `addresses` are the control plane's gRPC addresses."""

    name: str
    certificate: bytes
    authority: bytes
    addresses: tuple[str, ...]
    begins: datetime
    expires: datetime
    key: bytes = field(repr=False)

    @property
    def renew_at(self) -> datetime:
        return self.begins + (self.expires - self.begins) * RENEW_AFTER

    def is_good(self, now: datetime) -> bool:
        """Whether the certificate has not expired by the node's clock. `begins` is not checked: the node's clock may be
        slow."""
        return now < self.expires

    def is_due(self, now: datetime) -> bool:
        """Whether the certificate should be renewed."""
        return now >= self.renew_at


class _Served(msgspec.Struct):
    """`server.json`."""

    name: str
    addresses: list[str]


class _Signed(msgspec.Struct):
    """The control plane's answer to a certificate signing request."""

    certificate: str
    authority: str
    address: str = ""


# The data directory.


def load(directory: Path, name: str) -> AgentIdentity | None:
    """Load the identity; None if a file is missing or the files do not match each other."""
    try:
        key, certificate, authority = ((directory / file).read_bytes() for file in (KEY, CERTIFICATE, AUTHORITY))
        served = msgspec.json.decode((directory / SERVER).read_bytes(), type=_Served)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise IdentityError(f"the node's identity cannot be read: {error}", "the agent must own its --data") from None
    if served.name != name:
        raise IdentityError(
            f"{directory} belongs to node {served.name!r}, not to {name!r}",
            f"give --name {served.name}, or another --data directory",
        )
    try:
        return _identity(name, key, certificate, authority, served.addresses)
    except IdentityError:
        return None


def save(directory: Path, identity: AgentIdentity) -> None:
    """Write the certificate last: if it exists, the other files do."""
    served = _Served(identity.name, list(identity.addresses))
    _write(directory / AUTHORITY, identity.authority)
    _write(directory / SERVER, msgspec.json.encode(served))
    _write(directory / CERTIFICATE, identity.certificate)


def ensure_key(directory: Path) -> bytes:
    """The node's private key, generated on first use, mode 0600."""
    path = directory / KEY
    try:
        held = path.read_bytes()
        _private(held)
    except FileNotFoundError:
        held = _pem(ec.generate_private_key(ec.SECP256R1()))
        _write(path, held, mode=0o600)
    except ValueError:
        raise IdentityError(f"{path} is not a key", "remove it, and join again with a new token") from None
    return held


def certificate_request(key: bytes, name: str) -> bytes:
    """A certificate signing request for the key. The common name is informational."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:COMMON_NAME_CHARS_MAX])])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_private(key), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


# Enrolment and renewal.


async def enrol(
    directory: Path, *, name: str, url: str, token: str, node: Mapping[str, Any], ca_file: str = ""
) -> AgentIdentity:
    """Join: exchange the token for a certificate. Raises ConnectionFailed if no server answers."""
    key = ensure_key(directory)
    wanted = {"certificateRequest": certificate_request(key, name).decode(), "node": dict(node)}
    # No retries here: the caller retries, and reports each failure.
    async with AsyncClient(
        url, token, ca_file=ca_file or None, timeout_seconds=ENROL_SECONDS_MAX, retries=ONCE
    ) as client:
        try:
            answer = await client.request("POST", f"{ROOT}/nodes/{segment(name)}/certificates", body=wanted)
        except ApiError as error:
            if error.passing:
                raise
            why = error.message.removesuffix(f"; {error.hint}")  # The hint is for users, not for nodes.
            raise EnrolmentRefused(f"the server refused node {name!r}: {why}", _next_step(error, name)) from None
    try:
        signed = msgspec.convert(answer, _Signed)
    except msgspec.ValidationError as error:
        raise IdentityError(f"{url} did not answer with a certificate: {error}", "check --server") from None
    if not signed.address:
        raise IdentityError(f"{url} does not serve agents", "start it with --grpc HOST:PORT")
    identity = _identity(
        name, key, signed.certificate.encode(), signed.authority.encode(), [reachable(signed.address, url)]
    )
    save(directory, identity)
    return identity


def renewed(directory: Path, identity: AgentIdentity, certificate: bytes) -> AgentIdentity:
    """The identity with a certificate received over the stream, if it matches the node's key and name."""
    fresh = _identity(identity.name, identity.key, certificate, identity.authority, identity.addresses)
    save(directory, fresh)
    return fresh


def reachable(address: str, url: str) -> str:
    """The address to dial: a server that listens on a wildcard address is dialled at its API's host."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in EVERYWHERE:
        return address
    there = urlsplit(url).hostname or "localhost"
    return f"[{there}]:{port}" if ":" in there else f"{there}:{port}"


def _next_step(error: ApiError, name: str) -> str:
    again = f"make a new token with `bursar node token --name {name}`, and put it in the --token-file"
    if error.status == 401:
        return f"the token is unknown, used up or expired: {again}"
    if error.status == 403:
        return f"the token is not this node's: {again}"
    return error.hint


def _identity(name: str, key: bytes, certificate: bytes, authority: bytes, addresses: Sequence[str]) -> AgentIdentity:
    """The identity, if its certificate matches the key, the name and the CA."""
    try:
        leaf = x509.load_pem_x509_certificates(certificate)[0]
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        public = _private(key).public_key()
    except (ValueError, TypeError, InvalidSignature) as error:
        raise IdentityError(f"the certificate cannot be used: {error or 'it is not signed by its authority'}") from None
    if leaf.public_key() != public:
        raise IdentityError("the certificate is for another key")
    named = identity_in(_uris(leaf))
    if named is None or named.node != name:
        raise IdentityError(f"the certificate is not that of node {name!r}")
    return AgentIdentity(
        name=name,
        key=key,
        certificate=certificate,
        authority=authority,
        addresses=tuple(addresses),
        begins=leaf.not_valid_before_utc,
        expires=leaf.not_valid_after_utc,
    )


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not a key on an elliptic curve")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write atomically and durably (rename, then fsync), with the mode set from the start."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    above = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(above)
    finally:
        os.close(above)
