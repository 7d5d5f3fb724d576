"""What the API's documentation says in words: descriptions of fields and of refusals, and examples."""

from __future__ import annotations

from typing import Any, Final

Document = dict[str, Any]

FIELD_WORDS: Final = {
    "apiVersion": "Version of the API: v1.",
    "kind": "What kind of object this is.",
    "metadata": "Name, labels, annotations and what the server keeps about the object.",
    "spec": "What is wanted.",
    "status": "What is; written by the server.",
    "conditions": "What is true of it at present, and since when.",
    "phase": "Where it stands, in one word.",
    "labels": "Short names and values to select by.",
    "annotations": "Notes that nothing selects by.",
    "resourceVersion": "The revision of its last change. Sent back, it guards against overwriting another's change.",
    "uid": "Never used twice, also when the name is.",
    "limits": "The most that may be used, by dimension.",
    "description": "A sentence for people.",
    "enforcement": "What happens when a limit has no room.",
    "nodeSelector": "Labels that a node must have.",
    "gangScheduling": "The group that starts together or not at all.",
    "Condition.status": "True, False or Unknown.",
    "ObjectMeta.name": "Unique among the objects of its kind in its namespace.",
    "ObjectMeta.generateName": "The server appends a suffix to it that makes it unique.",
    "ObjectMeta.namespace": "Where it lives.",
    "ObjectMeta.generation": "Counts the changes of its spec.",
    "ObjectMeta.creationTimestamp": "When it was accepted.",
    "ObjectMeta.deletionTimestamp": "When its deletion was asked for.",
    "ObjectMeta.finalizers": "It is kept until this list is empty.",
    "Resources.requests": "What is taken from the node and charged to the quota, by resource.",
    "Resources.limits": "The most it may use, by resource; where nothing is requested, this is the request.",
    "AllocationSpec.resources": "What it needs on each node.",
    "AllocationSpec.nodes": "On how many nodes; 1 where not given.",
    "AllocationSpec.exclusive": "Whether it has its nodes to itself.",
    "AllocationSpec.sensitive": "Whether it runs only on nodes that its user has claimed.",
    "AllocationSpec.priority": "Higher ones go first.",
    "AllocationSpec.priorityClass": "The name of a priority.",
    "AllocationSpec.preemptionPolicy": "PreemptLowerPriority or Never.",
    "AllocationSpec.queue": "Where it waits; default where not given.",
    "AllocationSpec.scheduling": "Where it may run, and beside what.",
    "AllocationSpec.ttl": "The longest it may run, as in 7200s or 2h.",
    "AllocationSpec.command": "What each of its nodes runs; without one it only holds room.",
    "AllocationSpec.env": "The command's environment, by name; the node adds its own, such as BURSAR_NODE.",
    "AllocationSpec.workingDir": "The command's directory on the node, as an absolute path.",
    "AllocationSpec.stdin": "Whether the command is started when its standard input was sent, with PUT …/stdin.",
    "AllocationSpec.onNodeLost": "requeue or fail.",
    "AllocationSpec.onMemberFailure": "On several nodes or in a gang: stop the rest when one fails, or wait for it.",
    "AllocationStatus.reason": "Why it stands there, from a closed list.",
    "AllocationStatus.queuePosition": "How many of its queue go before it, and itself.",
    "AllocationStatus.allocatedResources": "What it holds, on all of its nodes together.",
    "AllocationStatus.failure": "Where it failed first, and how.",
    "AllocationStatus.restarts": "How often it was stopped, and waited again.",
    "GangScheduling.groupId": "The name that its members share.",
    "GangScheduling.minMembers": "How many must be placed for any to start.",
    "GangScheduling.timeout": "How long to wait for all of them.",
    "ResourceQuotaSpec.hard": "The most that may be used, by resource.",
    "ResourceQuotaSpec.soft": "Where warnings begin, by resource.",
    "ResourceQuotaSpec.scopes": "Counts only what is in all of these scopes.",
    "ResourceQuotaSpec.scopeSelector": "Counts only what matches.",
    "ResourceQuotaStatus.used": "What is charged now, by resource.",
    "JobSpec.parallelism": "How many allocations run at once.",
    "JobSpec.completions": "How many must succeed; as many as run at once unless said otherwise.",
    "JobSpec.backoffLimit": "How many may fail.",
    "JobSpec.backoffSeconds": "The pause before the first retry; each later one is twice as long, up to six minutes.",
    "JobSpec.onMemberFailure": "As of its allocations.",
    "JobSpec.activeDeadlineSeconds": "How long it may run.",
    "NodeSpec.capacity": "What the node has, by resource.",
    "NodeSpec.allocatable": "What of it may be given away, by resource.",
    "NodeSpec.taints": "Keeps away what does not tolerate them.",
    "NodeSpec.unschedulable": "Whether it is cordoned: nothing new is placed on it.",
    "TenantSpec.parent": "The tenant above it, whose limits hold for it too.",
    "TenantSpec.tier": "Where its limits come from when it has none of its own.",
}


