"""Prices over HTTP: what is still to begin can be taken back, and nothing else."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from support.api.site import Reply, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

GPU = "nvidia.com/gpu"
LATER = "2100-01-01T00:00:00Z"


async def priced(site: Site, name: str, per_second: str = "1", begin: str = "", **more: str) -> str:
    """When it begins."""
    body = {"resource": name, "per_second": per_second, **more, **({"effective_from": begin} if begin else {})}
    made = await site.post("prices", body)
    assert made.status == 201, made
    return str(made.body["effective_from"])


async def begins(site: Site, name: str) -> list[str]:
    known = (await site.get("prices", resource=name, history="true")).body["items"]
    return [one["effective_from"] for one in known]


def code(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.body["details"]["code"]


async def test_what_has_not_begun_is_taken_back_and_can_be_set_anew(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    begun = await priced(site, name)
    await priced(site, name, "2", LATER)
    gone = await site.delete("prices", resource=name, effective_from="2100-01-01")
    assert (gone.status, gone.body["per_second"], gone.body["effective_from"]) == (200, "2", LATER)
    assert await begins(site, name) == [begun]
    again = await site.delete("prices", resource=name, effective_from=LATER)
    assert code(again) == (404, "not_found")
    assert again.body["details"]["hint"] == f"List its prices: bursar price list --resource {name} --history"
    await priced(site, name, "3", LATER)
    ahead = (await site.get("prices", resource=name, at="2101-01-01")).body["items"]
    assert [one["per_second"] for one in ahead] == ["3"]


async def test_what_has_begun_stays(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    begun = await priced(site, name, **{"class": "big"})
    refused = await site.delete("prices", resource=name, effective_from=begun, **{"class": "big"})
    assert code(refused) == (409, "in_use")
    assert refused.body["details"]["hint"].endswith(f"bursar price set {name} CREDITS --class big")
    assert await begins(site, name) == [begun]


async def test_the_class_is_part_of_which_price_is_meant(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    await priced(site, name, "1", LATER, **{"class": "big"})
    assert (await site.delete("prices", resource=name, effective_from=LATER)).status == 404
    assert (await site.delete("prices", resource=name, effective_from=LATER, **{"class": "big"})).status == 200


@pytest.mark.parametrize(
    "query", [{}, {"resource": "cpu"}, {"effective_from": LATER}, {"resource": "cpu", "effective_from": "soon"}]
)
async def test_which_price_is_meant_must_be_said(site: Site, query: dict[str, str]) -> None:
    assert code(await site.delete("prices", **query)) == (400, "invalid")


async def test_it_is_taken_back_once_and_answered_the_same(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    await priced(site, name, "2", LATER)
    headers = {"idempotency-key": f"drop-{name}"}
    first = await site.delete("prices", resource=name, effective_from=LATER, headers=headers)
    second = await site.delete("prices", resource=name, effective_from=LATER, headers=headers)
    assert (first.status, first.body) == (second.status, second.body)


async def test_of_many_who_take_it_back_one_does(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    await priced(site, name, "2", LATER)
    asked = (site.delete("prices", resource=name, effective_from=LATER) for _ in range(6))
    assert sorted(reply.status for reply in await asyncio.gather(*asked)) == [200, *[404] * 5]


async def test_billing_admins_may_and_others_may_not(site: Site) -> None:
    name = f"example.com/{site.name('thing')}"
    await priced(site, name, "2", LATER)
    team = await site.namespace()
    for role, whose in (("user", {"tenant": team}), ("tenant-admin", {"tenant": team}), ("service", {})):
        token = await site.token(role, user="ann", **whose)
        assert (await site.delete("prices", resource=name, effective_from=LATER, token=token)).status == 403
    worker = await site.token("billing-admin", user="bill")
    assert (await site.delete("prices", resource=name, effective_from=LATER, token=worker)).status == 200


async def test_a_price_in_the_words_of_the_price_table(site: Site) -> None:
    kind = f"k-{uuid.uuid4().hex[:12]}"
    made = await site.post("prices", {"gpu_type": kind, "price_per_sec": "0.25"})
    assert made.status == 201
    assert (made.body["resource"], made.body["class"], made.body["per_second"]) == (GPU, kind, "0.25")
    for body, field in (
        ({"gpu_type": kind}, "per_second"),
        ({"price_per_sec": 1}, "resource"),
        ({"gpu_type": kind, "class": kind, "per_second": 1}, "gpu_type"),
        ({"gpu_type": kind, "per_second": 1, "price_per_sec": 1}, "price_per_sec"),
        ({"gpu_type": kind, "price_per_sec": -1}, "price_per_sec"),
    ):
        refused = await site.post("prices", body)
        assert (refused.status, [one["field"] for one in refused.body["details"]["causes"]]) == (400, [field])


async def test_a_price_that_was_to_begin_a_moment_ago_begins_now(site: Site) -> None:
    kind = f"k-{uuid.uuid4().hex[:12]}"
    now = datetime.now(UTC)
    body = {"gpu_type": kind, "price_per_sec": "0.25"}
    made = await site.post("prices", {**body, "effective_from": f"{now - timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"})
    assert made.status == 201
    assert datetime.fromisoformat(made.body["effective_from"]) >= now - timedelta(seconds=1)
    refused = await site.post("prices", {**body, "effective_from": f"{now - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"})
    assert (refused.status, refused.body["details"]["code"]) == (422, "unprocessable")
