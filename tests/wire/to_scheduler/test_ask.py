"""From stored documents to what the scheduler decides on."""

import subprocess
import sys
import uuid
from typing import Any

import msgspec
import pytest

from bursar.core.objects.allocation import Gang
from bursar.core.objects.ask import (
    ANYWHERE,
    Ask,
    Effect,
    InterPodTerm,
    Operator,
    Requirement,
    Shape,
    Spread,
    Taint,
    Toleration,
    Where,
)
from bursar.core.objects.charge import NOTHING, Charge
from bursar.core.values.refusal import Cause
from bursar.core.values.selector import EVERYTHING, Op, Selector, SelectorTerm
from bursar.wire.kinds.allocation import ALLOCATION, Allocation, charge_of
from bursar.wire.kinds.job import JOB, Job
from bursar.wire.kinds.node import allocatable_in, capacity_in
from bursar.wire.shared.affinity import selector_of
from bursar.wire.shared.document import encode, encode_object
from bursar.wire.shared.meta import LabelSelector
from bursar.wire.to_scheduler.ask import (
    NodeView,
    PriorityClassView,
    TenantShare,
    ask_of,
    node_of,
    priority_class_of,
    queue_profile_of,
    submitted_at,
    tenant_share_of,
)

PRIORITIES = {
    "high": PriorityClassView(1000),
    "calm": PriorityClassView(10, preempts=False),
    "usual": PriorityClassView(50, global_default=True),
    "odd": PriorityClassView(70, global_default=True, preempts=False),
}


def stored(spec: dict[str, Any], **metadata: Any) -> bytes:
    metadata = {
        "name": "train",
        "namespace": "team",
        "creationTimestamp": "2024-01-15T10:30:00Z",
        **metadata,
    }
    one = msgspec.convert({"metadata": metadata, "spec": spec}, Allocation)
    # What was stored before annotations were checked is read all the same.
    assert [fault for fault in ALLOCATION.check(one) if "annotations[bursar.io/" not in fault.field] == []
    return encode_object(ALLOCATION, one)


def read(
    spec: dict[str, Any],
    *,
    labels: dict[str, str] | None = None,
    priorities: dict[str, PriorityClassView] = PRIORITIES,
    charge: Charge | None = None,
    **metadata: Any,
) -> Ask:
    """Of work with a command; `"command": []` has none."""
    return ask_of(
        stored({"command": ["train"], **spec}, **metadata),
        uid="alloc-1",
        tenant="physics",
        labels=labels or {},
        priorities=priorities,
        charge=charge,
    )


def where(**scheduling: Any) -> Where:
    return read({"scheduling": scheduling}).shape.where


def test_the_least_that_can_be_asked() -> None:
    one = read({}, priorities={})
    assert one == Ask(
        uid="alloc-1",
        namespace="team",
        name="train",
        tenant="physics",
        shape=Shape(()),
        submitted_at=1705314600.0,
        charge=one.charge,
    )
    assert one.shape.where is ANYWHERE


@pytest.mark.parametrize(
    ("milliseconds", "submitted"),
    [(1705314600_734, 1705314600.734), (1705314599_998, 1705314599.998), (1705314600_000 - 3_600_000, 1705314600.0)],
    ids=["within the second", "just before it", "of another time"],
)
def test_the_uid_tells_when_within_the_second_something_was_submitted(milliseconds: int, submitted: float) -> None:
    uid = f"alloc-{uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62)}"
    assert submitted_at("2024-01-15T10:30:00Z", uid) == submitted


@pytest.mark.parametrize(
    "uid", ["", "alloc-1", str(uuid.UUID(int=4 << 76)), "alloc-zzzzzzzz-zzzz-7000-8000-000000000000"]
)
def test_a_uid_that_tells_no_time_leaves_the_second(uid: str) -> None:
    assert submitted_at("2024-01-15T10:30:00Z", uid) == 1705314600.0


