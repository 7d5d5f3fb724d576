"""Notices on their way out: signed, sent until they are taken, and never where they must not go."""

import asyncio
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import structlog
import trustme

from bursar.bridges.webhook import DeliveryRefused, WebhookSender, find_address, opened_client, run_webhooks
from bursar.commands.credit.credit import PutAccount
from bursar.core.credit.account import Owner
from bursar.core.values.money import nanocredits
from bursar.ops.credit.credit import put_account, top_up
from bursar.ops.credit.ledger import Extend
from bursar.ops.objects.webhook import add_webhook, list_webhooks, remove_webhook
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects.webhook import Webhook
from support.api.site import eventually
from support.credit.metering import POOL, done, event, furnish, lapse, lease, pass_time, reconcile, send
from support.process.receivers import HANG, Receiver, receiving
from support.runtime.runtime import change, opened, tenant


async def hook(runtime: Runtime, receiver: Receiver | str, name: str = "hook", **more: Any) -> str:
    """A webhook at this receiver; its secret."""
    url = receiver if isinstance(receiver, str) else receiver.url
    made = await add_webhook(runtime, Webhook(name, url=url, allow_local=more.pop("allow_local", True), **more))
    assert isinstance(made, tuple), made
    return made[1]


async def notice(runtime: Runtime, count: int = 1, *, type_: str = "credit.low", tenant: str = "default") -> None:
    async with runtime.database.reader() as db:
        await db.executemany(
            "INSERT INTO notice (type, tenant, subject, data) VALUES ($1, $2, $2, $3)",
            [(type_, tenant, b'{"account": "default", "available": "%d"}' % index) for index in range(count)],
        )


@asynccontextmanager
async def sender(runtime: Runtime, **more: Any) -> AsyncIterator[WebhookSender]:
    async with opened_client() as http:
        one = WebhookSender(runtime, more.pop("http", http), chance=lambda: 1.0, **more)
        try:
            yield one
        finally:
            await one.close()


async def work(one: WebhookSender) -> None:
    """Send all that is due, and wait until what came of it is recorded."""
    while await one.start_due() or one._tasks:
        await one.pause(5)


async def waiting(runtime: Runtime) -> list[tuple[int, float, str]]:
    """(tries, seconds until the next one, what was said) of what is not delivered."""
    async with runtime.database.reader() as db:
        rows = await db.fetch(
            "SELECT tries, CASE WHEN next_at = 'infinity' THEN -1 ELSE extract(epoch FROM next_at - now()) END AS wait,"
            " last_said FROM notice_delivery ORDER BY notice"
        )
    return [(row["tries"], float(row["wait"]), row["last_said"]) for row in rows]


async def make_due(runtime: Runtime) -> None:
    async with runtime.database.reader() as db:
        await db.execute("UPDATE notice_delivery SET next_at = now() WHERE next_at < 'infinity'")


async def test_a_notice_is_a_signed_cloud_event_and_is_sent_once(runtime: Runtime) -> None:
    async with receiving() as receiver, sender(runtime) as one:
        secret = await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        await work(one)
        (got,) = receiver.got
        assert (got.method, got.path) == ("POST", "/hook")
        assert got.is_signed_with(secret)
        assert not got.is_signed_with("whsec_" + "A" * 43 + "=")
        assert got.headers["content-type"] == "application/cloudevents+json"
        said = got.event
        assert said.pop("time").endswith("Z")
        assert said == {
            "specversion": "1.0", "id": got.id, "source": "/bursar/ledger", "type": "io.bursar.credit.low",
            "subject": "default", "tenant": "default", "datacontenttype": "application/json",
            "data": {"account": "default", "available": "0"},
        }  # fmt: skip
        assert await waiting(runtime) == []


async def test_what_is_not_taken_is_sent_again_later_and_later_under_the_same_id(runtime: Runtime) -> None:
    async with receiving(500, 503, 302) as receiver, sender(runtime) as one:
        await hook(runtime, receiver)
        await notice(runtime)
        for tries, seconds, said in ((1, 5, "HTTP 500"), (2, 10, "HTTP 503"), (3, 20, "HTTP 302")):
            await work(one)
            ((done_tries, wait, words),) = await waiting(runtime)
            assert (done_tries, words) == (tries, said)
            assert seconds - 5 < wait <= seconds
            assert await one.start_due() == 0, "not before its time"
            await make_due(runtime)
        await work(one)
        assert len(set(receiver.ids)) == 1
        assert len(receiver.got) == 4
        assert await waiting(runtime) == []


async def test_a_receiver_that_asks_for_more_time_is_given_it(runtime: Runtime) -> None:
    async with receiving(429) as receiver, sender(runtime) as one:
        receiver.headers["retry-after"] = "120"
        await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        ((_, wait, _),) = await waiting(runtime)
        assert 100 < wait <= 120


async def test_redirects_are_not_followed(runtime: Runtime) -> None:
    async with receiving() as elsewhere, receiving(307) as receiver, sender(runtime) as one:
        receiver.headers["location"] = elsewhere.url
        await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        assert elsewhere.got == []
        assert [row[2] for row in await waiting(runtime)] == ["HTTP 307"]


