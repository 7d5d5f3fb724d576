"""`bursar ledger rotate-key` against a real server."""

import subprocess

from bursar.client import Client
from support.process.server import BURSAR, Server


def rotate(server: Server, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(BURSAR), "ledger", "rotate-key", *words]
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, (words, done.stdout, done.stderr)
    return done


def published(admin: Client) -> list[str]:
    return [one["kid"] for one in admin.request("GET", "/.well-known/jwks.json")["keys"]]


def test_a_new_key_signs_and_the_old_ones_are_believed_for_as_long_as_was_said(server: Server, admin: Client) -> None:
    before = published(admin)
    said = rotate(server, "--overlap", "1h", "--reason", "a quarter has passed").stdout
    assert published(admin) == [*before, said.split()[1]]
    assert said.endswith(f"valid keys: {', '.join(published(admin))}\n")
    said = rotate(server, "--overlap", "0", "--reason", "a backup was stolen").stdout
    assert published(admin) == [said.split()[1]]


def test_what_is_no_time_is_refused_before_anything_is_asked(server: Server, admin: Client) -> None:
    before = published(admin)
    assert "--overlap" in rotate(server, "--overlap", "soon", code=2).stderr
    assert published(admin) == before