def test_requests_are_sorted_and_without_zeros_and_limits_stand_in_for_them() -> None:
    resources = {"requests": {"memory": "1Gi", "cpu": "8000m"}, "limits": {"nvidia.com/gpu": "2", "cpu": "9"}}
    shape = read({"resources": resources, "nodes": 3, "exclusive": True}).shape
    assert shape.requests == (("cpu", 8000), ("memory", 1 << 30), ("nvidia.com/gpu", 2000))
    assert (shape.nodes, shape.exclusive) == (3, True)
    assert read({"resources": {"requests": {"cpu": "0"}}}).shape.requests == ()


def test_the_charge_is_the_one_given_else_that_of_submission() -> None:
    spec = {"resources": {"requests": {"cpu": "2"}}}
    one = msgspec.convert({"metadata": {"name": "x"}, "spec": spec}, Allocation)
    assert read(spec).charge == charge_of(one) != NOTHING
    held = Charge(accepted={"cpu": 1}, bound={"cpu": 1})
    assert read(spec, charge=held).charge is held


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"zone": "a", "gpu": "x"}},
        {"scheduling": {"nodeSelector": {"zone": "a", "gpu": "x"}}},
        {"nodeSelector": {"zone": "a", "gpu": "x"}, "scheduling": {}},
    ],
)
def test_the_node_selector_may_stand_in_two_places(spec: dict[str, Any]) -> None:
    assert read(spec).shape.where == Where(node_labels=(("gpu", "x"), ("zone", "a")))


@pytest.mark.parametrize("ending", ["", "IgnoredDuringExecution"])
def test_node_affinity_in_both_spellings(ending: str) -> None:
    term = {"matchExpressions": [{"key": "net", "operator": "In", "values": ["rdma", "ib", "rdma"]}]}
    affinity = {
        f"requiredDuringScheduling{ending}": {
            "nodeSelectorTerms": [
                term,
                {"matchExpressions": [{"key": "gpu-memory", "operator": "Gte", "values": ["80"]}]},
            ]
        },
        f"preferredDuringScheduling{ending}": [{"weight": 50, "preference": term}, {"weight": 1, "preference": {}}],
    }
    net = Requirement("net", Operator.IN, ("ib", "rdma"))
    assert where(affinity={"nodeAffinity": affinity}) == Where(
        required=((net,), (Requirement("gpu-memory", Operator.AT_LEAST, ("80",)),)), preferred=((50, (net,)),)
    )


@pytest.mark.parametrize("ending", ["", "IgnoredDuringExecution"])
@pytest.mark.parametrize(
    ("field", "wanted", "rather"),
    [("podAffinity", "near", "rather_near"), ("podAntiAffinity", "apart", "rather_apart")],
)
def test_pod_affinity_in_both_spellings(ending: str, field: str, wanted: str, rather: str) -> None:
    term = {
        "topologyKey": "rack",
        "labelSelector": {"matchLabels": {"app": "x"}},
        "namespaces": ["b", "a", "b"],
    }
    affinity = {
        f"requiredDuringScheduling{ending}": [term, {"topologyKey": "zone"}],
        f"preferredDuringScheduling{ending}": [{"weight": 7, "podAffinityTerm": term}],
    }
    found = where(affinity={field: affinity})
    inter_pod = InterPodTerm("rack", Selector((SelectorTerm("app", Op.IN, ("x",)),)), ("a", "b"))
    assert getattr(found, wanted) == (inter_pod, InterPodTerm("zone", EVERYTHING))
    assert getattr(found, rather) == ((7, inter_pod),)
    assert found == Where(**{wanted: getattr(found, wanted), rather: getattr(found, rather)})


def test_spreads_are_hard_unless_they_say_otherwise_and_may_have_no_selector() -> None:
    found = where(
        topologySpreadConstraints=[
            {"maxSkew": 1, "topologyKey": "zone"},
            {
                "maxSkew": 2,
                "topologyKey": "rack",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]},
            },
            {"maxSkew": 3, "topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}},
        ]
    )
    assert found.spreads == (
        Spread("zone", 1, True, None),
        Spread("rack", 2, False, Selector((SelectorTerm("app", Op.EXISTS),))),
        Spread("host", 3, True, EVERYTHING),
    )


