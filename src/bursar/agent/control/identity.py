"""Who a node is: a key made on the node, which never leaves it, and a certificate that the control plane signed.

All of it lies below the data directory: `key.pem`, `ca.pem`, `server.json` and, written last, `cert.pem`. A node joins
with a token that is good for one use. From then on it renews its certificate over its own stream; only one that was
away until its certificate had expired needs a token again.
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
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - addresses that one can listen on and not dial


class IdentityError(Exception):
    """Why a node cannot be who it says; `hint` is the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class EnrolmentRefused(IdentityError):
    """The control plane does not take the token, or the node."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The name, and the papers that prove it; `addresses` are where the control plane listens for agents."""

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
        """By our own clock. When it begins is for the server's to say: ours may be slow."""
        return now < self.expires

    def is_due(self, now: datetime) -> bool:
        """Whether it is time for a new certificate."""
        return now >= self.renew_at


class _Served(msgspec.Struct):
    """`server.json`."""

    name: str
    addresses: list[str]


class _Signed(msgspec.Struct):
    """What the control plane answers to a request for a certificate."""

    certificate: str
    authority: str
    address: str = ""


# What lies in the directory.


def load(directory: Path, name: str) -> AgentIdentity | None:
    """The node's papers; None where there are none, or not all, or such as do not belong together."""
    try:
        key, certificate, authority = ((directory / file).read_bytes() for file in (KEY, CERTIFICATE, AUTHORITY))
        served = msgspec.json.decode((directory / SERVER).read_bytes(), type=_Served)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    except OSError as error:
        raise IdentityError(f"the node's papers cannot be read: {error}", "the agent must own its --data") from None
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
    """The certificate last: where it lies, all lies."""
    served = _Served(identity.name, list(identity.addresses))
    _write(directory / AUTHORITY, identity.authority)
    _write(directory / SERVER, msgspec.json.encode(served))
    _write(directory / CERTIFICATE, identity.certificate)


def ensure_key(directory: Path) -> bytes:
    """The node's key, made on first use, for the owner's eyes only."""
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
    """What is sent to be signed: the key's public half. The name is for people to read."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:COMMON_NAME_CHARS_MAX])])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(_private(key), hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


# What is signed.


async def enrol(
    directory: Path, *, name: str, url: str, token: str, node: Mapping[str, Any], ca_file: str = ""
) -> AgentIdentity:
    """Join: have the key certified. Uses the token up; raises ConnectionFailed where nobody answers."""
    key = ensure_key(directory)
    wanted = {"certificateRequest": certificate_request(key, name).decode(), "node": dict(node)}
    # Once: whoever joins tries again by itself, and wants to be told meanwhile.
    async with AsyncClient(
        url, token, ca_file=ca_file or None, timeout_seconds=ENROL_SECONDS_MAX, retries=ONCE
    ) as client:
        try:
            answer = await client.request("POST", f"{ROOT}/nodes/{segment(name)}/certificates", body=wanted)
        except ApiError as error:
            if error.passing:
                raise
            why = error.message.removesuffix(f"; {error.hint}")  # What a person would do next does not help a node.
            raise EnrolmentRefused(f"the server refused node {name!r}: {why}", _next_step(error, name)) from None
    try:
        signed = msgspec.convert(answer, _Signed)
    except msgspec.ValidationError as error:
        raise IdentityError(f"{url} answered something else than a certificate: {error}", "check --server") from None
    if not signed.address:
        raise IdentityError(f"{url} does not serve agents", "start it with --grpc HOST:PORT")
    identity = _identity(
        name, key, signed.certificate.encode(), signed.authority.encode(), [reachable(signed.address, url)]
    )
    save(directory, identity)
    return identity


def renewed(directory: Path, identity: AgentIdentity, certificate: bytes) -> AgentIdentity:
    """With the certificate that came over the stream, if it is the node's."""
    fresh = _identity(identity.name, identity.key, certificate, identity.authority, identity.addresses)
    save(directory, fresh)
    return fresh


def reachable(address: str, url: str) -> str:
    """Where to dial: a server that listens everywhere is where its API is."""
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
    """The papers, if they belong together."""
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
    """Whole or not at all, on the disk when it returns, and never readable by others for a moment."""
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
