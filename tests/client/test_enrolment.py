"""A node joins a real server with the SDK, and calls it over TLS with what it was given."""

import secrets
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bursar.client import Client
from bursar.client.errors import ApiError
from support.nodes.certificates import new_key, pem_of, request_for
from support.process.server import Server


def bootstrap(admin: Client, name: str) -> str:
    made = admin.request("POST", "/api/v1/tokens", body={"role": "node", "node": name})
    return str(made["status"]["token"])


@pytest.fixture
def name(admin: Client) -> Iterator[str]:
    """A node's name. Whatever becomes of the test, no node stays."""
    one = f"joiner-{secrets.token_hex(4)}"
    yield one
    admin.nodes.delete(one)


def healthy(address: str, credentials: grpc.ChannelCredentials) -> bool:
    with grpc.secure_channel(address, credentials) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_from_a_token_to_a_call(server: Server, admin: Client, name: str) -> None:
    key = new_key()
    with server.client(bootstrap(admin, name)) as node:
        assert node.authority()["address"]
        described = {"metadata": {"labels": {"rack": "7"}}, "spec": {"capacity": {"cpu": "1"}, "unschedulable": True}}
        given = node.certify(name, request_for(key).decode(), described)
        with pytest.raises(ApiError, match="was for a single use"):
            node.certify(name, request_for(new_key()).decode())
    assert admin.nodes.get(name)["metadata"]["labels"]["rack"] == "7"
    authority = given["authority"].encode()
    assert healthy(
        given["address"], grpc.ssl_channel_credentials(authority, pem_of(key), given["certificate"].encode())
    )
    with pytest.raises(grpc.RpcError):
        healthy(given["address"], grpc.ssl_channel_credentials(authority))
