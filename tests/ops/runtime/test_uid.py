"""Uids are unique, and begin with the time: between what was submitted in one second they decide who came first."""

import uuid

from bursar.ops.runtime.clock import new_uid


def test_uids_sort_in_the_order_in_which_they_were_made() -> None:
    made: list[str] = []
    while len({one[:20] for one in made}) < 50:  # of fifty different moments
        made.append(new_uid("alloc"))
    moments = [one[:24] for one in made]
    assert moments == sorted(moments)
    assert len(set(made)) == len(made)


def test_a_uid_is_a_uuid_of_version_7() -> None:
    prefix, _, rest = new_uid("job").partition("-")
    found = uuid.UUID(rest)
    assert (prefix, found.version, found.variant) == ("job", 7, uuid.RFC_4122)