REFUSAL_WORDS: Final = {
    400: "Malformed: every fault is listed, unknown fields by name.",
    401: "The token is missing, expired or revoked.",
    403: "The role may not do this, a quota has no room for it, or an account cannot pay.",
    404: "There is no such object, or it belongs to another tenant.",
    405: "The path exists, but not with this method.",
    406: "None of the accepted media types can be served.",
    409: "It exists already, has ended, or changed since it was read: read it again and retry.",
    410: "The revision is no longer kept: list again.",
    413: "The body is too large.",
    415: "The body's media type is not understood here.",
    422: "Well-formed, but it can never be satisfied.",
    429: "The rate limit, or an account's spend rate, is used up: wait as long as Retry-After says.",
    500: "A fault of the server; the message carries the request's id.",
    503: "Overloaded, or the database is away: wait as long as Retry-After says.",
}

_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_RATE_HEADERS: Final = {
    "X-RateLimit-Limit": {"description": "Requests a minute.", "schema": {"type": "integer"}},
    "X-RateLimit-Remaining": {"description": "Requests left now.", "schema": {"type": "integer"}},
    "X-RateLimit-Reset": {"description": "When it is full again, in epoch seconds.", "schema": {"type": "integer"}},
}
REFUSAL_HEADERS: Final = {429: {**_RETRY_AFTER, **_RATE_HEADERS}, 503: _RETRY_AFTER}


EXAMPLES: Final[dict[str, Document]] = {
    "Allocation": {
        "metadata": {
            "name": "ml-training-job-42",
            "namespace": "ml-team",
            "labels": {"app": "model-training", "team": "ml-platform", "cost-center": "CC-1234"},
            "annotations": {"scheduler.example.com/gang-size": "4", "scheduler.example.com/max-wait": "300s"},
        },
        "spec": {
            "resources": {
                "requests": {"cpu": "8000m", "memory": "32Gi", "nvidia.com/gpu": "4"},
                "limits": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "4"},
            },
            "priority": 100,
            "priorityClass": "high-priority",
            "preemptionPolicy": "PreemptLowerPriority",
            "scheduling": {
                "nodeSelector": {"gpu-type": "nvidia-a100", "zone": "us-east-1a"},
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringScheduling": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "gpu-memory", "operator": "Gte", "values": ["80"]}]}
                            ]
                        },
                        "preferredDuringScheduling": [
                            {
                                "weight": 50,
                                "preference": {
                                    "matchExpressions": [{"key": "network", "operator": "In", "values": ["rdma"]}]
                                },
                            }
                        ],
                    },
                    "podAntiAffinity": {
                        "requiredDuringScheduling": [
                            {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"app": "model-training"}},
                            }
                        ]
                    },
                },
                "tolerations": [{"key": "gpu-only", "operator": "Exists", "effect": "NoSchedule"}],
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "topology.kubernetes.io/zone",
                        "whenUnsatisfiable": "DoNotSchedule",
                    }
                ],
            },
            "ttl": "7200s",
            "gangScheduling": {"groupId": "training-gang-001", "minMembers": 4, "timeout": "300s"},
        },
    },
    "Job": {
        "metadata": {"name": "distributed-training-v2", "namespace": "ml-team"},
        "spec": {
            "parallelism": 8,
            "completions": 8,
            "backoffLimit": 3,
            "activeDeadlineSeconds": 86400,
            "template": {
                "spec": {
                    "resources": {"requests": {"cpu": "16000m", "memory": "64Gi", "nvidia.com/gpu": "8"}},
                    "scheduling": {
                        "gangScheduling": {"minMembers": 8, "timeout": "600s"},
                        "nodeSelector": {"gpu-type": "nvidia-a100"},
                    },
                }
            },
            "priority": 200,
            "priorityClass": "batch-high",
            "queue": "gpu-training",
        },
    },
    "ResourceQuota": {
        "metadata": {"name": "ml-team-quota", "namespace": "ml-team"},
        "spec": {
            "hard": {
                "cpu": "10000",
                "memory": "40Ti",
                "nvidia.com/gpu": "100",
                "pods": "5000",
                "persistentvolumeclaims": "200",
                "services": "100",
            },
            "soft": {"cpu": "8000", "memory": "32Ti", "nvidia.com/gpu": "80"},
            "scopes": ["NotTerminating"],
            "scopeSelector": {
                "matchExpressions": [
                    {"scopeName": "PriorityClass", "operator": "In", "values": ["high-priority", "normal"]}
                ]
            },
        },
    },
}
