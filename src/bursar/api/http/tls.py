"""The private certificate authority of `--tls auto`: created once in the data directory; server certificates are
renewed."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from bursar.ops.nodes.x509 import new_authority, read_authority, sign_server

SERVER_LIFE = timedelta(days=90)
RENEW_DAYS = 30


def ensure_server_certificate(
    directory: Path, hosts: list[str], readers_gid: int | None = None
) -> tuple[Path, Path, Path]:
    """Return (certificate, key, CA certificate) for these hosts, signed by our CA; a certificate that is old or another
    CA's is replaced.

    The readers' group, if given, may read the certificate's key; only the owner may read the CA's key.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca_path, ca_key_path = directory / "ca.crt", directory / "ca.key"
    if not ca_path.exists() or not ca_key_path.exists():
        _write_ca(ca_path, ca_key_path)
    ca = read_authority(ca_path.read_bytes(), ca_key_path.read_bytes())
    path, key_path = directory / "server.crt", directory / "server.key"
    if not _is_good(path, key_path, hosts, ca.certificate):
        pair = sign_server(ca, hosts, datetime.now(UTC), SERVER_LIFE)
        _write(key_path, pair.key, 0o600)
        _write(path, pair.certificate, 0o644)
    if readers_gid is not None:
        directory.chmod(0o711)
        for one in (path, ca_path):
            one.chmod(0o644)  # whatever the umask was
        os.chown(key_path, -1, readers_gid)
        key_path.chmod(0o640)
    return path, key_path, ca_path


def _write_ca(path: Path, key_path: Path) -> None:
    made = new_authority("Bursar CA", datetime.now(UTC))
    _write(key_path, made.key_pem, 0o600)
    _write(path, made.pem, 0o644)


def _is_good(path: Path, key_path: Path, hosts: list[str], ca: x509.Certificate) -> bool:
    if not path.exists() or not key_path.exists():
        return False
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    there = {str(name) for name in names.get_values_for_type(x509.DNSName)}
    there |= {str(name) for name in names.get_values_for_type(x509.IPAddress)}
    fresh = certificate.not_valid_after_utc - datetime.now(UTC) > timedelta(days=RENEW_DAYS)
    return fresh and set(hosts) <= there and certificate.issuer == ca.subject


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically, and never readable by others in between."""
    temporary = path.with_suffix(path.suffix + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)
