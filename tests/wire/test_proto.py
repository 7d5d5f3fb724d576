"""The Python of proto/ is what proto/ says, and nobody's handiwork."""

import subprocess
from pathlib import Path

from bursar.wire.scheduler.v1 import admin_pb2, node_agent_pb2

ROOT = Path(__file__).parents[2]
MADE = Path("bursar/wire/scheduler/v1")


def test_what_is_committed_is_what_proto_makes(tmp_path: Path) -> None:
    subprocess.run(["sh", "scripts/proto.sh", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / MADE).glob("*_pb2*")}
    assert len(made) == 8
    assert made == {path.name: path.read_text() for path in (ROOT / "src" / MADE).glob("*_pb2*")}


def test_on_the_wire_the_package_and_the_first_fields_are_those_that_clients_know() -> None:
    assert node_agent_pb2.DESCRIPTOR.package == "scheduler.v1"
    service = node_agent_pb2.DESCRIPTOR.services_by_name["NodeAgent"]
    assert [one.name for one in service.methods[:4]] == [
        "Heartbeat", "BindAllocation", "EvictAllocation", "GetResourceSnapshot",
    ]  # fmt: skip
    known = {
        "HeartbeatRequest": ["node_id", "timestamp", "current_usage", "pod_statuses", "conditions"],
        "HeartbeatResponse": ["directives", "lease_duration_seconds"],
        "BindRequest": ["allocation_id", "node_id", "resources", "annotations"],
        "BindResponse": ["success", "error_message", "failure_reason"],
    }
    for message, names in known.items():
        fields = node_agent_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_number
        assert [fields[number].name for number in range(1, len(names) + 1)] == names


def test_administrators_have_the_calls_that_they_know() -> None:
    assert admin_pb2.DESCRIPTOR.package == "scheduler.v1"
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    assert [one.name for one in service.methods] == ["UpdateTenant", "GetTenantUsage", "GetUserUsage"]
