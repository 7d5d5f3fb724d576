"""Keys and certificate requests, as agents make them."""

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

Key = (
    ec.EllipticCurvePrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
    | rsa.RSAPrivateKey
    | dsa.DSAPrivateKey
)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def request_for(key: Key, subject: str = "whoever") -> bytes:
    """A certificate request that names somebody; the name must not matter."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    alternative = x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier(f"bursar://node/{subject}"), x509.DNSName("localhost")]
    )
    wants_to_sign = x509.BasicConstraints(ca=True, path_length=None)
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    builder = builder.add_extension(alternative, critical=False).add_extension(wants_to_sign, critical=True)
    plain = isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey)
    return builder.sign(key, None if plain else hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def pem_of(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read(pem: str | bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)


def uris_in(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)
