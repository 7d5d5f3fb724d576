"""The replay of a recorded workload: its procedure, and that every policy gives a sound run."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bursar.bench.main import bench
from bursar.bench.trace import GPU, MODEL, POLICIES, Replay, arrivals, parse_seeds, read_nodes, read_pods, replay, run
from bursar.core.objects.ask import Operator, Requirement

NODES = """sn,cpu_milli,memory_mib,gpu,model
node-b,32000,65536,4,T4
node-a,96000,131072,8,A100
node-c,64000,65536,2,T4
"""
PODS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
pod-3,8000,8192,1,1000,,LS
pod-1,4000,8192,1,500,A100|V100,LS
pod-2,16000,16384,0,0,,BE
pod-4,32000,32768,4,1000,,LS
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    (file := tmp_path / "nodes.csv").write_text(NODES)
    return file


@pytest.fixture
def pods(tmp_path: Path) -> Path:
    (file := tmp_path / "pods.csv").write_text(PODS)
    return file


def test_nodes_and_pods_are_read(nodes: Path, pods: Path) -> None:
    machine = read_nodes(nodes)[0]
    assert machine.allocatable == {"cpu": 32_000, "memory": 64 << 30, GPU: 4000}
    assert machine.labels == {MODEL: "T4"}
    shared, without, one, four = read_pods(pods)
    assert dict(shared.shape.requests) == {"cpu": 4000, "memory": 8 << 30, GPU: 500}
    assert shared.shape.where.required == ((Requirement(MODEL, Operator.IN, ("A100", "V100")),),)
    assert dict(without.shape.requests) == {"cpu": 16_000, "memory": 16 << 30}
    assert [pod.gpu_milli for pod in (shared, without, one, four)] == [500, 0, 1000, 4000]


def test_a_list_without_models_is_read_too(tmp_path: Path) -> None:
    (file := tmp_path / "short.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1000,1024,1,320\n")
    assert read_pods(file)[0].gpu_milli == 320


def test_pods_arrive_shuffled_then_again_until_enough_was_asked_for(pods: Path) -> None:
    listed = read_pods(pods)
    order = arrivals(listed, 14_000, seed=42)
    assert sorted(order[:4], key=repr) == sorted(listed, key=repr)
    asked = sum(pod.gpu_milli for pod in order)
    assert 1.3 * 14_000 - 4000 < asked <= 1.3 * 14_000
    assert order == arrivals(listed, 14_000, seed=42)
    assert order != arrivals(listed, 14_000, seed=43)


def test_the_figure_is_the_mean_while_so_much_had_been_asked_for() -> None:
    so_far = Replay(gpu_milli=1000)
    for asked, used in ((900, 900), (946, 940), (954, 950), (970, 950)):
        so_far.asked, so_far.used = asked, used
        so_far.note()
    assert so_far.allocated_at(95) == 94.5
    assert so_far.allocated_at(96) == pytest.approx((94 + 95 + 95) / 3)  # Nothing at 96 itself: those beside it.
    assert so_far.allocated_at(100) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_uses_what_it_counts_and_drops_what_does_not_fit(policy: str, nodes: Path, pods: Path) -> None:
    machines, listed = read_nodes(nodes), read_pods(pods)
    order = arrivals(listed, 14_000, seed=1)
    result = replay(machines, order, policy, seed=1)
    assert result.asked == sum(pod.gpu_milli for pod in order)
    assert 0 < result.used <= 14_000
    assert result.dropped
    again = replay(machines, order, policy, seed=1)
    assert again.by_percent == result.by_percent


@pytest.mark.parametrize("policy", POLICIES)
def test_pods_stay_off_models_they_did_not_ask_for(policy: str, nodes: Path, tmp_path: Path) -> None:
    """Eight whole devices have the model; what asks for more of it is dropped, though other devices are free."""
    rows = "".join(f"pod-{index},1000,1024,1,1000,A100\n" for index in range(18))
    (file := tmp_path / "pods.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n" + rows)
    result = replay(read_nodes(nodes), read_pods(file), policy, seed=1)
    assert (result.used, result.dropped) == (8000, 10)


@pytest.mark.parametrize(
    ("text", "seeds"), [("42", [42]), ("42,44", [42, 44]), ("42-44", [42, 43, 44]), ("1-2,9", [1, 2, 9])]
)
def test_seeds(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "x", "3-1", "1,,2", "-1", "1-"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="seeds"):
        parse_seeds(text)


def test_the_means_are_over_all_seeds(nodes: Path, tmp_path: Path) -> None:
    rows = "".join(f"pod-{index},1000,1024,1,{part}\n" for index, part in enumerate((110, 120, 130, 140)))
    (file := tmp_path / "small.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + rows)
    lines: list[str] = []
    figures = run(nodes=nodes, pods=file, seeds=[1, 2, 3], policy="fragmentation", log=lines.append)
    known = [one["alloc_at_100"] for one in figures["per_seed"]]
    assert figures["alloc_at_100"] == pytest.approx(sum(known) / len(known), abs=0.01)
    assert [one["seed"] for one in figures["per_seed"]] == figures["seeds"] == [1, 2, 3]
    assert len(lines) == 3


def test_the_command_prints_one_object_last(nodes: Path, pods: Path) -> None:
    options = ["trace", "--format", "openb", "--nodes", str(nodes), "--pods", str(pods), "--seeds", "42-43", "--json"]
    result = CliRunner().invoke(bench, options)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    assert (figures["bench"], figures["format"], figures["policy"]) == ("trace", "openb", "fragmentation")
    assert (figures["nodes"], figures["gpus"], figures["pods"], figures["seeds"]) == (3, 14, 4, [42, 43])
    assert {"alloc_at_95", "alloc_at_100", "alloc_at_130", "per_seed", "decisions_per_s", "seconds"} <= figures.keys()


@pytest.mark.parametrize(("option", "value"), [("--policy", "best"), ("--seeds", "many")])
def test_what_cannot_be_understood_is_refused(option: str, value: str, nodes: Path, pods: Path) -> None:
    result = CliRunner().invoke(bench, ["trace", "--nodes", str(nodes), "--pods", str(pods), option, value])
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.parametrize(
    ("nodes_rows", "pods_rows", "told"),
    [
        ("n,1000,1024,8,A100", "p,1000,1024,0,0", "the pods ask for no GPUs"),
        ("n,1000,1024,8,A100", "", "the pods ask for no GPUs"),
        ("n,1000,1024,0,", "p,1000,1024,1,1000", "the nodes have no GPUs"),
        ("n,1000,1024,1000,A100", "p,1000,1024,1,1", "about 1,300,000 pods would have to arrive"),
        ("n,1000,1024,8,A100", "p,1000,1024,-1,1000", "pod p asks for a negative amount"),
        ("n,1000,1024,many,A100", "p,1000,1024,1,1000", "a row that cannot be read"),
        ("n,1000,1024,8,A100", "p,1000", "a row that cannot be read"),
    ],
)
def test_a_workload_whose_replay_would_not_end_is_refused(
    nodes_rows: str, pods_rows: str, told: str, tmp_path: Path
) -> None:
    for name, columns, rows in (
        ("nodes", "sn,cpu_milli,memory_mib,gpu,model", nodes_rows),
        ("pods", "name,cpu_milli,memory_mib,num_gpu,gpu_milli", pods_rows),
    ):
        (tmp_path / name).write_text(f"{columns}\n{rows}\n")
    files = ["--nodes", str(tmp_path / "nodes"), "--pods", str(tmp_path / "pods")]
    result = CliRunner().invoke(bench, ["trace", *files, "--seeds", "1"])
    assert result.exit_code == 2, result.exception
    assert told in " ".join(result.output.split())


def test_a_missing_column_is_named(nodes: Path) -> None:
    result = CliRunner().invoke(bench, ["trace", "--nodes", str(nodes), "--pods", str(nodes)])
    assert result.exit_code == 2
    assert "has no column 'name'" in " ".join(result.output.split())


def test_too_many_seeds_are_refused() -> None:
    assert len(parse_seeds("1-1000")) == 1000
    for text in ("1-1001", "1-1000,7", "0-99999999999"):
        with pytest.raises(ValueError, match="at most 1000 seeds"):
            parse_seeds(text)
