"""A Waldur on loopback: the part of its marketplace that is spoken with, over real HTTP.

It shares no code with those who speak to it. Whatever is sent is read with the models of Waldur's own client, and must
come out of them as it went in; whatever is answered is made by them. What it does not know, or cannot read, it refuses
and remembers.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID, uuid4

from waldur_api_client.models import (
    AgentIdentity,
    AgentIdentityRequest,
    AgentProcessor,
    AgentProcessorCreateRequest,
    AgentService,
    AgentServiceCreateRequest,
    AgentServiceState,
    ComponentUsage,
    ComponentUsageCreateRequest,
    ComponentUsageFieldEnum,
    ComponentUserUsageBulkCreateRequest,
    OfferingComponent,
    OfferingUserAttributeConfig,
    OrderApproveByProviderRequest,
    OrderDetails,
    OrderDetailsFieldEnum,
    OrderErrorDetailsRequest,
    OrderInfoResponse,
    OrderState,
    ProviderOfferingDetails,
    RequestTypes,
    Resource,
    ResourceBackendIDRequest,
    ResourceBackendMetadataRequest,
    ResourceFieldEnum,
    ResourceLimits,
    ResourceSetStateErredRequest,
    ResourceState,
    ServiceProvider,
    Status,
    UserMe,
)

TOKEN = "0123456789abcdef"
COMPONENTS = {"gpu_hours": "limit", "node_hours": "limit", "max_nodes": "limit", "cpu_hours": "usage"}
UUID_TEXT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
GATE_SECONDS_MAX = 60.0
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Call:
    method: str
    path: str
    query: dict[str, list[str]]
    body: Any
    parts: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)  # of the answer


class Refused(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(slots=True)
class WaldurServer:
    """What it keeps. `plan` says how the next requests are answered instead, one after another."""

    url: str = ""
    offering: UUID = field(default_factory=uuid4)
    customer: UUID = field(default_factory=uuid4)
    project: UUID = field(default_factory=uuid4)
    resources: dict[UUID, Resource] = field(default_factory=dict)
    orders: dict[UUID, OrderDetails] = field(default_factory=dict)
    usages: dict[tuple[UUID, str], dict[str, ComponentUsage]] = field(default_factory=dict)  # by resource and month
    user_usages: dict[UUID, dict[str, float]] = field(default_factory=dict)  # by what all used together
    calls: list[Call] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    plan: list[int] = field(default_factory=list)
    page_size_max: int = 100
    gate: threading.Event = field(default_factory=threading.Event)  # while it is closed, nothing is answered

    def resource(self, backend_id: str = "", **more: Any) -> Resource:
        """Another resource of the offering, as it is sent."""
        uuid = uuid4()
        slug = more.pop("slug", f"r-{uuid.hex[:8]}")
        document = {
            "uuid": uuid.hex, "name": f"Resource {slug}", "slug": slug, "backend_id": backend_id, "state": "OK",
            "offering_uuid": self.offering.hex, "project_slug": "project", "offering_plugin_options": {}, "limits": {},
            "project_uuid": self.project.hex, "paused": False, "downscaled": False, **more,
        }  # fmt: skip
        self.resources[uuid] = Resource.from_dict(document)
        return self.resources[uuid]

    def order(self, resource: Resource, type_: RequestTypes, limits: dict[str, int] | None = None) -> OrderDetails:
        assert isinstance(resource.uuid, UUID)
        uuid = uuid4()
        document = {
            "uuid": uuid.hex, "type": type_.value, "state": "pending-provider", "limits": limits or {},
            "offering_uuid": self.offering.hex, "marketplace_resource_uuid": resource.uuid.hex,
            "resource_name": resource.name, "project_slug": "project", "error_message": "", "backend_id": "",
        }  # fmt: skip
        self.orders[uuid] = OrderDetails.from_dict(document)
        return self.orders[uuid]

    def answer(self, call: Call) -> tuple[int, Any]:
        for (method, pattern), handler in ROUTES.items():
            if method == call.method and (match := re.fullmatch(pattern, call.path)):
                call.parts = match.groups()
                return 201 if handler in CREATING else 200, handler(self, call)
        raise Refused(404, f"{call.method} {call.path} is not known here")


# Reading what is sent.


def read(model: Any, body: Any) -> Any:
    """What the model understands, which must be all that was sent."""
    try:
        one = model.from_dict(body)
    except Exception as error:
        raise Refused(400, f"{model.__name__}: {error!r} in {body}") from error
    if getattr(one, "additional_properties", None):
        raise Refused(400, f"{model.__name__} does not know {one.additional_properties}")
    if plain(again := one.to_dict()) != plain(body):
        raise Refused(400, f"{model.__name__} reads {body} as {again}")
    return one


def plain(document: Any) -> Any:
    """With UUIDs written in one way."""
    if isinstance(document, dict):
        return {name: plain(value) for name, value in document.items()}
    if isinstance(document, list):
        return [plain(one) for one in document]
    return document.replace("-", "") if isinstance(document, str) and UUID_TEXT.fullmatch(document) else document


def chosen(call: Call, name: str, meaning: Callable[[str], Any]) -> list[Any]:
    try:
        return [meaning(one) for one in call.query.get(name, [])]
    except ValueError as error:
        raise Refused(400, f"{name}: {error}") from error


def shown(one: Any, fields: list[Any]) -> dict[str, Any]:
    document: dict[str, Any] = one.to_dict()
    wanted = {field.value for field in fields}
    return {name: value for name, value in document.items() if not wanted or name in wanted}


def found(some: dict[UUID, Any], text: str) -> Any:
    if UUID(text) not in some:
        raise Refused(404, f"{text} is not known here")
    return some[UUID(text)]


# The answers.


def page(server: WaldurServer, call: Call, some: list[dict[str, Any]]) -> Any:
    size = min(server.page_size_max, int(call.query.get("page_size", ["10"])[0]))
    number = int(call.query.get("page", ["1"])[0])
    rest = some[(number - 1) * size :]
    if len(rest) > size:
        call.headers["Link"] = f'<{server.url}{call.path}?page={number + 1}>; rel="next"'
    return rest[:size]


def me(_: WaldurServer, __: Call) -> Any:
    return UserMe.from_dict({"uuid": uuid4().hex, "username": "site-agent", "is_staff": False}).to_dict()


def offering(server: WaldurServer, call: Call) -> Any:
    assert UUID(call.parts[0]) == server.offering
    components = [
        OfferingComponent.from_dict(
            {"uuid": uuid4().hex, "type": name, "name": name, "measured_unit": "hours", "billing_type": billing}
        )
        for name, billing in COMPONENTS.items()
    ]
    document = {
        "uuid": server.offering.hex, "customer_uuid": server.customer.hex, "partitions": [], "plugin_options": {},
        "components": [one.to_dict() for one in components],
    }  # fmt: skip
    return ProviderOfferingDetails.from_dict(document).to_dict()


def providers(server: WaldurServer, call: Call) -> Any:
    assert chosen(call, "customer_uuid", UUID) == [server.customer]
    return [ServiceProvider.from_dict({"uuid": uuid4().hex}).to_dict()]


def nothing(_: WaldurServer, __: Call) -> Any:
    return []


def exposed(server: WaldurServer, _: Call) -> Any:
    document = {"offering_uuid": server.offering.hex, "exposed_fields": ["username"]}
    return OfferingUserAttributeConfig.from_dict(document).to_dict()


def synced(_: WaldurServer, __: Call) -> Any:
    return Status(status="synced").to_dict()


def resource_erred(server: WaldurServer, call: Call) -> Any:
    """Nothing that is tried here is to end so."""
    raise Refused(400, f"resource {call.parts[0]} erred: {read(ResourceSetStateErredRequest, call.body)}")


def resources(server: WaldurServer, call: Call) -> Any:
    offerings, states = chosen(call, "offering_uuid", UUID), chosen(call, "state", ResourceState)
    fields = chosen(call, "field", ResourceFieldEnum)
    some = [one for one in server.resources.values() if one.offering_uuid in offerings and one.state in states]
    return page(server, call, [shown(one, fields) for one in some])


def one_resource(server: WaldurServer, call: Call) -> Any:
    return shown(found(server.resources, call.parts[0]), chosen(call, "field", ResourceFieldEnum))


def set_backend_id(server: WaldurServer, call: Call) -> Any:
    found(server.resources, call.parts[0]).backend_id = read(ResourceBackendIDRequest, call.body).backend_id
    return Status(status="set").to_dict()


def set_metadata(server: WaldurServer, call: Call) -> Any:
    said = read(ResourceBackendMetadataRequest, call.body)
    found(server.resources, call.parts[0]).backend_metadata = said.backend_metadata
    return Status(status="set").to_dict()


def orders(server: WaldurServer, call: Call) -> Any:
    assert chosen(call, "offering_uuid", UUID) == [server.offering]
    states = chosen(call, "state", OrderState)
    return page(server, call, [one.to_dict() for one in server.orders.values() if one.state in states])


def one_order(server: WaldurServer, call: Call) -> Any:
    return shown(found(server.orders, call.parts[0]), chosen(call, "field", OrderDetailsFieldEnum))


def approve(server: WaldurServer, call: Call) -> Any:
    read(OrderApproveByProviderRequest, call.body)
    moved(found(server.orders, call.parts[0]), OrderState.PENDING_PROVIDER, OrderState.EXECUTING)
    return OrderInfoResponse(detail="Order has been approved.").to_dict()


def done(server: WaldurServer, call: Call) -> Any:
    """What was ordered holds from now on."""
    order = found(server.orders, call.parts[0])
    moved(order, OrderState.EXECUTING, OrderState.DONE)
    resource = server.resources[order.marketplace_resource_uuid]
    if order.type_ is RequestTypes.UPDATE:
        assert isinstance(resource.limits, ResourceLimits)
        resource.limits.additional_properties.update(order.limits.additional_properties)
    resource.state = ResourceState.TERMINATED if order.type_ is RequestTypes.TERMINATE else ResourceState.OK
    return None


def erred(server: WaldurServer, call: Call) -> Any:
    said, order = read(OrderErrorDetailsRequest, call.body), found(server.orders, call.parts[0])
    order.state, order.error_message = OrderState.ERRED, said.error_message
    return None


def moved(order: OrderDetails, before: OrderState, after: OrderState) -> None:
    if order.state is not before:
        raise Refused(409, f"the order is {order.state}")
    order.state = after


def usages(server: WaldurServer, call: Call) -> Any:
    (resource,), (month,) = chosen(call, "resource_uuid", UUID), call.query["billing_period"]
    fields = chosen(call, "field", ComponentUsageFieldEnum)
    some = server.usages.get((resource, month[:7]), {}).values()
    return page(server, call, [shown(one, fields) for one in some])


def set_usage(server: WaldurServer, call: Call) -> Any:
    said = read(ComponentUsageCreateRequest, call.body)
    month = server.usages.setdefault((UUID(str(said.resource)), said.date.isoformat()[:7]), {})
    for item in said.usages:
        if item.type_ not in COMPONENTS or not re.fullmatch(r"\d+(\.\d{1,2})?", str(item.amount)):
            raise Refused(400, f"{item.type_} {item.amount}")
        document = {"uuid": uuid4().hex, "type": item.type_, "usage": float(item.amount)}
        month[item.type_] = ComponentUsage.from_dict(document)
    return None


def set_user_usages(server: WaldurServer, call: Call) -> Any:
    """Of a component in a month that all together were reported of before."""
    said, whole = read(ComponentUserUsageBulkCreateRequest, call.body), UUID(call.parts[0])
    if not any(whole == one.uuid for month in server.usages.values() for one in month.values()):
        raise Refused(404, f"{whole} is not known here")
    users = [one.username for one in said.usages]
    if len(set(users)) < len(users) or not all(re.fullmatch(r"\d+\.\d\d", str(one.usage)) for one in said.usages):
        raise Refused(400, f"{said}")
    server.user_usages.setdefault(whole, {}).update({one.username: float(one.usage) for one in said.usages})
    return None


def identity(server: WaldurServer, call: Call) -> Any:
    said = read(AgentIdentityRequest, call.body)
    one = AgentIdentity(uuid4(), f"{server.url}/identity", server.offering, None, said.name, NOW, NOW, [])
    return one.to_dict()


def service(server: WaldurServer, call: Call) -> Any:
    said = read(AgentServiceCreateRequest, call.body)
    state = next(iter(AgentServiceState))
    url = f"{server.url}/service"
    one = AgentService(uuid4(), url, UUID(call.parts[0]), "agent", said.name, state, NOW, NOW, [])
    return one.to_dict()


def processor(server: WaldurServer, call: Call) -> Any:
    said = read(AgentProcessorCreateRequest, call.body)
    backend, url = said.backend_type, f"{server.url}/processor"
    return AgentProcessor(uuid4(), url, UUID(call.parts[0]), "agent", said.name, backend, NOW, NOW).to_dict()


_ID = r"([0-9a-f-]{32,36})"
_MARKET = "/api/marketplace-"
ROUTES: dict[tuple[str, str], Callable[[WaldurServer, Call], Any]] = {
    ("GET", "/api/users/me/"): me,
    ("GET", f"{_MARKET}provider-offerings/{_ID}/"): offering,
    ("GET", f"{_MARKET}provider-offerings/{_ID}/user-attribute-config/"): exposed,
    ("GET", f"{_MARKET}service-providers/"): providers,
    ("GET", f"{_MARKET}service-providers/{_ID}/keys/"): nothing,
    ("GET", f"{_MARKET}provider-resources/"): resources,
    ("GET", f"{_MARKET}provider-resources/{_ID}/"): one_resource,
    ("GET", f"{_MARKET}provider-resources/{_ID}/team/"): nothing,
    ("POST", f"{_MARKET}provider-resources/{_ID}/set_backend_id/"): set_backend_id,
    ("POST", f"{_MARKET}provider-resources/{_ID}/set_backend_metadata/"): set_metadata,
    ("POST", f"{_MARKET}provider-resources/{_ID}/refresh_last_sync/"): synced,
    ("POST", f"{_MARKET}provider-resources/{_ID}/set_as_erred/"): resource_erred,
    ("GET", "/api/component-user-usage-limits/"): nothing,
    ("GET", f"{_MARKET}orders/"): orders,
    ("GET", f"{_MARKET}orders/{_ID}/"): one_order,
    ("POST", f"{_MARKET}orders/{_ID}/approve_by_provider/"): approve,
    ("POST", f"{_MARKET}orders/{_ID}/set_state_done/"): done,
    ("POST", f"{_MARKET}orders/{_ID}/set_state_erred/"): erred,
    ("GET", f"{_MARKET}component-usages/"): usages,
    ("POST", f"{_MARKET}component-usages/set_usage/"): set_usage,
    ("POST", f"{_MARKET}component-usages/{_ID}/set_user_usages/"): set_user_usages,
    ("GET", f"{_MARKET}component-user-usages/"): nothing,
    ("GET", f"{_MARKET}offering-users/"): nothing,
    ("GET", f"{_MARKET}provider-offerings/{_ID}/list_project_service_accounts/"): nothing,
    ("GET", f"{_MARKET}provider-offerings/{_ID}/list_course_accounts/"): nothing,
    ("GET", f"{_MARKET}site-agent-identities/"): nothing,
    ("POST", f"{_MARKET}site-agent-identities/"): identity,
    ("POST", f"{_MARKET}site-agent-identities/{_ID}/register_service/"): service,
    ("POST", f"{_MARKET}site-agent-services/{_ID}/register_processor/"): processor,
}
CREATING = (identity, service, processor, set_usage, set_user_usages)


@contextmanager
def serving() -> Iterator[WaldurServer]:
    """A Waldur until the end of the block, in a thread of its own."""
    kept = WaldurServer()
    kept.gate.set()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._handle("GET")

        def do_POST(self) -> None:
            self._handle("POST")

        def _handle(self, method: str) -> None:
            parts = urlsplit(self.path)
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = Call(method, parts.path, parse_qs(parts.query), json.loads(content) if content else None)
            kept.calls.append(call)
            kept.gate.wait(GATE_SECONDS_MAX)
            with lock:
                status, document = self._answer(call)
            self._tell(status, document, call.headers)

        def _answer(self, call: Call) -> tuple[int, Any]:
            if kept.plan:
                return kept.plan.pop(0), {"detail": "as planned"}
            if self.headers["Authorization"] != f"Token {TOKEN}":
                return 401, {"detail": "Invalid token."}
            try:
                return kept.answer(call)
            except Refused as error:
                kept.faults.append(str(error))
                return error.status, {"detail": str(error)}

        def _tell(self, status: int, document: Any, headers: dict[str, str]) -> None:
            content = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            sent = {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
            for name, value in sent.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as kept.url:
        try:
            yield kept
        finally:
            kept.gate.set()


class _Httpd(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Who asked has given up, or heard enough."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on loopback until the end of the block, in a thread of its own; its URL."""
    httpd = _Httpd(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
