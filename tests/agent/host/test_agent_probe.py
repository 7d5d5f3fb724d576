"""What a node has: this machine's own, and GPUs that are there, missing, or only said to be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bursar.agent.host.probe import GPU, Probe
from bursar.core.values.quantity import amount


def test_this_machine(tmp_path: Path) -> None:
    found = Probe(tmp_path, fake_gpus=0).inventory()
    assert amount("cpu", found.capacity["cpu"]) == 1000 * len(os.sched_getaffinity(0))
    assert amount("memory", found.capacity["memory"]) > 1 << 28
    assert amount("ephemeral-storage", found.capacity["ephemeral-storage"]) > 1 << 20
    assert GPU not in found.capacity


def test_gpus_that_are_only_said_to_be_there(tmp_path: Path) -> None:
    probe = Probe(tmp_path, fake_gpus=3)
    found = probe.inventory()
    assert found.capacity[GPU] == "3"
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2]
    assert found.labels["gpu-type"] == "Fake-GPU"
    assert [gpu.index for gpu in probe.load().gpus] == [0, 1, 2]


def test_a_driver_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail))
    probe = Probe(tmp_path)
    found = probe.inventory()
    assert (found.gpus, found.message) == ((), "no GPUs were found: Driver Not Loaded")
    assert probe.load().gpus == ()
    probe.close()


def test_a_driver_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _: b"NVIDIA A100-SXM4-80GB",
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetMinorNumber=lambda index: 1 - index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=80 << 30, used=5 << 30),
        nvmlDeviceGetUtilizationRates=lambda index: SimpleNamespace(gpu=50 * index),
    )
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    probe = Probe(tmp_path)
    found = probe.inventory()
    assert (found.capacity[GPU], found.labels["gpu-type"], found.message) == ("2", "NVIDIA-A100-SXM4-80GB", "")
    assert found.minors == {0: 1, 1: 0}
    assert [(gpu.utilization, gpu.memory_bytes) for gpu in probe.load().gpus] == [(0.0, 5 << 30), (0.5, 5 << 30)]
    probe.close()


def test_the_load_is_measured(tmp_path: Path) -> None:
    probe = Probe(tmp_path, fake_gpus=0)
    assert probe.load().cpu_cores == 0.0, "there was nothing to compare with"
    sum(range(2_000_000))
    load = probe.load()
    assert 0.0 <= load.cpu_cores <= (os.cpu_count() or 1)
    assert load.memory_bytes > 0


def test_gpus_that_were_there_and_are_all_lost_are_said_to_be_none(tmp_path: Path) -> None:
    """Of what a node does not speak of, what was said before holds: it would be given work for GPUs."""
    probe = Probe(tmp_path, fake_gpus=2)
    probe.inventory()
    probe.fake_gpus = 0
    assert probe.inventory().capacity[GPU] == "0"
