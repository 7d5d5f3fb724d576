"""Somebody who moves money over a bad line: requests are cut off and repeated, and what was answered is remembered."""

import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from bursar.core.values.money import credits_of, nanocredits
from support.process.server import Server

PASSING = (408, 429)
PATIENCE_SECONDS = 120.0
ANSWER_SECONDS = 20.0


@dataclass(slots=True)
class Teller:
    """Top-ups, refunds, adjustments and leases by name, each with its own request id, until it is told to stop."""

    server: Server
    accounts: Sequence[str]
    dice: random.Random
    pause_seconds: float = 0.05
    done: dict[str, tuple[str, int]] = field(default_factory=dict)  # by request id: the account, and what came to it
    opened: dict[str, str] = field(default_factory=dict)  # jobs, and their leases
    faults: list[str] = field(default_factory=list)
    cuts: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at_work(self) -> Iterator["Teller"]:
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield self
        finally:
            self.stopping.set()
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()

    def _work(self) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            try:
                self._one(number)
            except Exception as error:  # told by the test: a thread has nobody to tell
                self.faults.append(f"request {number}: {error!r}")
                return
            self.stopping.wait(self.dice.uniform(0, self.pause_seconds))

    def _one(self, number: int) -> None:
        if self.dice.random() < 0.25:
            self._lease(f"named-{number}")
            return
        verb = self.dice.choice(["topups", "refunds", "adjustments"])
        amount = self.dice.randrange(1, 10**7) * (self.dice.choice([1, -1]) if verb == "adjustments" else 1)
        self.move(verb, self.dice.choice(self.accounts), amount, f"r-{number}")

    def move(self, verb: str, account: str, amount: int, request: str) -> None:
        body = {"amount": credits_of(amount), "account": account, "reason": "as asked", "request_id": request}
        status, answer = self.order(verb, body)
        if status == 201:
            self.done[f"{verb}:{request}"] = account, amount
        elif (status, verb) != (403, "adjustments"):
            self.faults.append(f"{verb} {body}: {status} {answer}")

    def _lease(self, job: str) -> None:
        """Open, extend and close a lease; after a long outage it has ended."""
        asked = {"job_id": job, "resources": {"cpu": 1}, "window_seconds": 3, "account": self.accounts[0]}
        status, answer = self.order("leases", {**asked, "request_id": f"open-{job}"})
        if status != 201:
            self.faults.append(f"{job}: {status} {answer}")
            return
        self.opened[job] = answer["lease_id"]
        for verb, more in (("extend", {"delta_seconds": 2}), ("close", {})):
            path = f"leases/{answer['lease_id']}/{verb}"
            status, told = self.order(path, {**more, "request_id": f"{verb}-{job}"})
            if status not in (200, 409):
                self.faults.append(f"{verb} {job}: {status} {told}")

    def order(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Perhaps cut off first, and perhaps asked again: every answer is the same. Only that too little is there is
        not remembered: who asks again is decided on again."""
        while self.dice.random() < 0.4:
            self._cut_off(path, body)
        answer = self._ask(path, body)
        if self.dice.random() < 0.3:
            before, answer = answer, self._ask(path, body)
            if before != answer and before[0] != 403:
                self.faults.append(f"{path} {body}: {before}, and then {answer}")
        return answer

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Again, for as long as nobody answers."""
        headers = {"authorization": f"Bearer {self.server.token}", "content-type": "application/json"}
        url, deadline = f"{self.server.url}/api/v1/{path}", time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx2.TransportError):
                answer = httpx2.post(
                    url, content=json.dumps(body), headers=headers, timeout=ANSWER_SECONDS, trust_env=False
                )
                if answer.status_code < 500 and answer.status_code not in PASSING:
                    return answer.status_code, answer.json()
            time.sleep(0.05)
        raise AssertionError(f"nobody answers {path}")

    def _cut_off(self, path: str, body: dict[str, Any]) -> None:
        """The connection is reset before the answer is read: at once, in the middle of it, or when it has come."""
        where = urlsplit(self.server.url)
        data = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {self.server.token}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        wait = self.dice.choice([0.0, self.dice.uniform(0, 0.01), self.dice.uniform(0, 0.05), 2.0])
        with suppress(OSError), socket.create_connection((where.hostname or "", where.port or 80), 5) as line:
            line.sendall(head.encode() + data)
            select.select([line], [], [], wait)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.cuts += 1


def paid_in(teller: Teller) -> dict[str, int]:
    """What came to each account by request, in nanocredits."""
    total = dict.fromkeys(teller.accounts, 0)
    for account, amount in teller.done.values():
        total[account] += amount
    return total


def order_surely(teller: Teller, account: str, amount: str, request: str) -> None:
    teller.move("topups", account, nanocredits(amount), request)
