"""The `kubernetes` Python package, unmodified: typed calls for the kinds it knows, dynamic ones for ours."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from support.process.server import Server

# The package has types for some of its parts only.
client: Any = pytest.importorskip("kubernetes.client")
dynamic: Any = pytest.importorskip("kubernetes.dynamic")
watch: Any = pytest.importorskip("kubernetes.watch")


def unique(stem: str) -> str:
    return f"{stem}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def api(cluster: Server) -> Iterator[Any]:
    configuration = client.Configuration(host=cluster.url)
    configuration.ssl_ca_cert = str(cluster.data / "tls" / "ca.crt")
    configuration.api_key = {"authorization": f"Bearer {cluster.token}"}
    with client.ApiClient(configuration) as one:
        yield one


@pytest.fixture(scope="module")
def core(api: Any) -> Any:
    return client.CoreV1Api(api)


@pytest.fixture(scope="module")
def ours(api: Any) -> Any:
    return dynamic.DynamicClient(api)


@pytest.fixture
def team(core: Any) -> str:
    name = unique("team")
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name)))
    return name


def job(name: str, **labels: str) -> dict[str, Any]:
    """It waits: no node has the label that it selects, whichever nodes other tests have left."""
    requests = {"cpu": "2", "nvidia.com/gpu": "1"}
    spec = {"resources": {"requests": requests}, "nodeSelector": {"place": "nowhere"}}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


def test_namespaces_are_created_read_labelled_and_deleted(core: Any, team: str) -> None:
    one = core.read_namespace(team)
    assert (one.metadata.name, one.status.phase) == (team, "Active")
    patched = core.patch_namespace(team, {"metadata": {"labels": {"colour": "red"}}})
    assert patched.metadata.labels["colour"] == "red"
    assert team in {item.metadata.name for item in core.list_namespace(label_selector="colour=red").items}
    assert "Terminating" in str(core.delete_namespace(team))


def test_quotas_are_typed_and_show_usage(core: Any, ours: Any, team: str) -> None:
    spec = client.V1ResourceQuotaSpec(hard={"cpu": "10", "memory": "8192Mi"}, scopes=["NotTerminating"])
    body = client.V1ResourceQuota(metadata=client.V1ObjectMeta(name="limits"), spec=spec)
    made = core.create_namespaced_resource_quota(team, body)
    assert made.spec.hard == {"cpu": "10", "memory": "8Gi"}
    allocations = ours.resources.get(api_version="v1", kind="Allocation")
    allocations.create(body=job("one"), namespace=team)
    status = core.read_namespaced_resource_quota_status("limits", team).status
    assert (status.used["cpu"], status.hard["cpu"]) == ("2", "10")
    changed = core.patch_namespaced_resource_quota("limits", team, {"spec": {"hard": {"cpu": "3"}}})
    assert changed.spec.hard["cpu"] == "3"
    with pytest.raises(ApiException) as refused:
        allocations.create(body=job("two"), namespace=team)
    assert refused.value.status == 403
    assert "exceeded quota: cpu limit 3, requested 2, used 2" in str(refused.value.body)
    gone = core.delete_namespaced_resource_quota("limits", team)
    assert gone.metadata.name == "limits"
    assert core.list_namespaced_resource_quota(team).items == []


def test_nodes_are_registered_cordoned_and_listed(core: Any, ours: Any) -> None:
    name = unique("node")
    # The taint keeps out what others have left waiting: a node that runs something is not deleted.
    taints = [{"key": "own", "effect": "NoSchedule"}]
    body = {"metadata": {"name": name}, "spec": {"capacity": {"cpu": "8", "nvidia.com/gpu": "4"}, "taints": taints}}
    # A capacity in the spec is ours: the typed call would not let it out.
    ours.resources.get(api_version="v1", kind="Node").create(body=body)
    node = core.read_node(name)
    assert node.status.allocatable["nvidia.com/gpu"] == "4"
    assert {one.type: one.status for one in node.status.conditions} == {"Ready": "True"}
    core.patch_node(name, {"spec": {"unschedulable": True}})
    assert core.read_node(name).spec.unschedulable is True
    listed = core.list_node(field_selector=f"metadata.name={name}")
    assert [one.metadata.name for one in listed.items] == [name]
    core.patch_node_status(name, {"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    assert core.read_node(name).status.conditions[0].status == "False"
    core.delete_node(name)


def test_events_are_typed(core: Any, ours: Any, team: str) -> None:
    ours.resources.get(api_version="v1", kind="Allocation").create(body=job("one"), namespace=team)
    events = core.list_namespaced_event(team, field_selector="involvedObject.name=one").items
    # The scheduler may have told more by now.
    (event,) = [one for one in events if one.reason == "Created"]
    assert (event.involved_object.kind, event.type) == ("Allocation", "Normal")
    assert event.last_timestamp is not None


def test_allocations_through_the_dynamic_client(ours: Any, team: str) -> None:
    allocations = ours.resources.get(api_version="v1", kind="Allocation")
    made = allocations.create(body=job("one", app="a"), namespace=team)
    assert made.status.phase == "Pending"
    assert [one.metadata.name for one in allocations.get(namespace=team, label_selector="app=a").items] == ["one"]
    for kind, patch in (
        ("application/merge-patch+json", {"metadata": {"labels": {"round": "1"}}}),
        ("application/strategic-merge-patch+json", {"metadata": {"labels": {"round": "2"}}}),
    ):
        allocations.patch(name="one", namespace=team, body=patch, content_type=kind)
    assert allocations.get(name="one", namespace=team).metadata.labels.round == "2"
    allocations.delete(name="one", namespace=team)
    with pytest.raises(ApiException) as missing:
        allocations.get(name="one", namespace=team)
    assert missing.value.status == 404


def test_tenants_are_applied_on_the_server_side(ours: Any) -> None:
    tenants = ours.resources.get(api_version="v1", kind="Tenant")
    name = unique("tenant")
    body = {"apiVersion": "v1", "kind": "Tenant", "metadata": {"name": name}, "spec": {"weight": 2}}
    assert ours.server_side_apply(tenants, body=body, name=name, field_manager="test").spec.weight == 2
    body["spec"] = {"weight": 5}
    assert ours.server_side_apply(tenants, body=body, name=name, field_manager="test").spec.weight == 5


def test_replacing_with_a_stale_version_conflicts(ours: Any) -> None:
    tenants = ours.resources.get(api_version="v1", kind="Tenant")
    name = unique("tenant")
    first = tenants.create(body={"metadata": {"name": name}, "spec": {"weight": 1}}).to_dict()
    tenants.replace(body={**first, "spec": {"weight": 2}}, name=name)
    with pytest.raises(ApiException) as stale:
        tenants.replace(body={**first, "spec": {"weight": 3}}, name=name)
    assert stale.value.status == 409


def test_a_watch_begins_where_the_list_ended(core: Any, ours: Any) -> None:
    version = core.list_namespace().metadata.resource_version
    names = [unique("ns") for _ in range(3)]
    for name in names:
        core.create_namespace({"metadata": {"name": name}})
    seen = []
    watching = watch.Watch()
    for event in watching.stream(core.list_namespace, resource_version=version, timeout_seconds=20):
        # Namespaces that other tests deleted may end meanwhile.
        if event["object"].metadata.name in names:
            seen.append((event["type"], event["object"].metadata.name))
        if len(seen) == 3:
            watching.stop()
    assert seen == [("ADDED", name) for name in names]
    allocations = ours.resources.get(api_version="v1", kind="Allocation")
    allocations.create(body=job("one"), namespace=names[0])
    for event in allocations.watch(namespace=names[0], timeout=10):
        assert (event["type"], event["object"].metadata.name) == ("ADDED", "one")
        break


def test_a_watch_from_a_future_revision_is_expired(core: Any) -> None:
    with pytest.raises(ApiException) as gone:
        for _ in watch.Watch().stream(core.list_namespace, resource_version="999999999", timeout_seconds=5):
            pass
    assert gone.value.status == 410


def test_pages_are_followed(core: Any, ours: Any, team: str) -> None:
    allocations = ours.resources.get(api_version="v1", kind="Allocation")
    for index in range(5):
        allocations.create(body=job(f"job-{index}"), namespace=team)
    names, token = [], None
    while True:
        page = allocations.get(namespace=team, limit=2, _continue=token)
        names += [one.metadata.name for one in page.items]
        token = page.metadata.get("continue")
        if not token:
            break
    assert names == [f"job-{index}" for index in range(5)]


def test_access_reviews(api: Any) -> None:
    reviews = client.AuthorizationV1Api(api)
    attributes = client.V1ResourceAttributes(verb="create", resource="allocations")
    body = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    assert reviews.create_self_subject_access_review(body).status.allowed is True


def test_custom_objects_reach_other_groups_as_not_found(api: Any) -> None:
    with pytest.raises(ApiException) as missing:
        client.CustomObjectsApi(api).list_cluster_custom_object("example.com", "v1", "widgets")
    assert missing.value.status == 404


def test_projects_users_and_role_bindings_are_found_by_discovery(ours: Any) -> None:
    project, user = unique("project"), f"{unique('ann')}@example.org"
    projects = ours.resources.get(api_version="project.openshift.io/v1", kind="Project")
    bindings = ours.resources.get(api_version="rbac.authorization.k8s.io/v1", kind="RoleBinding")
    users = ours.resources.get(api_version="user.openshift.io/v1", kind="User")
    identities = ours.resources.get(api_version="user.openshift.io/v1", kind="Identity")
    mappings = ours.resources.get(api_version="user.openshift.io/v1", kind="UserIdentityMapping")
    assert projects.create(body={"metadata": {"name": project}}).kind == "Project"
    assert project in [one.metadata.name for one in projects.get().items]
    users.create(body={"metadata": {"name": user}})
    identities.create(body={"providerName": "campus", "providerUserName": user})
    mappings.create(body={"user": {"name": user}, "identity": {"name": f"campus:{user}"}})
    assert users.get(name=user).identities == [f"campus:{user}"]
    binding = bindings.get(name="edit", namespace=project).to_dict()
    binding["subjects"].append({"kind": "User", "name": user})
    bindings.patch(body=binding, namespace=project)
    assert [one.name for one in bindings.get(name="edit", namespace=project).subjects] == [user]
    assert projects.delete(name=project).status.phase == "Terminating"
    with pytest.raises(ApiException) as caught:
        users.get(name="nobody")
    assert caught.value.status == 404
