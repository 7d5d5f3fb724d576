"""`bursar webhook`, against a real server and a real receiver."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bursar.cli.main import cli
from support.process.server import Server


class Receiver(ThreadingHTTPServer):
    """Answers as it is told to, and keeps what it got."""

    status = 204

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hook"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        thread = Thread(target=one.serve_forever, daemon=True)
        thread.start()
        try:
            yield one
        finally:
            one.shutdown()
            thread.join(10)


class Shell:
    def __init__(self, server: Server, config: Path) -> None:
        self.environment = {"BURSAR_URL": server.url, "BURSAR_TOKEN": server.token, "BURSAR_CONFIG": str(config)}

    def __call__(self, line: str, code: int = 0) -> Result:
        result = CliRunner(env=self.environment).invoke(cli, line.split())
        assert result.exit_code == code, f"{line}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result


@pytest.fixture
def shell(empty_server: Server, tmp_path: Path) -> Shell:
    return Shell(empty_server, tmp_path / "config.yaml")


@pytest.fixture
def name(shell: Shell) -> Iterator[str]:
    """Of a webhook that no other test uses, and that is gone afterwards."""
    one = f"hook-{uuid.uuid4().hex[:8]}"
    yield one
    CliRunner(env=shell.environment).invoke(cli, ["webhook", "delete", one])


def test_a_webhook_is_made_tried_listed_and_deleted(shell: Shell, receiver: Receiver, name: str) -> None:
    made = shell(f"webhook create {name} {receiver.url} --allow-local --type credit.low")
    assert made.stdout.startswith("whsec_")
    assert made.stderr == f"webhook/{name} created\n"
    said = shell(f"webhook test {name}").stdout
    (got,) = [one for one in receiver.got if one["type"] == "io.bursar.webhook.test"]
    assert said == f"webhook/{name} delivered {got['id']}\n"
    assert (got["subject"], got["data"]["webhook"]) == (name, name)
    (row,) = [line.split() for line in shell("webhook list").stdout.splitlines() if line.startswith(name)]
    assert row[1:8] == ["out", "<none>", receiver.url, "credit.low", "0", "0", "Active"]
    assert made.stdout.strip() not in shell("webhook list --json").stdout
    assert shell(f"webhook delete {name}").stdout == f"webhook/{name} deleted\n"
    assert shell(f"webhook delete {name}", code=3).stderr.startswith("Error: ")
    assert shell(f"webhook test {name}", code=3)
    assert shell(f"webhook deliveries {name}", code=3)


def test_what_is_not_taken_is_told(shell: Shell, receiver: Receiver, name: str) -> None:
    receiver.status = 503
    shell(f"webhook create {name} {receiver.url} --allow-local --type credit.drift")
    failed = shell(f"webhook test {name}", code=1).stderr
    assert failed.startswith(f"Error: webhook/{name} did not accept notice-")
    assert failed.endswith(": HTTP 503\n")
    header, row = shell(f"webhook deliveries {name}").stdout.splitlines()
    assert header.split()[:2] == ["EVENT", "TYPE"]
    assert row.split()[1:3] == ["io.bursar.webhook.test", name]
    assert row.endswith("HTTP 503")
    (item,) = json.loads(shell(f"webhook deliveries {name} --json").stdout)["items"]
    assert item["tries"] >= 1
    assert item["nextAt"] is not None


def test_a_receiver_on_the_servers_own_machine_must_be_said_to_be(shell: Shell, receiver: Receiver, name: str) -> None:
    shell(f"webhook create {name} {receiver.url} --type credit.drift")
    failed = shell(f"webhook test {name}", code=1).stderr
    assert failed.endswith("\n  hint: delete it, and create it with --allow-local\n")


def test_who_is_gone_is_told_so_and_is_sent_nothing_more(shell: Shell, receiver: Receiver, name: str) -> None:
    receiver.status = 410
    shell(f"webhook create {name} {receiver.url} --allow-local --type credit.drift")
    assert "did not accept notice-" in shell(f"webhook test {name}", code=1).stderr
    refused = shell(f"webhook test {name}", code=5).stderr
    assert "is stopped: the receiver answered 410 Gone" in refused
    assert "hint: Remove it, and create it again." in refused


def test_one_whose_payments_are_believed_has_no_url(shell: Shell, receiver: Receiver, name: str) -> None:
    assert shell(f"webhook create {name}", code=2).stderr.endswith("Error: give a URL or --payments\n")
    assert shell(f"webhook create {name} {receiver.url} --payments", code=2)
    assert shell(f"webhook create {name} --payments").stdout.startswith("whsec_")
    assert "it receives no notices" in shell(f"webhook test {name}", code=1).stderr
    assert shell(f"webhook deliveries {name} --json").stdout.split() == ["{", '"items":', "[]", "}"]
