"""Lease tokens: the agent accepts only a token signed for it, for this stream and this heartbeat, with a known key."""

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jws, jwt
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, OctKey, OKPKey

from bursar.agent.machine.lease_token import TYPE, Distrusted, SignedLease, Trust
from bursar.agent.machine.types import LeaseGrant
from bursar.ops.nodes.signing import Granted, Ring

NODE = "n1"
LEASE = Granted("lease-7", "alloc-1", 2, 120)


def key(name: str) -> OKPKey:
    return OKPKey.generate_key("Ed25519", {"kid": name, "use": "sig", "alg": "Ed25519"})


RING = Ring((key("k1"),))


def told(*rings: Ring, node: str = NODE) -> tuple[Trust, str]:
    """A stream that has just begun, and was told the keys of these."""
    trust = Trust(node)
    nonce = trust.begin()
    trust.learn({name: raw for ring in rings for name, raw in ring.public_keys().items()})
    return trust, nonce


def why(outcome: object) -> str:
    assert isinstance(outcome, Distrusted), outcome
    return outcome.why


def believed(outcome: dict[Any, SignedLease] | Distrusted) -> dict[Any, SignedLease]:
    assert not isinstance(outcome, Distrusted), outcome
    return outcome


def signed(claims: dict[str, Any], header: dict[str, Any] | None = None, by: Any = RING.keys[0]) -> str:
    header = {"alg": "Ed25519", "kid": "k1", "typ": TYPE, **(header or {})}
    return jwt.encode(header, claims, by, algorithms=[header["alg"]])


def claims(nonce: str, **other: Any) -> dict[str, Any]:
    lease = {"id": "lease-7", "uid": "alloc-1", "epoch": 2, "seconds": 120, "final": False}
    return {"iss": "bursar", "aud": NODE, "jti": "x", "nonce": nonce, "seq": 1, "leases": [lease], **other}


def test_a_token_says_what_the_lease_costs_and_until_when_it_is_paid() -> None:
    granted = Granted("lease-7", "alloc-1", 2, 120, rate="0.04", expires_at=1_800_000_120)
    payload = RING.sign(NODE, "n", 1, [granted]).split(".")[1]
    (lease,) = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["leases"]
    assert (lease["id"], lease["rate"], lease["expires_at"]) == ("lease-7", "0.04", 1_800_000_120)


def test_what_was_signed_for_this_heartbeat_is_believed() -> None:
    trust, nonce = told(RING)
    leases = believed(
        trust.verify(RING.sign(NODE, nonce, 1, [LEASE, Granted("lease-8", "alloc-2", 1, 3.5, final=True)]), 1)
    )
    assert leases["alloc-1", 2].seconds == 120
    assert (leases["alloc-2", 1].seconds, leases["alloc-2", 1].final) == (3.5, True)


def test_without_a_token_or_without_keys_nothing_is_believed() -> None:
    trust, nonce = told(RING)
    assert "no token" in why(trust.verify("", 1))
    trust, nonce = told()
    assert "not trusted" in why(trust.verify(RING.sign(NODE, nonce, 1, [LEASE]), 1))


@given(st.data())
def test_a_token_of_which_one_character_was_changed_is_never_believed_as_something_else(data: st.DataObject) -> None:
    trust, nonce = told(RING)
    token = RING.sign(NODE, nonce, 1, [LEASE])
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("ABCabc012-_.=!\x00é"))
    outcome = trust.verify(token[:at] + other + token[at + 1 :], 1)
    # The last character of the signature has bits that say nothing.
    assert isinstance(outcome, Distrusted) or outcome["alloc-1", 2].seconds == 120


def test_changed_claims_under_the_old_signature_are_refused() -> None:
    trust, nonce = told(RING)
    head, body, signature = RING.sign(NODE, nonce, 1, [LEASE]).split(".")
    said = json.loads(base64.urlsafe_b64decode(body + "=="))
    said["leases"][0]["seconds"] = 9999
    longer = base64.urlsafe_b64encode(json.dumps(said).encode()).rstrip(b"=").decode()
    assert "signature" in why(trust.verify(f"{head}.{longer}.{signature}", 1))


def test_a_token_for_another_node_is_refused() -> None:
    trust, nonce = told(RING)
    assert "for node 'n2'" in why(trust.verify(RING.sign("n2", nonce, 1, [LEASE]), 1))
    assert "claims are invalid" in why(trust.verify(signed(claims(nonce, aud=["n2", NODE])), 1))


