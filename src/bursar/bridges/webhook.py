"""Delivers events to webhooks as signed CloudEvents, with retries.

Delivery is at least once: the result is recorded after sending, and a crash in between sends the event again under the
same id. Any number of controllers may deliver; a claimed delivery is skipped by the others. A receiver that hangs or
refuses delays only itself. Redirects are not followed. The receiver's name is resolved once, the address is checked,
and that address is called, so DNS rebinding cannot change it in between.
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
CLAIM_SECONDS = 60.0  # much longer than sending and recording can take
CONCURRENT_MAX = 4  # deliveries to one receiver
FORGET_SECONDS = 3600.0
SAID_CHARS_MAX = 200
GONE = 410


class DeliveryRefused(Exception):
    """The event was not sent; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Reception:
    """A receiver's response; status 0 without one."""

    status: int
    words: str = ""
    retry_after_seconds: float = 0

    @property
    def accepted(self) -> bool:
        return 200 <= self.status < 300


@dataclass(slots=True)
class WebhookSender:
    """Sends due deliveries. `chance` is the jitter of retries, `wall` the clock of signatures."""

    runtime: Runtime
    http: httpx2.AsyncClient
    chance: Callable[[], float] = random.random
    wall: Callable[[], float] = time.time
    claim_seconds: float = CLAIM_SECONDS
    send_seconds_max: float = SEND_SECONDS_MAX
    _running: Counter[str] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start_due(self) -> int:
        """Start due deliveries, at most CONCURRENT_MAX per receiver; return how many were started."""
        async with self.runtime.database.reader() as db:
            await store.spread(db)
            receivers = await store.load_receivers(db)
            capacity = {
                one: CONCURRENT_MAX - self._running[one] for one in receivers if self._running[one] < CONCURRENT_MAX
            }
            due = await store.claim(db, capacity, self.claim_seconds) if capacity else []
        for one in due:
            self._running[one.webhook] += 1
            task = asyncio.create_task(self._deliver(one), name=f"webhook-{one.webhook}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(due)

    async def pause(self, seconds: float) -> None:
        """Wait until a delivery ends, or so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Cancel running deliveries; they are sent again when their claims expire."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, one: Delivery) -> None:
        try:
            said = await self._send(one)
            await self._record(one, said)
        except AWAY as error:
            log.info(
                "delivery_not_recorded",
                message="it will be sent again",
                webhook=one.webhook,
                notice=one.id,
                error=repr(error),
            )
        except Exception:
            log.exception("delivery_failed", message="an event could not be sent", webhook=one.webhook, notice=one.id)
        finally:
            self._running[one.webhook] -= 1
            if not self._running[one.webhook]:
                del self._running[one.webhook]

    async def _send(self, one: Delivery) -> Reception:
        """Send the event. Every failure of a receiver is a Reception."""
        try:
            async with asyncio.timeout(self.send_seconds_max):
                request = self._request(one, await find_address(one.url, allow_local=one.allow_local))
                answer = await self.http.send(request, stream=True)
                # The body is ignored, however long it is.
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
        # The checked address is called; certificates are still verified for the name.
        return self.http.build_request(
            "POST", url.copy_with(host=address), content=body, headers=headers, extensions={"sni_hostname": url.host}
        )

    async def _record(self, one: Delivery, said: Reception) -> None:
        if said.status == GONE:
            await stop_webhook(self.runtime, one.webhook, "the receiver answered 410 Gone")
            log.warning("webhook_stopped", message="its receiver answered 410 Gone", webhook=one.webhook)
            return
        async with self.runtime.database.reader() as db:
            if said.accepted:
                await store.save_delivered(db, one)
                return
            seconds: float | None = max(backoff_seconds(one.tries, self.chance()), said.retry_after_seconds)
            if one.age_seconds > GIVE_UP_SECONDS:
                seconds = None
            await store.save_failed(db, one, seconds, said.words)
        log.info(
            "delivery_refused", message="the receiver did not accept the event", webhook=one.webhook, notice=one.id,
            said=said.words, tries=one.tries, again_in=seconds and round(seconds, 1),
        )  # fmt: skip


def _retry_after(headers: httpx2.Headers) -> float:
    text = headers.get("retry-after", "")
    return min(BACKOFF_SECONDS_MAX, float(text)) if text.isascii() and text.isdigit() else 0.0


async def find_address(url: str, *, allow_local: bool) -> str:
    """Resolve the receiver's name to an address that may be called."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    # In a thread of its own: a hanging name server must not fill the shared pool.
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
    raise DeliveryRefused(f"{why}: not called without allowLocal" if why else "the name has no address")


def opened_client() -> httpx2.AsyncClient:
    """An HTTP client without kept connections, because one address may serve several names, each checked itself."""
    return httpx2.AsyncClient(
        timeout=SEND_SECONDS_MAX, follow_redirects=False, trust_env=False,
        limits=httpx2.Limits(max_keepalive_connections=0),
    )  # fmt: skip


async def run_webhooks(runtime: Runtime) -> None:
    """Deliver events for ever; wait while the database is away."""
    async with opened_client() as http:
        sender = WebhookSender(runtime, http)
        forgotten_at = -FORGET_SECONDS
        try:
            while True:
                begun = 0
                try:
                    begun = await sender.start_due()
                    if (now := asyncio.get_running_loop().time()) - forgotten_at > FORGET_SECONDS:
                        forgotten_at = now
                        await forget_notices(runtime)
                except AWAY as error:
                    log.info("webhooks_wait", message="the database is away", error=repr(error))
                except Exception:
                    log.exception("webhooks_failed", message="deliveries failed, and are tried again")
                await sender.pause(PAUSE_SECONDS if not begun else 0.05)
        finally:
            await sender.close()
