"""`bursar serve` with a gRPC server for administrators."""

import subprocess

import grpc
import pytest

from bursar.wire.scheduler.v1 import admin_pb2 as pb
from bursar.wire.scheduler.v1 import admin_pb2_grpc as pb_grpc
from support.process.server import BURSAR, data_directory, free_port, migrated_directory, started


@pytest.mark.timeout(120)
def test_a_served_cluster_is_administered_over_grpc_with_the_certificate_of_https() -> None:
    address = f"127.0.0.1:{free_port()}"
    with migrated_directory() as data, started(data, tls=True, options=["--grpc-admin", address]) as server:
        trusting = grpc.ssl_channel_credentials((data / "tls" / "ca.crt").read_bytes())
        with grpc.secure_channel(address, trusting) as channel:
            stub = pb_grpc.AdminServiceStub(channel)
            shown = (("authorization", f"Bearer {server.token}"),)
            made = stub.UpdateTenant(pb.UpdateTenantRequest(name="default", max_nodes=250), metadata=shown, timeout=20)
            assert dict(made.tenant.limits) == {"nodes": "250"}
            used = stub.GetTenantUsage(pb.GetTenantUsageRequest(tenant="default"), metadata=shown, timeout=20)
            assert (used.days, used.gpu_hours_used, used.source) == (90, 0, "internal")
            own = stub.GetUserUsage(pb.GetUserUsageRequest(), metadata=shown, timeout=20)
            assert own.user == "admin"
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetUserUsage(pb.GetUserUsageRequest(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tokens_are_not_taken_in_the_clear_from_elsewhere() -> None:
    with data_directory() as data:
        command = [str(BURSAR), "serve", "--data", str(data), "--http", "127.0.0.1:0", "--grpc-admin", "0.0.0.0:9"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "--grpc-admin 0.0.0.0:9 is not on loopback" in done.stderr
    assert "--tls auto" in done.stderr