def test_a_token_of_another_stream_is_refused_also_of_this_agents_last_one() -> None:
    trust, nonce = told(RING)
    kept = RING.sign(NODE, nonce, 1, [LEASE])
    trust.begin()
    trust.learn(RING.public_keys())
    assert "another stream" in why(trust.verify(kept, 1))


def test_a_token_is_good_for_its_heartbeat_and_once() -> None:
    trust, nonce = told(RING)
    first, second = (RING.sign(NODE, nonce, seq, [LEASE]) for seq in (1, 2))
    assert "for heartbeat 1, but the answer is to heartbeat 2" in why(trust.verify(first, 2))
    believed(trust.verify(second, 2))
    assert "replay" in why(trust.verify(second, 2))
    assert "replay" in why(trust.verify(first, 1))


def test_a_refused_token_takes_nothing_from_the_one_that_comes_after_it() -> None:
    trust, nonce = told(RING)
    why(trust.verify(RING.sign("n2", nonce, 1, [LEASE]), 1))
    believed(trust.verify(RING.sign(NODE, nonce, 1, [LEASE]), 1))


def test_after_a_key_was_removed_what_it_signs_is_refused() -> None:
    old, new = RING, Ring((key("k2"),))
    both = Ring((*old.keys, *new.keys))
    trust, nonce = told(both)
    believed(trust.verify(old.sign(NODE, nonce, 1, [LEASE]), 1))
    believed(trust.verify(new.sign(NODE, nonce, 2, [LEASE]), 2))
    trust.learn({})  # most answers name no keys: that changes nothing
    believed(trust.verify(old.sign(NODE, nonce, 3, [LEASE]), 3))
    trust.learn(new.public_keys())
    assert "not trusted: 'k1'" in why(trust.verify(old.sign(NODE, nonce, 4, [LEASE]), 4))
    believed(trust.verify(new.sign(NODE, nonce, 4, [LEASE]), 4))


def test_keys_of_the_stream_before_do_not_count_on_the_next() -> None:
    trust, _ = told(RING)
    nonce = trust.begin()
    assert "not trusted" in why(trust.verify(RING.sign(NODE, nonce, 1, [LEASE]), 1))


def test_another_key_under_a_known_name_is_refused() -> None:
    trust, nonce = told(RING)
    assert "signature" in why(trust.verify(Ring((key("k1"),)).sign(NODE, nonce, 1, [LEASE]), 1))


def _symmetric(nonce: str) -> str:
    """Signed with what is public, as if it were a secret."""
    public = RING.public_keys()["k1"]
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "k1", "typ": TYPE}).encode()).rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims(nonce)).encode()).rstrip(b"=")
    mac = hmac.new(public, head + b"." + body, hashlib.sha256).digest()
    return b".".join((head, body, base64.urlsafe_b64encode(mac).rstrip(b"="))).decode()


def _unsigned(nonce: str) -> str:
    _, body, _ = signed(claims(nonce)).split(".")
    none = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": "k1", "typ": TYPE}).encode()).rstrip(b"=")
    return f"{none.decode()}.{body}."


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(_symmetric, id="a MAC under the public key"),
        pytest.param(_unsigned, id="no signature at all"),
        pytest.param(
            lambda nonce: signed(claims(nonce), {"alg": "ES256"}, ECKey.generate_key("P-256")), id="another curve"
        ),
        pytest.param(
            lambda nonce: signed(claims(nonce), {"alg": "HS256"}, OctKey.generate_key(256)), id="a secret of its own"
        ),
        pytest.param(lambda nonce: signed(claims(nonce), {"typ": "JWT"}), id="a token of another type"),
    ],
)
def test_no_other_algorithm_and_no_other_type_is_read(forged: Any) -> None:
    trust, nonce = told(RING)
    assert "with algorithm Ed25519" in why(trust.verify(forged(nonce), 1))


def test_the_old_name_of_the_algorithm_is_none_of_ours() -> None:
    trust, nonce = told(RING)
    header, same = {"alg": "EdDSA", "kid": "k1", "typ": TYPE}, OKPKey.import_key(RING.keys[0].as_pem(private=True))
    with pytest.warns(SecurityWarning):
        token = jws.serialize_compact(header, json.dumps(claims(nonce)).encode(), same, algorithms=["EdDSA"])
    assert "with algorithm Ed25519" in why(trust.verify(token, 1))


