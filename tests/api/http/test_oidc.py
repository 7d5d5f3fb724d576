"""JWTs against a provider that is a real HTTP server on loopback: its keys rotate, and it goes away."""

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws, jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey
from structlog.testing import capture_logs

from bursar.api.http.oidc import REFRESH_REGULAR_SECONDS, REFRESH_UNKNOWN_SECONDS, Oidc, Verified
from bursar.api.http.oidc_settings import OidcSettings
from bursar.core.values.access import Identity, Role
from bursar.core.values.refusal import Code, Refusal

RSA = RSAKey.generate_key(2048, {"kid": "rsa-1"})
RSA_NEW = RSAKey.generate_key(2048, {"kid": "rsa-2"})
EC = ECKey.generate_key("P-256", {"kid": "ec-1"})
ED = OKPKey.generate_key("Ed25519", {"kid": "ed-1"})
NOW = 1_900_000_000


class Provider:
    """What it publishes may be changed while it runs; it counts what it is asked for."""

    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = [dict(key.as_dict(private=False)) for key in (RSA, EC, ED)]
        self.issuer = ""
        self.claimed_issuer = ""
        self.body: bytes | None = None
        self.asked: list[str] = []
        self._server: ThreadingHTTPServer | None = None
        self.start()
        self.issuer = self.claimed_issuer = f"http://127.0.0.1:{self.port}/realm"

    def start(self, port: int = 0) -> None:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                body = provider.answer(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str) -> bytes | None:
        if path == "/realm/.well-known/openid-configuration":
            return json.dumps(
                {"issuer": self.claimed_issuer, "jwks_uri": f"http://127.0.0.1:{self.port}/keys"}
            ).encode()
        if path == "/keys":
            return self.body if self.body is not None else json.dumps({"keys": self.keys}).encode()
        return None


class Clock:
    def __init__(self) -> None:
        self.monotonic_seconds = 1000.0

    def monotonic(self) -> float:
        return self.monotonic_seconds

    def wall(self) -> float:
        return NOW


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider()
    yield provider
    provider.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def oidc(provider: Provider, clock: Clock) -> Oidc:
    return _oidc(provider, clock)


def _oidc(provider: Provider, clock: Clock, **settings: Any) -> Oidc:
    wanted = OidcSettings(**{"issuer": provider.issuer, "audience": "bursar", **settings})
    return Oidc(wanted, clock=clock.wall, monotonic=clock.monotonic)


def _claims(provider: Provider, **changes: Any) -> dict[str, Any]:
    claims = {
        "iss": provider.issuer,
        "aud": "bursar",
        "sub": "alice",
        "exp": NOW + 600,
        "bursar_tenant": "ml",
        "bursar_role": "user",
        **changes,
    }
    return {name: value for name, value in claims.items() if value is not None}


def _sign(claims: dict[str, Any], key: Any = RSA, alg: str = "RS256", **header: Any) -> str:
    named = {"alg": alg, "kid": key.kid, **header}
    kept = {name: value for name, value in named.items() if value is not None}
    return jwt.encode(kept, claims, key, algorithms=[alg])


def _b64(document: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).rstrip(b"=").decode()


async def _refused(oidc: Oidc, text: str) -> str:
    answer = await oidc.verify(text)
    assert isinstance(answer, Refusal), answer
    assert answer.code is Code.UNAUTHENTICATED
    assert text not in answer.message
    return answer.message


async def _accepted(oidc: Oidc, text: str) -> Identity:
    answer = await oidc.verify(text)
    assert isinstance(answer, Verified), answer
    return answer.identity


@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
@pytest.mark.parametrize(
    ("key", "alg"),
    [(RSA, "RS256"), (RSA, "PS256"), (EC, "ES256"), (ED, "Ed25519"), (ED, "EdDSA")],
    ids=lambda it: str(it)[:9],
)
async def test_a_signed_token_gives_its_identity(oidc: Oidc, provider: Provider, key: Any, alg: str) -> None:
    assert await _accepted(oidc, _sign(_claims(provider), key, alg)) == Identity("alice", Role.USER, tenant="ml")


