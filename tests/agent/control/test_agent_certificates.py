"""A node's papers: made on the node, kept across restarts, and never somebody else's."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from bursar.agent.control import identity
from bursar.agent.control.certificates import NodeCertificates
from bursar.agent.control.identity import IdentityError, reachable
from support.nodes.played_control_plane import authority, joined, node_certificate


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    key = identity.ensure_key(tmp_path)
    assert stat.S_IMODE((tmp_path / identity.KEY).stat().st_mode) == 0o600
    assert identity.ensure_key(tmp_path) == key
    assert not [path for path in tmp_path.iterdir() if path.name != identity.KEY]


def test_what_is_asked_to_be_signed_is_signed_with_the_key(tmp_path: Path) -> None:
    request = x509.load_pem_x509_csr(identity.certificate_request(identity.ensure_key(tmp_path), "n" * 200))
    assert request.is_signature_valid


def test_papers_are_found_again_and_hide_the_key(tmp_path: Path) -> None:
    made = joined(tmp_path, authority(), "node-1", ["a:1", "b:2"])
    assert identity.load(tmp_path, "node-1") == made
    assert made.addresses == ("a:1", "b:2")
    assert "PRIVATE KEY" not in repr(made)


def test_papers_of_another_node_are_refused_with_the_way_out(tmp_path: Path) -> None:
    joined(tmp_path, authority(), "node-1")
    with pytest.raises(IdentityError, match="belongs to node 'node-1'") as refused:
        identity.load(tmp_path, "node-2")
    assert "--name node-1" in refused.value.hint


@pytest.mark.parametrize("file", [identity.KEY, identity.CERTIFICATE, identity.AUTHORITY, identity.SERVER])
def test_papers_that_are_not_all_there_are_none(tmp_path: Path, file: str) -> None:
    joined(tmp_path, authority(), "node-1")
    (tmp_path / file).unlink()
    assert identity.load(tmp_path, "node-1") is None


@pytest.mark.parametrize("file", [identity.KEY, identity.CERTIFICATE, identity.AUTHORITY, identity.SERVER])
def test_papers_that_were_torn_are_none(tmp_path: Path, file: str) -> None:
    joined(tmp_path, authority(), "node-1")
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:10])
    assert identity.load(tmp_path, "node-1") is None


def test_a_key_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / identity.KEY).write_text("nonsense")
    with pytest.raises(IdentityError, match="is not a key"):
        identity.ensure_key(tmp_path)


def test_a_new_certificate_is_taken_if_it_is_ours(tmp_path: Path) -> None:
    ours = authority()
    old = joined(tmp_path, ours, "node-1", ["a:1"], ago=timedelta(hours=20))
    request = identity.certificate_request(old.key, "node-1")
    fresh = identity.renewed(tmp_path, old, node_certificate(ours, request, "node-1"))
    assert identity.load(tmp_path, "node-1") == fresh
    assert fresh.expires > old.expires
    assert fresh.key == old.key


def test_a_certificate_of_another_node_key_or_authority_is_not_taken(tmp_path: Path) -> None:
    ours, elsewhere = authority(), tmp_path / "other"
    elsewhere.mkdir()
    mine = joined(tmp_path, ours, "node-1")
    request = identity.certificate_request(mine.key, "node-1")
    others_key = identity.certificate_request(identity.ensure_key(elsewhere), "node-1")
    for wrong in (
        node_certificate(ours, request, "node-2"),
        node_certificate(ours, others_key, "node-1"),
        node_certificate(authority(), request, "node-1"),
        b"nonsense",
    ):
        with pytest.raises(IdentityError):
            identity.renewed(tmp_path, mine, wrong)
    assert identity.load(tmp_path, "node-1") == mine


def test_it_is_renewed_after_two_thirds_of_its_life(tmp_path: Path) -> None:
    made = joined(tmp_path, authority(), "node-1")
    life = made.expires - made.begins
    assert not made.is_due(made.begins + life * 0.66)
    assert made.is_due(made.begins + life * 0.67)
    assert made.is_good(made.expires - timedelta(seconds=1))
    assert made.is_good(made.begins - timedelta(hours=1)), "our clock may be slow"
    assert not made.is_good(made.expires)


@pytest.mark.parametrize(
    ("address", "url", "dialled"),
    [
        ("10.0.0.1:50051", "https://bursar:8080", "10.0.0.1:50051"),
        ("0.0.0.0:50051", "https://bursar:8080", "bursar:50051"),
        ("[::]:50051", "https://bursar:8080", "bursar:50051"),
        ("[::]:50051", "http://[::1]:8080", "[::1]:50051"),
    ],
)
def test_a_server_that_listens_everywhere_is_dialled_where_its_api_is(address: str, url: str, dialled: str) -> None:
    assert reachable(address, url) == dialled


def credentials(directory: Path, token_file: Path | None) -> NodeCertificates:
    return NodeCertificates(directory, "node-1", urls=["http://127.0.0.1:1"], token_file=token_file, document=dict)


async def test_without_a_token_a_new_node_is_told_how_to_get_one(tmp_path: Path) -> None:
    for file in (None, tmp_path / "missing", tmp_path):
        with pytest.raises(IdentityError) as refused:
            await credentials(tmp_path, file).ensure()
        assert "bursar node token --name node-1" in refused.value.hint


async def test_an_expired_certificate_needs_a_token_again(tmp_path: Path) -> None:
    joined(tmp_path, authority(), "node-1", ["a:1"], ago=timedelta(hours=25))
    ours = credentials(tmp_path, None)
    assert ours.identity is not None
    assert not ours.identity.is_good(datetime.now(UTC))
    with pytest.raises(IdentityError):
        await ours.ensure()


async def test_good_papers_need_nobody(tmp_path: Path) -> None:
    joined(tmp_path, authority(), "node-1", ["a:1"])
    ours = credentials(tmp_path, None)
    await ours.ensure()
    ours.refused()
    await ours.ensure()  # without a new token there is nothing to be done about it
    assert list(ours.addresses) == ["a:1"]
