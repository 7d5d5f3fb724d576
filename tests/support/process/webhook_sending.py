"""Webhooks that are made and served inside a test: receivers are told of all that is due."""

from bursar.bridges.webhook import WebhookSender, opened_client
from bursar.ops.objects.webhook import add_webhook
from bursar.ops.runtime.runtime import Runtime
from bursar.store.objects.webhook import Webhook
from support.process.receivers import Receiver


async def hook(runtime: Runtime, name: str, receiver: Receiver, **more: object) -> str:
    made = await add_webhook(runtime, Webhook(name, url=receiver.url, allow_local=True, **more))  # type: ignore[arg-type]
    assert isinstance(made, tuple), made
    return made[1]


async def send_all(runtime: Runtime) -> None:
    async with opened_client() as http:
        sender = WebhookSender(runtime, http)
        try:
            while await sender.start_due() or sender._tasks:
                await sender.pause(5)
        finally:
            await sender.close()
