"""X.509 keys and certificates: create an authority, sign certificates, check certificate requests.

Only the key of a request is used. Subject, lifetime and usage of the certificate are set here, whatever the request
asks for.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from bursar.core.values.certificate import (
    COMMON_NAME_CHARS_MAX,
    CONTROL_PLANE_URI,
    NodeIdentity,
    node_uris,
    server_name,
)
from bursar.core.values.refusal import Refusal, field_fault, invalid

AUTHORITY_DAYS = 3650
# The lifetime of certificates that a control plane process issues to itself, and renews.
OUR_LIFE = timedelta(days=30)
NODE_HOURS = 24
# The tolerance for clock differences between machines.
BACKDATED = timedelta(minutes=1)
REQUEST_BYTES_MAX = 16 * 1024
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 8192

REQUEST_FIELD = "certificateRequest"
_HINT = "Make an EC key on curve P-256 (or RSA from 2048 bits on), and a PKCS #10 request for it, as PEM."

PublicKey: TypeAlias = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority: it signs all certificates, and only its certificates are trusted."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        return _pem(self.certificate)

    @property
    def key_pem(self) -> bytes:
        return key_pem(self.key)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its key, as PEM."""

    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Issued:
    """A node's new certificate, and that of its authority, as PEM."""

    identity: NodeIdentity
    certificate: bytes
    authority: bytes
    expires_at: datetime


def new_authority(name: str, now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


@lru_cache(4)
def read_authority(certificate: bytes, key: bytes) -> Authority:
    private = serialization.load_pem_private_key(key, None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return Authority(x509.load_pem_x509_certificate(certificate), private)


def sign_node(authority: Authority, key: PublicKey, identity: NodeIdentity, now: datetime) -> Issued:
    """Sign a node agent's certificate, which it uses as client and as server."""
    uris = [x509.UniformResourceIdentifier(uri) for uri in node_uris(identity)]
    names = [*uris, host_name(server_name(identity.node))]
    good_for = (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)
    until = now + timedelta(hours=NODE_HOURS)
    signed = _sign(authority, key, identity.node[:COMMON_NAME_CHARS_MAX], names, good_for, now, until)
    return Issued(identity, _pem(signed), authority.pem, signed.not_valid_after_utc)


def sign_server(authority: Authority, hosts: Iterable[str], now: datetime, life: timedelta = OUR_LIFE) -> KeyPair:
    """Sign the server certificate of a control plane process at these hosts."""
    names = [host_name(host) for host in sorted(set(hosts))]
    return _sign_ours(authority, "bursar", names, ExtendedKeyUsageOID.SERVER_AUTH, now, life)


def sign_client(authority: Authority, now: datetime, life: timedelta = OUR_LIFE) -> KeyPair:
    """Sign the client certificate of a control plane process that calls agents."""
    names = [x509.UniformResourceIdentifier(CONTROL_PLANE_URI)]
    return _sign_ours(authority, "bursar control plane", names, ExtendedKeyUsageOID.CLIENT_AUTH, now, life)


def _sign_ours(
    authority: Authority,
    name: str,
    names: Sequence[x509.GeneralName],
    good_for: x509.ObjectIdentifier,
    now: datetime,
    life: timedelta,
) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    return KeyPair(_pem(_sign(authority, key.public_key(), name, names, (good_for,), now, now + life)), key_pem(key))


def _sign(
    authority: Authority,
    key: PublicKey,
    name: str,
    names: Sequence[x509.GeneralName],
    good_for: tuple[x509.ObjectIdentifier, ...],
    now: datetime,
    until: datetime,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.certificate.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(min(until, authority.certificate.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(good_for), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def read_request(pem: bytes) -> PublicKey | Refusal:
    """The key in a certificate request. The request's signature proves that the sender has the private key."""
    if len(pem) > REQUEST_BYTES_MAX:
        return _faulty(f"must have at most {REQUEST_BYTES_MAX} bytes")
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        fault = _key_fault(key)
        if not fault and not request.is_signature_valid:
            fault = "must be signed with its own key"
    except (ValueError, UnsupportedAlgorithm):
        return _faulty("must be a PKCS #10 certificate request in PEM, with a supported key")
    if fault or not isinstance(key, PublicKey):
        return _faulty(fault)
    return key


def fingerprint(key: PublicKey) -> bytes:
    """The fingerprint of a key: the SHA-256 of its public key."""
    spelled = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spelled).digest()


def _key_fault(key: object) -> str:
    """The reason why a key is not accepted; empty if it is."""
    if isinstance(key, ed25519.Ed25519PublicKey):
        # The TLS handshake would fail: the certificate would be useless, and the token used up.
        return "has an Ed25519 key, which gRPC's TLS does not support"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return "" if isinstance(key.curve, ec.SECP256R1) else f"has a key on {key.curve.name}: the curve must be P-256"
    if isinstance(key, rsa.RSAPublicKey):
        within = RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX
        return "" if within else f"has an RSA key of {key.key_size} bits: it must have {RSA_BITS_MIN} to {RSA_BITS_MAX}"
    return "has a key of an unsupported type"


def _faulty(fault: str) -> Refusal:
    return invalid(f"the {REQUEST_FIELD} {fault}", field_fault(REQUEST_FIELD, fault), hint=_HINT)


def host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
