"""A kind that is only registered gets everything that the others have: API, documents, access, quotas, clients."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bursar.api.http.tls import ensure_server_certificate
from bursar.client import Client
from bursar.wire.kinds import registry
from support.api.site import TABLE, Document, Site, opened_site, served
from support.api.watches import newest, take, told, watching
from support.kinds.widget import WIDGET, registered
from support.runtime.postgres import PostgresServer, _url, clone_database, drop_database

pytestmark = pytest.mark.asyncio(loop_scope="module")

KUBECTL = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(embedded_postgres: PostgresServer, database_template: str) -> AsyncIterator[Site]:
    name = await clone_database(embedded_postgres, database_template)
    with registered():
        async with opened_site(_url(embedded_postgres, name)) as one:
            yield one
    await drop_database(embedded_postgres, name)


def widget(name: str, color: str = "red", size: int = 1) -> Document:
    return {"metadata": {"name": name}, "spec": {"color": color, "size": size}}


async def ran(*command: str, text: str = "", **environment: str) -> str:
    """The output of a command; the server goes on in this process meanwhile."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **environment},
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate(text.encode())
    assert process.returncode == 0, (command, out, err)
    return out.decode()


async def test_names_must_be_free() -> None:
    with registered(), pytest.raises(ValueError, match="Widget and Widget share the name"):
        registry.register(WIDGET)


async def test_its_objects_are_created_selected_changed_and_deleted(site: Site) -> None:
    path = f"namespaces/{await site.namespace()}/widgets"
    for name, color in (("one", "red"), ("two", "blue")):
        reply = await site.post(path, widget(name, color))
        assert (reply.status, reply.body["status"]) == (201, {"phase": "New"})
        assert reply.body["metadata"]["uid"].startswith("widget-")
    assert (await site.post(path, widget("none", size=-1))).body["details"]["causes"][0]["field"] == "spec.size"
    assert (await site.get(path, fieldSelector="spec.color=blue")).names == ["two"]
    assert (await site.get(path, fieldSelector="spec.size=1")).status == 400
    assert (await site.patch(f"{path}/one", {"spec": {"color": "green"}})).body["spec"]["color"] == "green"
    assert (await site.patch(f"{path}/one/status", {"status": {"phase": "Old"}})).body["status"] == {"phase": "Old"}
    assert (await site.patch(f"{path}/one", {"status": {"phase": "New"}})).body["status"] == {"phase": "Old"}
    assert (await site.delete(f"{path}/one")).status == 200
    assert (await site.get(path)).names == ["two"]


async def test_discovery_and_the_documents_have_it(site: Site) -> None:
    resources = {one["name"]: one for one in (await site.get("/api/v1")).body["resources"]}
    assert resources["widgets"]["kind"] == "Widget"
    assert resources["widgets"]["shortNames"] == ["wd"]
    assert resources["widgets"]["categories"] == ["all"]
    assert {"get", "list", "watch", "create", "patch", "delete"} <= set(resources["widgets"]["verbs"])
    assert "widgets/status" in resources
    item = "/api/v1/namespaces/{namespace}/widgets/{name}"
    document = (await site.get("/openapi.json")).body
    assert {"get", "put", "patch", "delete"} <= document["paths"][item].keys()
    assert document["components"]["schemas"]["WidgetSpec"]["properties"]["color"]["description"] == (
        "The color to paint it in."
    )
    posted = document["paths"][item.removesuffix("/{name}")]["post"]["requestBody"]["content"]["application/json"]
    assert posted["example"] == WIDGET.example
    assert item in (await site.get("/openapi/v3/api/v1")).body["paths"]
    assert item in (await site.get("/openapi/v2")).body