async def test_the_keys_are_found_through_discovery_and_read_once(oidc: Oidc, provider: Provider) -> None:
    for _ in range(5):
        await _accepted(oidc, _sign(_claims(provider)))
    assert provider.asked == ["/realm/.well-known/openid-configuration", "/keys"]


async def test_the_keys_are_read_from_a_file(provider: Provider, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": provider.keys}))
    await _accepted(_oidc(provider, clock, jwks=str(path)), _sign(_claims(provider)))
    assert provider.asked == []


async def test_the_keys_are_read_from_a_given_url(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock, jwks=f"http://127.0.0.1:{provider.port}/keys")
    await _accepted(oidc, _sign(_claims(provider)))
    assert provider.asked == ["/keys"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iss": "https://evil.example"}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "another-service"}, "aud"),
        ({"aud": ["a", "b"]}, "aud"),
        ({"aud": None}, "aud"),
        ({"exp": NOW - 31}, "the JWT expired at 2030-03-17T17:46:09Z"),
        ({"exp": None}, "exp"),
        ({"exp": "tomorrow"}, "NumericDate"),
        ({"exp": True}, "NumericDate"),
        ({"exp": -(10**30)}, "a time out of range"),
        ({"nbf": NOW + 31}, "not yet valid"),
        ({"iat": NOW + 3600}, "future"),
        ({"sub": None}, "names no user"),
        ({"sub": ["a", "b"]}, "sub"),
        ({"bursar_role": None}, "the claim bursar_role is missing"),
        ({"bursar_role": "emperor"}, "must be one of system-admin, tenant-admin, user"),
        ({"bursar_role": "node", "bursar_tenant": None}, "must be one of"),
        ({"bursar_role": ["user", "system-admin"]}, "bursar_role is missing"),
        ({"bursar_role": {"user": 1}}, "bursar_role is missing"),
        ({"bursar_tenant": "", "bursar_role": "viewer"}, "role viewer belongs to a tenant"),
        ({"bursar_tenant": 7}, "role user belongs to a tenant"),
        ({"sub": "ali\nce"}, "printable"),
    ],
)
async def test_claims_that_are_refused(oidc: Oidc, provider: Provider, changes: dict[str, Any], said: str) -> None:
    assert said in await _refused(oidc, _sign(_claims(provider, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": NOW - 29},
        {"nbf": NOW + 29},
        {"aud": ["another-service", "bursar"]},
        {"bursar_role": ["user"]},
    ],
)
async def test_claims_that_are_just_good_enough(oidc: Oidc, provider: Provider, changes: dict[str, Any]) -> None:
    await _accepted(oidc, _sign(_claims(provider, **changes)))


async def test_claims_have_the_names_that_were_configured(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock, user_claims=("email", "sub"), tenant_claim="org", role_claim="role")
    claims = _claims(provider, email="a@example.org", org="physics", role="tenant-admin")
    assert await _accepted(oidc, _sign(claims)) == Identity("a@example.org", Role.TENANT_ADMIN, tenant="physics")
    claims.pop("email")
    assert (await _accepted(oidc, _sign(claims))).user == "alice"


async def test_alg_none_is_refused(oidc: Oidc, provider: Provider) -> None:
    for alg in ("none", "None", "NONE", ""):
        for signature in ("", "AAAA"):
            text = f"{_b64({'alg': alg, 'kid': 'rsa-1'})}.{_b64(_claims(provider))}.{signature}"
            await _refused(oidc, text)


@pytest.mark.parametrize(
    "secret",
    [RSA.as_pem(private=False), RSA.as_der(private=False), json.dumps(RSA.as_dict(private=False)).encode()],
    ids=["pem", "der", "jwk"],
)
async def test_a_public_key_used_as_an_hmac_secret_is_refused(oidc: Oidc, provider: Provider, secret: bytes) -> None:
    # Signed by hand: the library refuses to take part in this.
    signed = f"{_b64({'alg': 'HS256', 'kid': 'rsa-1'})}.{_b64(_claims(provider))}"
    signature = base64.urlsafe_b64encode(hmac.digest(secret, signed.encode(), "sha256")).rstrip(b"=").decode()
    assert "algorithm is not accepted" in await _refused(oidc, f"{signed}.{signature}")


async def test_a_symmetric_key_in_the_set_verifies_nothing(oidc: Oidc, provider: Provider) -> None:
    shared = OctKey.generate_key(256, {"kid": "shared"})
    provider.keys.append(dict(shared.as_dict(private=True)))
    await _refused(oidc, _sign(_claims(provider), shared, "HS256"))


async def test_keys_in_the_token_s_own_header_are_not_believed(oidc: Oidc, provider: Provider) -> None:
    evil = RSAKey.generate_key(2048, {"kid": "rsa-1"})
    public = evil.as_dict(private=False)
    await _refused(oidc, _sign(_claims(provider), evil, jwk=public))
    await _refused(oidc, _sign(_claims(provider), evil, jku=f"http://127.0.0.1:{provider.port}/evil"))
    assert "/evil" not in provider.asked


async def test_a_signature_by_another_key_or_for_other_claims_is_refused(oidc: Oidc, provider: Provider) -> None:
    assert "signature does not match" in await _refused(oidc, _sign(_claims(provider), RSA_NEW, kid="rsa-1"))
    assert "signature does not match" in await _refused(oidc, _sign(_claims(provider), EC, "ES256", kid="rsa-1"))
    head, _, signature = _sign(_claims(provider)).split(".")
    forged = f"{head}.{_b64(_claims(provider, bursar_role='system-admin'))}.{signature}"
    assert "signature does not match" in await _refused(oidc, forged)


async def test_a_token_that_names_no_key_is_refused_where_there_are_several(oidc: Oidc, provider: Provider) -> None:
    await _refused(oidc, _sign(_claims(provider), kid=None))


async def test_a_token_that_names_no_key_is_taken_where_there_is_one(oidc: Oidc, provider: Provider) -> None:
    provider.keys = [dict(RSA.as_dict(private=False))]
    await _accepted(oidc, _sign(_claims(provider), kid=None))


@pytest.mark.parametrize(
    "text",
    [
        "a.b.c",
        "..",
        "e30.e30.e30",
        f"{_b64([])}.{_b64({})}.AAAA",
        f"{_b64({'alg': ['RS256']})}.{_b64({})}.AAAA",
        f"{_b64({'alg': {'RS256': 1}})}.{_b64({})}.AAAA",
        f"{_b64({'alg': 'RS256', 'kid': ['rsa-1']})}.{_b64({})}.AAAA",
        f"{_b64({'alg': 'RS256', 'kid': 'rsa-1', 'crit': ['x'], 'x': 1})}.{_b64({})}.AAAA",
        f"{_b64({'alg': 'RS256', 'kid': 'x' * 5000})}.{_b64({})}.AAAA",
        f"{base64.urlsafe_b64encode(b'[' * 300).decode()}.{_b64({})}.AAAA",
        "\u00e9.\u00e9.\u00e9",
        "e30.\x00.e30",
    ],
)
async def test_hostile_texts_are_refused_quietly(oidc: Oidc, text: str) -> None:
    await _refused(oidc, text)


async def test_claims_nested_beyond_reason_are_refused(oidc: Oidc) -> None:
    payload = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
    await _refused(oidc, jws.serialize_compact({"alg": "RS256", "kid": "rsa-1"}, payload, RSA, algorithms=["RS256"]))


async def test_a_new_key_is_looked_for_and_found(oidc: Oidc, provider: Provider, clock: Clock) -> None:
    await _accepted(oidc, _sign(_claims(provider)))
    provider.keys = [dict(RSA_NEW.as_dict(private=False))]
    clock.monotonic_seconds += REFRESH_UNKNOWN_SECONDS
    await _accepted(oidc, _sign(_claims(provider), RSA_NEW))
    assert "does not publish" in await _refused(oidc, _sign(_claims(provider), RSA))


async def test_unknown_keys_are_looked_for_at_most_every_ten_seconds(
    oidc: Oidc, provider: Provider, clock: Clock
) -> None:
    for number in range(50):
        text = _sign(_claims(provider), RSA, kid=f"invented-{number}")
        assert "a key the issuer does not publish" in await _refused(oidc, text)
    assert provider.asked.count("/keys") == 1
    clock.monotonic_seconds += REFRESH_UNKNOWN_SECONDS
    for _ in range(50):
        await _refused(oidc, _sign(_claims(provider), RSA, kid="invented"))
    assert provider.asked.count("/keys") == 2


async def test_the_keys_are_kept_while_the_provider_is_away(oidc: Oidc, provider: Provider, clock: Clock) -> None:
    await _accepted(oidc, _sign(_claims(provider)))
    port = provider.port
    provider.stop()
    clock.monotonic_seconds += 3600
    with capture_logs() as logs:
        await _refused(oidc, _sign(_claims(provider), RSA_NEW))
        await _accepted(oidc, _sign(_claims(provider)))
    assert [entry["log_level"] for entry in logs] == ["warning"]
    provider.keys.append(dict(RSA_NEW.as_dict(private=False)))
    provider.start(port)
    clock.monotonic_seconds += REFRESH_UNKNOWN_SECONDS
    await _accepted(oidc, _sign(_claims(provider), RSA_NEW))
    await oidc.close()


async def test_a_withdrawn_key_is_not_trusted_for_ever(oidc: Oidc, provider: Provider, clock: Clock) -> None:
    await _accepted(oidc, _sign(_claims(provider)))
    provider.keys = [dict(RSA_NEW.as_dict(private=False))]
    clock.monotonic_seconds += REFRESH_REGULAR_SECONDS + 1
    await _accepted(oidc, _sign(_claims(provider)))  # the old keys serve while the new ones are fetched
    assert oidc._background is not None
    await oidc._background
    await _refused(oidc, _sign(_claims(provider)))


async def test_without_any_keys_the_answer_is_unavailable_and_heals(provider: Provider, clock: Clock) -> None:
    oidc = _oidc(provider, clock)
    port = provider.port
    provider.stop()
    answer = await oidc.verify(_sign(_claims(provider)))
    assert isinstance(answer, Refusal)
    assert answer.code is Code.UNAVAILABLE
    assert answer.retry_after_seconds == 1
    provider.start(port)
    clock.monotonic_seconds += 1
    await _accepted(oidc, _sign(_claims(provider)))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7, {}, {"kty": "RSA"}]}', b"x" * 2_000_000, b"\xff"]
)
async def test_a_key_set_that_is_none_does_not_replace_the_last(
    oidc: Oidc, provider: Provider, clock: Clock, body: bytes
) -> None:
    await _accepted(oidc, _sign(_claims(provider)))
    provider.body = body
    clock.monotonic_seconds += REFRESH_UNKNOWN_SECONDS
    await _refused(oidc, _sign(_claims(provider), RSA_NEW))
    await _accepted(oidc, _sign(_claims(provider)))


async def test_keys_for_encryption_and_of_unknown_kinds_are_left_out(oidc: Oidc, provider: Provider) -> None:
    provider.keys = [
        {**RSA.as_dict(private=False), "use": "enc"},
        {"kty": "PQ", "kid": "future"},
        dict(RSA_NEW.as_dict(private=False)),
    ]
    await _accepted(oidc, _sign(_claims(provider), RSA_NEW))
    await _refused(oidc, _sign(_claims(provider), RSA))


async def test_a_discovery_document_of_another_issuer_is_not_believed(oidc: Oidc, provider: Provider) -> None:
    provider.claimed_issuer = "https://evil.example"
    answer = await oidc.verify(_sign(_claims(provider)))
    assert isinstance(answer, Refusal)
    assert answer.code is Code.UNAVAILABLE


def test_a_key_set_is_what_providers_publish() -> None:
    assert "d" not in KeySet([RSA]).as_dict(private=False)["keys"][0]
    assert time.time() < NOW, "the tests' now must lie ahead, or an injected clock could hide behind the real one"