async def test_a_receiver_that_is_gone_is_sent_nothing_more(runtime: Runtime) -> None:
    async with receiving(410) as receiver, sender(runtime) as one:
        await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        await notice(runtime, 3)
        await work(one)
        assert len(receiver.got) == 1
        assert await waiting(runtime) == []
        (shown,) = await list_webhooks(runtime)
        assert "410" in shown.stopped


async def test_one_that_hangs_holds_up_nobody_else(runtime: Runtime) -> None:
    async with receiving(*[HANG] * 50) as hanging, receiving() as well, sender(runtime, send_seconds_max=2.0) as one:
        await hook(runtime, hanging, "a-hanging")
        await hook(runtime, well, "well")
        await notice(runtime, 30)

        async def go_on() -> None:
            while len(well.got) < 30:
                await one.start_due()
                await one.pause(0.05)

        await asyncio.wait_for(go_on(), 20)
        assert len(hanging.got) <= 8, "it is given a few at once, and no more until those are over"
        assert len(set(well.ids)) == 30


async def test_a_name_server_that_hangs_holds_up_nobody_else(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other receivers nor what else waits for a thread in this process."""
    answers, real = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *more: Any, **options: Any) -> Any:
        if host == "slow.example":
            answers.wait(60)
            raise socket.gaierror("no answer")
        return real(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with receiving() as well, sender(runtime, send_seconds_max=20.0) as one:
        try:
            await hook(runtime, "http://slow.example/", "a-slow")
            await hook(runtime, well, "well")
            await notice(runtime, 8)
            async with asyncio.timeout(15):
                while len(well.got) < 8:
                    await one.start_due()
                    await one.pause(0.05)
                assert await asyncio.to_thread(lambda: "done") == "done"
        finally:
            answers.set()


async def test_one_that_never_answers_is_given_up_in_time_and_tried_again(runtime: Runtime) -> None:
    async with receiving(HANG) as receiver, sender(runtime, send_seconds_max=0.3) as one:
        await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        ((tries, _, said),) = await waiting(runtime)
        assert (tries, said) == (1, "no answer within 0.3 s")
        await make_due(runtime)
        await work(one)
        assert len(set(receiver.ids)) == 1
        assert await waiting(runtime) == []


async def test_nobody_there_is_tried_again(runtime: Runtime) -> None:
    async with receiving() as receiver:
        await hook(runtime, receiver)
    async with sender(runtime) as one:
        await notice(runtime)
        await work(one)
        ((tries, _, said),) = await waiting(runtime)
        assert tries == 1
        assert "ConnectError" in said


async def test_who_dies_between_sending_and_recording_has_it_sent_again(runtime: Runtime) -> None:
    async with receiving(HANG) as receiver:
        secret = await hook(runtime, receiver)
        await notice(runtime)
        async with sender(runtime) as dying:
            await dying.start_due()
            await receiver.comes(1)
        async with sender(runtime) as next_one:
            assert await next_one.start_due() == 0, "another's claim is kept while it may be alive"
            await make_due(runtime)
            await work(next_one)
        assert len(receiver.got) == 2
        assert len(set(receiver.ids)) == 1, "so that the receiver can know it again"
        assert all(one.is_signed_with(secret) for one in receiver.got)
        assert await waiting(runtime) == []


async def test_what_a_late_one_says_does_not_undo_what_another_did(runtime: Runtime) -> None:
    """Its claim is over, another has claimed and failed since: the other's word stands."""
    async with receiving(HANG, 500) as receiver, sender(runtime, send_seconds_max=3) as slow:
        await hook(runtime, receiver)
        await notice(runtime)
        await slow.start_due()
        await receiver.comes(1)
        await make_due(runtime)
        async with sender(runtime) as quick:
            await work(quick)
        await work(slow)
        ((tries, _, said),) = await waiting(runtime)
        assert (tries, said) == (2, "HTTP 500")


async def test_several_couriers_send_each_notice_once(database_url: str) -> None:
    async with opened(database_url) as left, opened(database_url) as right, receiving() as receiver:
        await hook(left, receiver)
        await notice(left, 60)
        async with sender(left) as one, sender(right) as two, sender(right) as three:
            await asyncio.gather(work(one), work(two), work(three))
        assert len(receiver.got) == len(set(receiver.ids)) == 60


async def test_a_notice_reaches_those_who_asked_for_it(runtime: Runtime) -> None:
    await tenant(runtime, "physics")
    async with receiving() as all_, receiving() as ours, receiving() as drifts, sender(runtime) as one:
        await hook(runtime, all_, "all")
        await hook(runtime, ours, "ours", tenant="physics")
        await hook(runtime, drifts, "drifts", types=("credit.drift",))
        await notice(runtime)
        await notice(runtime, tenant="physics")
        await notice(runtime, type_="credit.drift")
        await work(one)
        assert (len(all_.got), len(ours.got), len(drifts.got)) == (3, 1, 1)
        assert ours.got[0].event["tenant"] == "physics"
        assert await remove_webhook(runtime, "all") is None
        await notice(runtime)
        await work(one)
        assert len(all_.got) == 3


async def test_nobody_is_told_of_what_was_before_the_webhook(runtime: Runtime) -> None:
    async with receiving() as receiver, sender(runtime) as one:
        await notice(runtime)
        await work(one)
        await hook(runtime, receiver)
        await work(one)
        assert receiver.got == []


async def test_local_addresses_are_not_called_unless_that_is_allowed(runtime: Runtime) -> None:
    async with receiving() as receiver, sender(runtime) as one:
        await hook(runtime, receiver, "by-number", allow_local=False)
        await hook(runtime, receiver.url.replace("127.0.0.1", "localhost"), "by-name", allow_local=False)
        await hook(runtime, receiver.url.replace("127.0.0.1", "[::ffff:127.0.0.1]"), "wrapped", allow_local=False)
        await notice(runtime)
        await work(one)
        assert receiver.got == []
        said = [row[2] for row in await waiting(runtime)]
        assert len(said) == 3
        assert all("allowLocal" in words for words in said), said


async def test_the_address_of_a_clouds_metadata_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(DeliveryRefused, match="allowLocal"):
        await find_address("http://169.254.169.254/latest/meta-data", allow_local=False)


async def test_an_address_that_is_allowed_is_the_one_that_was_looked_at() -> None:
    assert await find_address("http://93.184.215.14/x", allow_local=False) == "93.184.215.14"
    assert await find_address("http://10.1.2.3/x", allow_local=False) == "10.1.2.3"


@pytest.mark.parametrize(("name", "taken"), [("localhost", True), ("elsewhere.example", False)])
async def test_certificates_are_checked_for_the_name_and_not_for_the_address(
    runtime: Runtime, name: str, taken: bool
) -> None:
    authority = trustme.CA()
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with (
        receiving(tls=serving) as receiver,
        httpx2.AsyncClient(verify=trusting, trust_env=False) as http,
        sender(runtime, http=http) as one,
    ):
        await hook(runtime, receiver)
        await notice(runtime)
        await work(one)
        assert len(receiver.got) == taken
        assert len(await waiting(runtime)) == (not taken)


async def test_secrets_are_never_logged(runtime: Runtime) -> None:
    with structlog.testing.capture_logs() as logs:
        async with receiving(500, 410) as receiver, sender(runtime) as one:
            secret = await hook(runtime, receiver)
            await notice(runtime, 2)
            await work(one)
    assert logs
    assert secret not in repr(logs)
    assert secret.removeprefix("whsec_")[:20] not in repr(logs)
    assert secret not in repr(await list_webhooks(runtime))


async def test_after_three_days_it_is_given_up(runtime: Runtime) -> None:
    async with receiving(500) as receiver, sender(runtime) as one:
        await hook(runtime, receiver)
        await notice(runtime)
        async with runtime.database.reader() as db:
            await db.execute("UPDATE notice SET at = now() - interval '73 hours'")
        await work(one)
        assert [row[:2] for row in await waiting(runtime)] == [(1, -1.0)]
        await make_due(runtime)
        await work(one)
        assert len(receiver.got) == 1
        (shown,) = await list_webhooks(runtime)
        assert (shown.waiting, shown.given_up, shown.last_said) == (0, 1, "HTTP 500")


async def test_what_becomes_of_credit_reaches_its_owner(runtime: Runtime) -> None:
    """From the ledger to the receiver: topped up, low, exhausted, and drift of a lease and of its account."""
    await furnish(runtime, "1")
    limits = {"reconcileSeconds": 0, "driftCredits": "0.1", "driftAccountCredits": "0.2"}
    await change(runtime, "Settings", "", "system", credits=limits)
    done(await put_account(runtime, PutAccount(whose=POOL, changes={"low_balance": nanocredits("0.5")}, actor="test")))
    async with receiving() as receiver:
        await hook(runtime, receiver)
        running = asyncio.create_task(run_webhooks(runtime))
        try:
            done(await top_up(runtime, Owner("default"), nanocredits("0.1"), actor="test"))
            one = await lease(runtime, "train", window=20)
            await pass_time(runtime, 15, one)
            await runtime.extending.submit(Extend(one.id, 1))
            await pass_time(runtime, 60, one)
            await lapse(runtime, one)
            await send(runtime, event("train", 1, 1))
            await reconcile(runtime)
            words = ("topped-up", "low", "exhausted", "drift", "account-drift")
            wanted = {"io.bursar.credit." + word for word in words}

            async def all_came() -> bool:
                return {got.event["type"] for got in receiver.got} >= wanted

            await eventually(all_came)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        by_type = {got.event["type"]: got.event["data"] for got in receiver.got}
        drift, sum_ = by_type["io.bursar.credit.drift"], by_type["io.bursar.credit.account-drift"]
        assert (drift["lease"], drift["account"]) == (one.name, "default")
        assert (sum_["lease"], sum_["account"]) == ("", "default")
        assert sum_["amount"] == drift["amount"].removeprefix("-"), "one lease is all that drifted"
