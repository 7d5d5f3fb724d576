"""What is told of use, as it is answered."""

from bursar.core.usage.usage_levels import HOUR, Used
from bursar.core.values.money import NANO
from bursar.wire.reports.tenant_usage import cost_of, days_of, resources_of, table_lines, users_of

GPU = "nvidia.com/gpu"


def used(gpus: float, credit: int = 0) -> dict[tuple[str, str], Used]:
    """For an hour."""
    return {(GPU, "a100"): Used(int(gpus * 1000 * HOUR), credit * NANO * 1000)}


def test_what_people_have_named_is_no_formula_to_who_opens_the_table() -> None:
    row = ("2026-10", "=cmd()", "+x/y", "-a", "@b", "\tc", "1.5")
    assert table_lines([row]) == b"2026-10,'=cmd(),'+x/y,'-a,'@b,'\tc,1.5\r\n"
    assert table_lines([('a"b', "c,d")]) == b'"a""b","c,d"\r\n'


def test_who_used_most_comes_first_and_names_decide_between_equals() -> None:
    listed = users_of({"b": used(2), "c": used(5), "a": used(2)})
    assert [(one.user, one.gpu_hours_used) for one in listed] == [("c", 5), ("a", 2), ("b", 2)]


def test_days_come_in_order() -> None:
    assert [one.day for one in days_of({"2026-11-02": used(1), "2026-10-31": used(1)})] == ["2026-10-31", "2026-11-02"]


def test_cost_is_exact_in_credits_and_rounded_in_money() -> None:
    cost = cost_of({**used(1, 12), ("cpu", ""): Used(0, NANO // 3)}, "1.00")
    assert (cost.credits, cost.total) == ("12.000333333", "$12.00")
    assert cost.breakdown == {"cpu": "$0.00", "memory": "$0.00", "gpu": "$12.00", "storage": "$0.00"}
    assert [one.credits for one in resources_of(used(1, 12))] == ["12"]
