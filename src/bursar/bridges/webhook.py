"""Sends notices to those who asked for them, as signed CloudEvents, until they were taken.

Each is sent at least once: what came of it is recorded after it was sent, and who dies in between has it sent again
under the same id. Any number of controllers may do this: what one has claimed the others pass over. A receiver that
hangs or refuses holds up nobody but itself. Redirects are not followed. The name of the receiver is looked up once, the
address is looked at, and that address is called: a name cannot point elsewhere in between.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx2
import structlog

from bursar.core.objects.webhook import (
    BACKOFF_SECONDS_MAX,
    GIVE_UP_SECONDS,
    backoff_seconds,
    local_fault,
    sign,
)
from bursar.daemon_thread import apart
from bursar.ops.objects.webhook import forget_notices, stop_webhook
from bursar.ops.runtime.runtime import Runtime
from bursar.store.db.database import AWAY
from bursar.store.objects import webhook as store
from bursar.store.objects.webhook import Delivery
from bursar.wire.reports.cloud_event import MEDIA_TYPE, cloud_event, event_id

log = structlog.get_logger()

PAUSE_SECONDS = 1.0
SEND_SECONDS_MAX = 10.0
CLAIM_SECONDS = 60.0  # much longer than sending can take, recording included
AT_ONCE = 4  # to one receiver
FORGET_SECONDS = 3600.0
SAID_CHARS_MAX = 200
GONE = 410


class DeliveryRefused(Exception):
    """It was not sent: the message says why."""


@dataclass(frozen=True, slots=True)
class Reception:
    """What a receiver answered; 0 where it did not."""

    status: int
    words: str = ""
    retry_after_seconds: float = 0

    @property
    def taken(self) -> bool:
        return 200 <= self.status < 300


@dataclass(slots=True)
class Courier:
    """Sends what is due. `chance` spreads tries, and `wall` is the time that is signed."""

    runtime: Runtime
    http: httpx2.AsyncClient
    chance: Callable[[], float] = random.random
    wall: Callable[[], float] = time.time
    claim_seconds: float = CLAIM_SECONDS
    send_seconds_max: float = SEND_SECONDS_MAX
    _under_way: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start_due(self) -> int:
        """Begin to send what is due, to each receiver no more than it is given at once; how many were begun."""
        async with self.runtime.database.reader() as db:
            await store.spread(db)
            receivers = await store.load_receivers(db)
            capacity = {one: AT_ONCE - self._under_way[one] for one in receivers if self._under_way[one] < AT_ONCE}
            due = await store.claim(db, capacity, self.claim_seconds) if capacity else []
        for one in due:
            self._under_way[one.webhook] += 1
            task = asyncio.create_task(self._deliver(one), name=f"webhook-{one.webhook}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(due)

    async def pause(self, seconds: float) -> None:
        """Until something that was sent has come to an end, or so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """What is under way is broken off, and sent again when its claim is over."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, one: Delivery) -> None:
        try:
            said = await self._send(one)
            await self._record(one, said)
        except AWAY as error:
            log.info("what was sent could not be recorded", webhook=one.webhook, notice=one.id, error=repr(error))
        except Exception:
            log.exception("a notice could not be sent", webhook=one.webhook, notice=one.id)
        finally:
            self._under_way[one.webhook] -= 1
            if not self._under_way[one.webhook]:
                del self._under_way[one.webhook]

    async def _send(self, one: Delivery) -> Reception:
        """Every way in which a receiver can fail is an answer."""
        try:
            async with asyncio.timeout(self.send_seconds_max):
                request = self._request(one, await find_address(one.url, allow_local=one.allow_local))
                answer = await self.http.send(request, stream=True)
                # What else it says is not of interest, however long it is.
                await answer.aclose()
        except DeliveryRefused as error:
            return Reception(0, str(error))
        except TimeoutError:
            return Reception(0, f"no answer within {self.send_seconds_max:g} s")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            return Reception(0, f"{type(error).__name__}: {error}"[:SAID_CHARS_MAX])
        return Reception(answer.status_code, f"HTTP {answer.status_code}", _retry_after(answer.headers))

    def _request(self, one: Delivery, address: str) -> httpx2.Request:
        url = httpx2.URL(one.url)
        body = cloud_event(one.id, one.type, one.tenant, one.subject, one.data, one.at)
        id_, timestamp = event_id(one.id, one.at), int(self.wall())
        headers = {
            "content-type": MEDIA_TYPE,
            "host": url.netloc.decode("ascii"),
            "user-agent": "bursar",
            "webhook-id": id_,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(one.secret, id_, timestamp, body),
        }
        # The address that was looked at is called; certificates are still checked for the name.
        return self.http.build_request(
            "POST", url.copy_with(host=address), content=body, headers=headers, extensions={"sni_hostname": url.host}
        )

    async def _record(self, one: Delivery, said: Reception) -> None:
        if said.status == GONE:
            await stop_webhook(self.runtime, one.webhook, "the receiver answered 410 Gone")
            log.warning("a webhook is stopped: its receiver is gone", webhook=one.webhook)
            return
        async with self.runtime.database.reader() as db:
            if said.taken:
                await store.save_delivered(db, one)
                return
            seconds: float | None = max(backoff_seconds(one.tries, self.chance()), said.retry_after_seconds)
            if one.age_seconds > GIVE_UP_SECONDS:
                seconds = None
            await store.save_failed(db, one, seconds, said.words)
        log.info("a notice was not taken", webhook=one.webhook, notice=one.id, said=said.words, tries=one.tries,
                 again_in=seconds and round(seconds, 1))  # fmt: skip


def _retry_after(headers: httpx2.Headers) -> float:
    text = headers.get("retry-after", "")
    return min(BACKOFF_SECONDS_MAX, float(text)) if text.isascii() and text.isdigit() else 0.0


async def find_address(url: str, *, allow_local: bool) -> str:
    """An address of the receiver that may be called."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    # Not in the pool that everybody shares: a name server that hangs would hold up all other receivers, and more.
    found = await apart(lambda: socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM))
    addresses = [str(one[4][0]) for one in found]
    if allow_local and addresses:
        return addresses[0]
    why = ""
    for address in addresses:
        fault = local_fault(address)
        if not fault:
            return address
        why = why or f"{address} is {fault}"
    raise DeliveryRefused(f"{why}: it is not called unless the webhook says allowLocal" if why else "it has no address")


def opened_client() -> httpx2.AsyncClient:
    """Connections are not kept: one address may serve several names, and each is checked for itself."""
    return httpx2.AsyncClient(
        timeout=SEND_SECONDS_MAX, follow_redirects=False, trust_env=False,
        limits=httpx2.Limits(max_keepalive_connections=0),
    )  # fmt: skip


async def run_webhooks(runtime: Runtime) -> None:
    """For ever. A database that is away is waited for."""
    async with opened_client() as http:
        courier = Courier(runtime, http)
        forgotten_at = -FORGET_SECONDS
        try:
            while True:
                begun = 0
                try:
                    begun = await courier.start_due()
                    if (now := asyncio.get_running_loop().time()) - forgotten_at > FORGET_SECONDS:
                        forgotten_at = now
                        await forget_notices(runtime)
                except AWAY as error:
                    log.info("webhooks wait for the database", error=repr(error))
                except Exception:
                    log.exception("webhooks failed")
                await courier.pause(PAUSE_SECONDS if not begun else 0.05)
        finally:
            await courier.close()