def test_tolerations_and_those_that_extended_resources_imply() -> None:
    tolerations = [
        {"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "value": "a"},
        {"operator": "Exists"},
    ]
    said = (Toleration("gpu-only", True, "", "NoSchedule"), Toleration("team", False, "a"), Toleration(exists=True))
    assert where(tolerations=tolerations).tolerations == said
    resources = {"requests": {"nvidia.com/gpu": "1", "cpu": "1", "example.com/fpga": "0"}}
    both = read({"resources": resources, "scheduling": {"tolerations": tolerations}})
    assert both.shape.where.tolerations == (*said, Toleration("nvidia.com/gpu", exists=True))
    assert read({"resources": resources}).shape.where == Where(tolerations=(Toleration("nvidia.com/gpu", exists=True),))


def test_what_has_no_command_may_go_to_a_simulated_node() -> None:
    simulated = Toleration("bursar.io/simulated", exists=True)
    assert read({}).shape.where == Where()
    assert read({"command": []}).shape.where == Where(tolerations=(simulated,))
    asked = {"scheduling": {"tolerations": [{"key": "bursar.io/simulated", "operator": "Exists"}]}}
    assert read(asked).shape.where == read({"command": [], **asked}).shape.where == Where(tolerations=(simulated,))


def test_a_selectors_values_are_sorted_and_distinct() -> None:
    document = {
        "matchLabels": {"b": "2", "a": "1"},
        "matchExpressions": [
            {"key": "c", "operator": "NotIn", "values": ["y", "x", "y"]},
            {"key": "d", "operator": "DoesNotExist"},
        ],
    }
    assert selector_of(msgspec.convert(document, LabelSelector)) == Selector(
        (
            SelectorTerm("a", Op.IN, ("1",)),
            SelectorTerm("b", Op.IN, ("2",)),
            SelectorTerm("c", Op.NOT_IN, ("x", "y")),
            SelectorTerm("d", Op.ABSENT),
        )
    )
    assert selector_of(LabelSelector()) == EVERYTHING


@pytest.mark.parametrize(
    ("spec", "notes", "gang"),
    [
        ({"gangScheduling": {"groupId": "g", "minMembers": 4, "timeout": "300s"}}, {}, Gang("g", 4, 300)),
        ({"scheduling": {"gangScheduling": {"groupId": "g", "minMembers": 4}}}, {}, Gang("g", 4)),
        ({"gangScheduling": {"groupId": "g"}}, {"gang-size": "8", "max-wait": "5m"}, Gang("g", 8, 300)),
        ({"gangScheduling": {"groupId": "g", "minMembers": 2}}, {"gang-size": "8", "max-wait": "9"}, Gang("g", 2, 9)),
        ({"gangScheduling": {"groupId": "g"}}, {}, None),
        ({"gangScheduling": {"minMembers": 1}}, {}, None),
        ({}, {"max-wait": "9"}, None),
    ],
)
def test_gangs_are_read_from_the_spec_and_where_it_is_silent_from_annotations(
    spec: dict[str, Any], notes: dict[str, str], gang: Gang | None
) -> None:
    annotations = {f"scheduler.example.com/{name}": value for name, value in notes.items()}
    assert read(spec, annotations=annotations).gang == gang


@pytest.mark.parametrize(
    ("spec", "priority", "preempts"),
    [
        ({"priority": 7, "priorityClass": "high"}, 7, True),
        ({"priority": 0, "priorityClass": "high"}, 0, True),
        ({"priorityClass": "high"}, 1000, True),
        ({"priorityClass": "calm"}, 10, False),
        ({"priorityClass": "calm", "preemptionPolicy": "PreemptLowerPriority"}, 10, True),
        ({"priorityClass": "high", "preemptionPolicy": "Never"}, 1000, False),
        ({"priority": 7, "priorityClass": "calm"}, 7, False),
        ({}, 50, True),
        ({"priorityClass": "gone"}, 50, True),
    ],
)
def test_whose_priority_counts(spec: dict[str, Any], priority: int, preempts: bool) -> None:
    one = read(spec)
    assert (one.priority, one.preempts) == (priority, preempts)


def test_what_else_a_spec_and_its_metadata_say() -> None:
    one = read({"ttl": "2h", "queue": "gpu"}, annotations={"bursar.io/checkpoint-interval": "15m"})
    assert (one.ttl_seconds, one.queue, one.checkpoint_seconds) == (7200, "gpu", 900)
    assert read({}, annotations={"bursar.io/checkpoint-interval": "often"}).checkpoint_seconds == 0


def test_the_part_of_the_data_that_is_in_place_is_read() -> None:
    assert read({}, annotations={"bursar.io/data-ready": "0.25"}).data_ready == 0.25
    assert read({}, annotations={"bursar.io/data-ready": "much"}).data_ready is None
    assert read({}).data_ready is None
    owner = {"kind": "Job", "name": "sweep", "uid": "job-1"}
    assert read({}, ownerReferences=[{"kind": "App", "name": "x", "uid": "y"}, owner]).job == "sweep"
    assert read({}, labels={"bursar.io/job": "other"}).job == "other"
    assert read({}, labels={"a": "b"}).labels == {"a": "b"}


def test_allocations_of_one_template_share_one_shape() -> None:
    spec = {"resources": {"requests": {"nvidia.com/gpu": "4"}}, "nodeSelector": {"zone": "a"}}
    asks = [read(spec, name=f"train-{index}") for index in range(100)]
    assert {id(one.shape) for one in asks} == {id(asks[0].shape)}
    assert {one.name for one in asks} == {f"train-{index}" for index in range(100)}
    assert read({**spec, "command": ["other"]}).shape is asks[0].shape, "what does not matter does not split it"
    large = {**spec, "command": ["x" * 10_000]}
    assert read(large).shape is asks[0].shape


# What contradicts itself.


def faults(spec: dict[str, Any]) -> list[Cause]:
    return ALLOCATION.check(msgspec.convert({"metadata": {"name": "x"}, "spec": spec}, Allocation))


def required(*expressions: dict[str, Any]) -> dict[str, Any]:
    return {
        "affinity": {
            "nodeAffinity": {"requiredDuringScheduling": {"nodeSelectorTerms": [{"matchExpressions": expressions}]}}
        }
    }


def test_contradictory_affinity_is_a_fault_of_its_field() -> None:
    in_b = {"key": "zone", "operator": "In", "values": ["b"]}
    for spec in (
        {"nodeSelector": {"zone": "a"}, "scheduling": required(in_b)},
        {"scheduling": {"nodeSelector": {"zone": "a"}, **required(in_b)}},
    ):
        (fault,) = faults(spec)
        assert fault.field == "spec.scheduling.affinity.nodeAffinity.requiredDuringScheduling"
        assert fault.message == "contradicts itself: no label zone can be all of: nodeSelector a, In (b)"
    assert faults({"nodeSelector": {"zone": "b"}, "scheduling": required(in_b)}) == []


def test_a_jobs_template_is_held_to_the_same() -> None:
    exists, absent = {"key": "zone", "operator": "Exists"}, {"key": "zone", "operator": "DoesNotExist"}
    template = {"spec": {"scheduling": required(exists, absent)}}
    job = msgspec.convert({"metadata": {"name": "x"}, "spec": {"template": template}}, Job)
    (fault,) = JOB.check(job)
    assert fault.field == "spec.template.spec.scheduling.affinity.nodeAffinity.requiredDuringScheduling"
    assert fault.message.endswith("no label zone can be all of: Exists, DoesNotExist")


def test_what_is_malformed_is_told_and_not_compared() -> None:
    odd = {"key": "zone", "operator": "Near", "values": ["b"]}
    word = {"key": "zone", "operator": "Gt", "values": ["b"]}
    assert [one.field.rpartition(".")[2] for one in faults({"scheduling": required(odd, word)})] == [
        "operator",
        "values",
    ]


# Nodes, tenants, queues and classes.


def test_a_node_as_constraints_see_it() -> None:
    doc = encode(
        {
            "metadata": {"name": "n", "labels": {"zone": "a"}},
            "spec": {
                "capacity": {"cpu": "1"},
                "unschedulable": True,
                "taints": [{"key": "a"}, {"key": "b", "value": "c", "effect": "NoExecute", "timeAdded": "x"}],
            },
        }
    )
    taints = (Taint("a"), Taint("b", "c", Effect.NO_EXECUTE))
    assert node_of(doc, b"{}") == NodeView({"zone": "a"}, taints, ready=True, unschedulable=True)
    assert node_of(b'{"metadata":{"name":"n"}}', b"{}") == NodeView({})


@pytest.mark.parametrize(
    ("status", "ready"),
    [
        ({"phase": "Ready", "conditions": [{"type": "Ready", "status": "True"}]}, True),
        ({"phase": "Ready", "conditions": [{"type": "Ready", "status": "False"}]}, False),
        ({"phase": "Ready", "conditions": [{"type": "Ready", "status": "Unknown"}]}, False),
        ({"phase": "Ready", "conditions": [{"type": "DiskPressure", "status": "False"}]}, True),
        ({"phase": "NotReady"}, False),
        ({"phase": "Lost", "conditions": [{"type": "Ready", "status": "True"}]}, False),
    ],
)
def test_a_node_is_ready_when_nothing_says_otherwise(status: dict[str, Any], ready: bool) -> None:
    assert node_of(b'{"metadata":{"name":"n"}}', encode(status)).ready is ready


def test_how_large_a_node_is() -> None:
    spec = {"capacity": {"cpu": "96", "memory": "1152Gi"}, "allocatable": {"cpu": "94", "nvidia.com/gpu": "8"}}
    doc = encode({"metadata": {"name": "n"}, "spec": {**spec, "cpuOvercommit": 1.5}})
    assert capacity_in(doc, b"{}") == {"cpu": 144_000, "memory": 1152 << 30, "nvidia.com/gpu": 8000}
    reported = encode({"phase": "Ready", "capacity": {"cpu": "90", "nvidia.com/gpu": "6"}})
    assert capacity_in(encode({"metadata": {}, "spec": {"capacity": {"cpu": "96"}}}), reported) == {
        "cpu": 90_000,
        "nvidia.com/gpu": 6000,
    }
    assert capacity_in(b'{"metadata":{"name":"n"}}', b"{}") == {}


def test_what_a_node_can_give_when_it_is_empty() -> None:
    spec = {"capacity": {"cpu": "96", "memory": "1152Gi"}, "allocatable": {"cpu": "94", "nvidia.com/gpu": "8"}}
    doc = encode({"metadata": {"name": "n"}, "spec": {**spec, "cpuOvercommit": 1.5}})
    assert allocatable_in(doc, b"{}") == {"cpu": 141_000, "memory": 1152 << 30, "nvidia.com/gpu": 8000}
    assert allocatable_in(doc, encode({"allocatable": {"nvidia.com/gpu": "6"}}))["nvidia.com/gpu"] == 6000
    assert allocatable_in(b'{"metadata":{"name":"n"}}', b"{}") == {}


def test_a_tenants_place_in_the_fair_share() -> None:
    spec = {
        "parent": "science",
        "weight": 2,
        "fairShareTarget": 0.25,
        "burstAllowance": 1.5,
        "gpuHoursBudget": 1000,
        "nodeHoursBudget": 10,
        "limits": {"nodes": "5"},
    }
    doc = encode({"metadata": {"name": "t"}, "spec": spec})
    assert tenant_share_of(doc) == TenantShare("science", 2.0, 0.25, 1.5, 1000.0, 10.0)
    assert tenant_share_of(b'{"metadata":{"name":"t"}}') == TenantShare()


def test_queues_and_priority_classes() -> None:
    assert queue_profile_of(b'{"metadata":{"name":"q"},"spec":{"profile":"hpc","description":"x"}}') == "hpc"
    assert queue_profile_of(b'{"metadata":{"name":"q"}}') == "default"
    assert priority_class_of(b'{"metadata":{},"value":7}') == PriorityClassView(7)
    doc = b'{"metadata":{},"value":-1,"globalDefault":true,"preemptionPolicy":"Never"}'
    assert priority_class_of(doc) == PriorityClassView(-1, global_default=True, preempts=False)


def test_reading_needs_no_numpy() -> None:
    script = (
        "import sys, bursar.wire.to_scheduler.ask, bursar.ops.quota.cluster_ceiling; sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
