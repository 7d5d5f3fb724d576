"""Every change of an allocation is noted in ColdFront's own database, whatever page or command made it."""

from __future__ import annotations

import pytest
from coldfront.core.allocation.models import AllocationAttribute, AllocationStatusChoice
from coldfront.core.allocation.tasks import update_statuses

from bursar_coldfront.mapping import MappingError, Rule, load_rules
from bursar_coldfront.wanted import wanted_of
from support import Portal


def test_every_page_that_changes_an_allocation_notes_it(coldfront: Portal) -> None:
    one = coldfront.allocation(gpus=4)
    before = coldfront.due()[one.pk][0]
    coldfront.activate(one)
    activated = coldfront.due()[one.pk][0]
    assert activated > before
    coldfront.change(one, gpus=8)
    changed = coldfront.due()[one.pk][0]
    assert changed > activated
    coldfront.expire(one)
    assert coldfront.due()[one.pk][0] > changed


def test_the_nightly_expiry_and_edits_without_pages_are_noted(coldfront: Portal) -> None:
    one = coldfront.allocation(gpus=4)
    coldfront.activate(one)
    one.refresh_from_db()
    one.end_date = "2026-01-01"
    one.save()
    before = coldfront.due()[one.pk][0]
    update_statuses()
    assert coldfront.due()[one.pk][0] > before
    before = coldfront.due()[one.pk][0]
    attribute = AllocationAttribute.objects.get(allocation=one)
    attribute.value = "5"
    attribute.save()
    assert coldfront.due()[one.pk][0] > before


def test_allocations_of_other_resources_are_none_of_bursars(coldfront: Portal) -> None:
    one = coldfront.allocation(resource=coldfront.other, gpus=4)
    coldfront.activate(one)
    assert one.pk not in coldfront.due()


def test_the_wanted_state_sums_the_projects_allocations(coldfront: Portal) -> None:
    ann = coldfront.member("ann")
    coldfront.member("boss", "Manager")
    first, second = coldfront.allocation(gpus=4, memory=16), coldfront.allocation(gpus=2)
    coldfront.user_of(first, ann)
    for one in (first, second):
        coldfront.activate(one)
        one.refresh_from_db()
    wanted = wanted_of(first, 1, 1)
    assert wanted.quota == {"nvidia.com/gpu": "4", "memory": "16Gi"}
    assert wanted.limits == {"clusters": "0", "memory": "16Gi", "nvidia.com/gpu": "6"}
    assert wanted.members == {"ann": "user", "boss": "tenant-admin", "pi": "tenant-admin"}
    assert wanted_of(second, 1, 1).quota == {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("choice", "quota"),
    [
        ("keep", {"nvidia.com/gpu": "4"}),
        ("freeze", {"clusters": "0", "memory": "0", "nvidia.com/gpu": "0"}),
        ("release", None),
    ],
)
def test_an_expired_allocation_is_kept_frozen_or_released(
    coldfront: Portal, choice: str, quota: dict[str, str] | None, settings_of: pytest.FixtureRequest
) -> None:
    settings_of.BURSAR_ON_END = choice  # type: ignore[attr-defined]
    one = coldfront.allocation(gpus=4)
    coldfront.activate(one)
    coldfront.expire(one)
    one.refresh_from_db()
    assert one.status.name == "Expired"
    assert wanted_of(one, 1, 1).quota == quota


def test_a_request_that_is_not_active_yet_has_no_quota(coldfront: Portal) -> None:
    one = coldfront.allocation(gpus=4)
    assert wanted_of(one, 1, 1).quota == {"clusters": "0", "memory": "0", "nvidia.com/gpu": "0"}
    one.status = AllocationStatusChoice.objects.get(name="Renewal Requested")
    assert wanted_of(one, 1, 1).quota == {"nvidia.com/gpu": "4"}


@pytest.mark.parametrize(
    ("value", "fault"), [("-3", "must be 0 or more"), ("many", "is no number"), ("NaN", "0 or more")]
)
def test_a_value_that_is_no_amount_is_named(value: str, fault: str) -> None:
    with pytest.raises(MappingError, match=fault):
        Rule("nvidia.com/gpu").quantity("GPU Count", value)


def test_a_rule_multiplies_and_adds(tmp_path: object) -> None:
    path = tmp_path / "map.toml"  # type: ignore[operator]
    path.write_text('[attributes."Storage (TB)"]\ndimension = "storage"\nmultiplier = 1.5\nstatic = 0.5\nunit = "Ti"\n')
    assert load_rules(path)["Storage (TB)"].quantity("Storage (TB)", "2") == "3.5Ti"
    path.write_text('[attributes."A"]\ndimension = "a"\nfactor = 2\n')
    with pytest.raises(MappingError, match="unknown factor"):
        load_rules(path)
