"""ColdFront as an administrator uses it: through its web pages."""

from __future__ import annotations

from typing import Any

from coldfront.core.allocation.models import (
    Allocation,
    AllocationAttribute,
    AllocationAttributeType,
    AllocationChangeRequest,
    AllocationStatusChoice,
    AllocationUser,
    AllocationUserStatusChoice,
    AttributeType,
)
from coldfront.core.project.models import (
    Project,
    ProjectStatusChoice,
    ProjectUser,
    ProjectUserRoleChoice,
    ProjectUserStatusChoice,
)
from coldfront.core.resource.models import Resource, ResourceType
from django.contrib.auth.models import User
from django.test import Client

from bursar_coldfront.models import Outbox

ATTRIBUTES = ("GPU Count", "Clusters", "Memory (GB)")


class Portal:
    def __init__(self) -> None:
        self.admin = User.objects.create_superuser("root", "root@example.org", "pw")
        self.pi = User.objects.create_user("pi", "pi@example.org", "pw")
        self.web = Client()
        self.web.force_login(self.admin)
        kind, _ = ResourceType.objects.get_or_create(name="Cluster", defaults={"description": ""})
        self.resource = Resource.objects.create(
            name="GPU cluster", resource_type=kind, description="", is_available=True, requires_payment=False
        )
        self.other = Resource.objects.create(name="Tape", resource_type=kind, description="")
        self.project = Project.objects.create(
            pi=self.pi, title="Protein folding", status=ProjectStatusChoice.objects.get(name="Active")
        )
        whole, _ = AttributeType.objects.get_or_create(name="Int")
        for name in ATTRIBUTES:
            AllocationAttributeType.objects.get_or_create(
                name=name, attribute_type=whole, defaults={"is_changeable": True}
            )

    def member(self, name: str, role: str = "User") -> User:
        user = User.objects.create_user(name, f"{name}@example.org", "pw")
        ProjectUser.objects.create(
            project=self.project,
            user=user,
            role=ProjectUserRoleChoice.objects.get(name=role),
            status=ProjectUserStatusChoice.objects.get(name="Active"),
        )
        return user

    def allocation(self, *, resource: Resource | None = None, **attributes: Any) -> Allocation:
        """A new allocation, as a request that an administrator has not reviewed yet."""
        one = Allocation.objects.create(
            project=self.project,
            status=AllocationStatusChoice.objects.get(name="New"),
            justification="science",
            is_changeable=True,
        )
        one.resources.add(resource or self.resource)
        for name, value in attributes.items():
            label = {"gpus": "GPU Count", "clusters": "Clusters", "memory": "Memory (GB)"}[name]
            AllocationAttribute.objects.create(
                allocation=one,
                allocation_attribute_type=AllocationAttributeType.objects.get(name=label),
                value=str(value),
            )
        return one

    def user_of(self, allocation: Allocation, user: User) -> AllocationUser:
        status = AllocationUserStatusChoice.objects.get(name="Active")
        return AllocationUser.objects.create(allocation=allocation, user=user, status=status)

    # Web pages.

    def review(self, allocation: Allocation, action: str, status: str = "New", **fields: Any) -> None:
        """The form on the allocation's page: approve, deny, or update with a status."""
        choice = AllocationStatusChoice.objects.get(name=status)
        form = {"status": choice.pk, "description": "", "is_changeable": "on", "action": action, **fields}
        answer = self.web.post(f"/allocation/{allocation.pk}/", form)
        assert answer.status_code == 302, answer.content[:500]

    def activate(self, allocation: Allocation) -> None:
        self.review(allocation, "approve")

    def expire(self, allocation: Allocation) -> None:
        self.review(allocation, "update", "Expired", start_date="2026-01-01", end_date="2026-02-01")

    def change(self, allocation: Allocation, **values: Any) -> None:
        """A change request, and its approval, by their pages."""
        labels = {"gpus": "GPU Count", "clusters": "Clusters", "memory": "Memory (GB)"}
        wanted = {labels[name]: str(value) for name, value in values.items()}
        there = list(allocation.allocationattribute_set.filter(allocation_attribute_type__is_changeable=True))
        form = {"end_date_extension": "0", "justification": "more science", **_management(len(there))}
        for index, one in enumerate(there):
            name = one.allocation_attribute_type.name
            form |= {
                f"attributeform-{index}-pk": one.pk,
                f"attributeform-{index}-name": name,
                f"attributeform-{index}-value": one.value,
                f"attributeform-{index}-new_value": wanted.get(name, ""),
            }
        assert self.web.post(f"/allocation/{allocation.pk}/change-request", form).status_code == 302
        request = AllocationChangeRequest.objects.filter(allocation=allocation).latest("pk")
        parts = list(request.allocationattributechangerequest_set.all())
        assert parts, "the page has recorded the request"
        form = {
            "action": "approve", "notes": "", "end_date_extension": "0", "justification": "more science",
            **_management(len(parts)),
        }  # fmt: skip
        for index, part in enumerate(parts):
            form |= {
                f"attributeform-{index}-change_pk": part.pk,
                f"attributeform-{index}-attribute_pk": part.allocation_attribute.pk,
                f"attributeform-{index}-name": part.allocation_attribute.allocation_attribute_type.name,
                f"attributeform-{index}-value": part.allocation_attribute.value,
                f"attributeform-{index}-new_value": part.new_value,
            }
        assert self.web.post(f"/allocation/change-request/{request.pk}/", form).status_code == 302

    def due(self) -> dict[int, tuple[int, int]]:
        """The outbox: number and sent, by allocation."""
        return {one.allocation_pk: (one.number, one.sent) for one in Outbox.objects.all()}


def _management(count: int) -> dict[str, Any]:
    return {
        "attributeform-TOTAL_FORMS": count,
        "attributeform-INITIAL_FORMS": count,
        "attributeform-MIN_NUM_FORMS": 0,
        "attributeform-MAX_NUM_FORMS": count,
    }