async def test_its_quota_is_charged_in_its_own_dimension(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/widgets"
    assert (await site.patch(f"tenants/{team}", {"spec": {"limits": {"widgets": "3"}}})).status == 200
    assert (await site.post(path, widget("one", size=2))).status == 201
    reply = await site.post(path, widget("two", size=2))
    assert (reply.status, reply.body["details"]["code"]) == (409, "quota_exceeded")
    quotas = (await site.get(f"tenants/{team}/quotas")).body["quotas"]
    assert (quotas["widgets"]["limit"], quotas["widgets"]["accepted"]) == ("3", "2")
    assert (await site.patch(f"{path}/one", {"spec": {"size": 4}})).status == 409
    assert (await site.delete(f"{path}/one")).status == 200
    assert (await site.post(path, widget("two", size=3))).status == 201


@pytest.mark.parametrize("enforcement", ["Reject", "Queue"])
async def test_a_change_of_an_empty_charge_is_charged(site: Site, enforcement: str) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/widgets"
    spec = {"enforcement": enforcement, "limits": {"widgets": "3"}}
    assert (await site.patch(f"tenants/{team}", {"spec": spec})).status == 200
    assert (await site.post(path, widget("one", size=0))).status == 201
    for size, status, used in ((4, 409, "0"), (3, 200, "3"), (0, 200, "0"), (2, 200, "2")):
        assert (await site.patch(f"{path}/one", {"spec": {"size": size}})).status == status
        quota = (await site.get(f"tenants/{team}/quotas")).body["quotas"]["widgets"]
        assert (quota["accepted"], quota["bound"]) == (used, used)


async def test_a_kind_that_is_never_placed_has_a_limit_where_work_is_queued(site: Site) -> None:
    team = await site.namespace()
    path = f"namespaces/{team}/widgets"
    spec = {"enforcement": "Queue", "limits": {"widgets": "3"}}
    assert (await site.patch(f"tenants/{team}", {"spec": spec})).status == 200
    assert (await site.post(path, widget("one", size=2))).status == 201
    reply = await site.post(path, widget("two", size=2))
    assert (reply.status, reply.body["details"]["code"]) == (409, "quota_exceeded")
    assert (await site.delete(f"{path}/one")).status == 200
    assert (await site.post(path, widget("two", size=3))).status == 201


async def test_its_access_group_says_who_may(site: Site) -> None:
    ours, theirs = await site.namespace(), await site.namespace()
    user, viewer = [await site.token(role, tenant=ours, user=role) for role in ("user", "viewer")]
    stranger = await site.token("tenant-admin", tenant=theirs, user="stranger")
    path = f"namespaces/{ours}/widgets"
    assert (await site.post(path, widget("one"), token=user)).status == 201
    assert (await site.post(path, widget("two"), token=viewer)).status == 403
    assert (await site.get(f"{path}/one", token=viewer)).status == 200
    assert (await site.get(f"{path}/one", token=stranger)).status == 404
    assert (await site.get("widgets", token=stranger)).names == []
    assert (await site.patch(f"{path}/one/status", {"status": {"phase": "Old"}}, token=user)).status == 403
    billing = await site.token("billing-admin")
    assert (await site.get("widgets", token=billing)).status == 403


async def test_it_is_watched_and_has_events_and_a_table(site: Site) -> None:
    team = await site.namespace()
    path, version = f"namespaces/{team}/widgets", await newest(site)
    async with watching(site, path, resourceVersion=version) as events:
        await site.post(path, widget("one"))
        await site.patch(f"{path}/one", {"spec": {"color": "blue"}})
        await site.delete(f"{path}/one")
        assert told(await take(events, 3)) == [("ADDED", "one"), ("MODIFIED", "one"), ("DELETED", "one")]
    found = (await site.get(f"namespaces/{team}/events", fieldSelector="involvedObject.kind=Widget")).body["items"]
    assert [one["involvedObject"]["name"] for one in found] == ["one"] * 3
    await site.post(path, widget("two", "pink"))
    table = (await site.get(path, headers={"accept": TABLE})).body
    assert [one["name"] for one in table["columnDefinitions"]] == ["Name", "Color", "Age", "Phase"]
    assert [row["cells"][:2] for row in table["rows"]] == [["two", "pink"]]


async def test_the_namespace_that_it_is_in_counts_as_used(site: Site) -> None:
    team = await site.namespace()
    await site.post(f"namespaces/{team}/widgets", widget("one"))
    other = await site.namespace()
    moved = {"metadata": {"labels": {"bursar.io/tenant": other}}}
    assert (await site.patch(f"namespaces/{team}", moved)).body["details"]["code"] == "in_use"


async def test_the_client_has_an_attribute_for_it(site: Site) -> None:
    team = await site.namespace()

    def use() -> list[Any]:
        with Client(site.url, site.admin) as client:
            assert "widgets" in dir(client)
            client.widgets(team).create(widget("one"))
            return [one["metadata"]["name"] for one in client.widgets(team).list(field_selector="spec.color=red")]

    assert await asyncio.to_thread(use) == ["one"]


async def test_the_command_line_has_a_noun_for_it(site: Site) -> None:
    team = await site.namespace()
    await site.post(f"namespaces/{team}/widgets", widget("one", "pink"))
    tests = str(Path(__file__).parents[2])
    python = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    environment = {"BURSAR_URL": site.url, "BURSAR_TOKEN": site.admin, "PYTHONPATH": python}
    bursar = (sys.executable, "-m", "support.kinds.widget")
    for noun in ("widgets", "widget", "wd"):
        header, row = (await ran(*bursar, "get", noun, "-n", team, **environment)).splitlines()
        assert (header.split(), row.split()[:2]) == (["NAME", "COLOR", "AGE"], ["one", "pink"])
    # A release that does not know the kind asks the server for it.
    asked = await ran(sys.executable, "-m", "bursar.cli", "get", "wd", "-n", team, **environment)
    assert "pink" in asked
    completing = {"_BURSAR_COMPLETE": "bash_complete", "COMP_WORDS": "bursar get wid", "COMP_CWORD": "2"}
    assert await ran(*bursar, **environment, **completing) == "plain,widgets\n"


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not on this machine")
async def test_kubectl_works_with_it(site: Site, tmp_path: Path) -> None:
    assert KUBECTL is not None
    team = await site.namespace()
    certificate, key, ca = ensure_server_certificate(tmp_path / "tls", ["127.0.0.1"])
    async with served(site.context, tls=(certificate, key)) as url:
        options = (f"--server={url}", f"--certificate-authority={ca}", f"--token={site.admin}", "-n", team)

        async def kubectl(*words: str, text: str = "") -> str:
            return await ran(KUBECTL, *options, *words, text=text, HOME=str(tmp_path), KUBECONFIG="/dev/null")

        manifest = json.dumps({"apiVersion": "v1", "kind": "Widget", **widget("one", "pink")})
        assert await kubectl("apply", "-f", "-", text=manifest) == "widget/one created\n"
        assert await kubectl("apply", "-f", "-", text=manifest.replace("pink", "blue")) == "widget/one configured\n"
        assert (await kubectl("get", "wd")).splitlines()[0].split() == ["NAME", "COLOR", "AGE"]
        assert "blue" in await kubectl("get", "all")
        assert "The color to paint it in." in await kubectl("explain", "widget.spec.color")
        assert await kubectl("delete", "widget", "one") == f'widget "one" deleted from {team} namespace\n'