LEASES = claims("")["leases"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"leases": [{**LEASES[0], "seconds": -1}]},
        {"leases": [{**LEASES[0], "seconds": 1e12}]},
        {"leases": [{**LEASES[0], "seconds": "120"}]},
        {"leases": [{**LEASES[0], "epoch": 1.5}]},
        {"leases": [{"uid": "alloc-1"}]},
        {"leases": "all"},
        {"seq": "1"},
    ],
)
def test_claims_that_cannot_be_right_are_refused_though_they_are_signed(wrong: dict[str, Any]) -> None:
    trust, nonce = told(RING)
    assert "claims are invalid" in why(trust.verify(signed(claims(nonce, **wrong)), 1))


def test_of_another_issuer_or_with_a_placement_twice_it_is_refused() -> None:
    trust, nonce = told(RING)
    assert "issued by 'other'" in why(trust.verify(signed(claims(nonce, iss="other")), 1))
    assert "twice" in why(trust.verify(signed(claims(nonce, leases=[*LEASES, *LEASES])), 1))


@given(st.text() | st.from_regex(r"[\w-]*\.[\w-]*\.[\w-]*", fullmatch=True))
def test_whatever_is_said_instead_of_a_token_is_refused_and_nothing_breaks(text: str) -> None:
    trust, _ = told(RING)
    assert isinstance(trust.verify(text, 1), Distrusted)


def test_a_key_that_cannot_be_one_is_passed_over() -> None:
    trust, nonce = told(RING)
    trust.learn({**RING.public_keys(), "short": b"123", "empty": b""})
    believed(trust.verify(RING.sign(NODE, nonce, 1, [LEASE]), 1))


# What counts of what was granted.

PLACE = ("alloc-1", 2)


@pytest.mark.parametrize(
    ("grant", "signed", "counts", "complains"),
    [
        pytest.param(LeaseGrant(120), LEASE, LeaseGrant(120), False, id="as it is signed"),
        pytest.param(LeaseGrant(60), LEASE, LeaseGrant(60), False, id="shorter than it is signed"),
        pytest.param(LeaseGrant(121), LEASE, None, True, id="longer than it is signed"),
        pytest.param(
            LeaseGrant(120, "x"), LEASE, LeaseGrant(120, "x"), False, id="the last, though it is not signed to be"
        ),
        pytest.param(
            LeaseGrant(120),
            Granted("lease-7", "alloc-1", 2, 120, final=True),
            None,
            True,
            id="signed to be the last, and not said",
        ),
        pytest.param(
            LeaseGrant(500, "x", 9), LEASE, LeaseGrant(0, "x", 9), True, id="longer, and the last: only that counts"
        ),
        pytest.param(LeaseGrant(120), Granted("lease-7", "alloc-1", 1, 120), None, True, id="signed for another epoch"),
        pytest.param(LeaseGrant(120), Granted("lease-7", "alloc-2", 2, 120), None, True, id="signed for another"),
        pytest.param(LeaseGrant(0, "fenced"), None, LeaseGrant(0, "fenced"), False, id="an end needs no signature"),
        pytest.param(LeaseGrant(120), None, None, True, id="not signed at all"),
        pytest.param(
            LeaseGrant(9, "x"), None, LeaseGrant(0, "x"), True, id="the last, and not signed: no more, and no longer"
        ),
    ],
)
def test_nothing_counts_for_longer_than_it_is_signed(
    grant: LeaseGrant, signed: Granted | None, counts: LeaseGrant | None, complains: bool
) -> None:
    trust, nonce = told(RING)
    token = RING.sign(NODE, nonce, 1, [signed]) if signed is not None else ""
    outcome = trust.believe({PLACE: grant}, token, 1)
    assert outcome.grants.get(PLACE) == counts
    assert bool(outcome.why) is complains
    assert {*outcome.signed} == ({PLACE} if counts is not None and counts.seconds else set())


def test_one_that_is_not_believed_takes_nothing_from_the_others() -> None:
    trust, nonce = told(RING)
    other = ("alloc-2", 1)
    token = RING.sign(NODE, nonce, 1, [LEASE, Granted("lease-8", *other, 120)])
    outcome = trust.believe({PLACE: LeaseGrant(9999), other: LeaseGrant(120)}, token, 1)
    assert outcome.grants == {other: LeaseGrant(120)}
    assert "the grant to alloc-1 is longer" in outcome.why
