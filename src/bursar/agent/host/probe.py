"""Inventory and load of the node: cores, memory, disk and, through NVML, GPUs.

With a missing or broken GPU driver the node works without GPUs and reports why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GPU = "nvidia.com/gpu"
PODS = 500
FAKE_GPU_MODEL = "Fake-GPU"
FAKE_GPU_MEMORY_BYTES = 80 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    model: str
    memory_bytes: int
    uuid: str = ""
    minor: int | None = None  # the number of its device file; None if unknown


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's capacity. `labels` are a proposal for its first registration."""

    capacity: dict[str, str]
    labels: dict[str, str]
    gpus: tuple[Gpu, ...] = ()
    message: str = ""  # why no GPUs were found

    @property
    def minors(self) -> dict[int, int]:
        return {gpu.index: gpu.minor for gpu in self.gpus if gpu.minor is not None}


@dataclass(frozen=True, slots=True)
class GpuLoad:
    index: int
    utilization: float  # from 0 to 1
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    cpu_cores: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpus: tuple[GpuLoad, ...] = ()


@dataclass(slots=True)
class Probe:
    """Reads the machine. `folder` is on the disk that is measured; `fake_gpus` replaces real GPUs."""

    folder: Path
    fake_gpus: int | None = None
    _nvml: Any = field(default=None, init=False)
    _had_gpus: bool = field(default=False, init=False)
    _cpu_before: tuple[float, float] | None = field(default=None, init=False)

    def inventory(self) -> Inventory:
        gpus, message = self._find_gpus()
        disk = psutil.disk_usage(str(self.folder))
        capacity = {
            "cpu": f"{cores()}",
            "memory": f"{memory_bytes() // 1024}Ki",
            "ephemeral-storage": f"{disk.total // 1024}Ki",
            "pods": str(PODS),
        }
        labels = {"kubernetes.io/arch": _architecture(), "kubernetes.io/os": "linux"}
        self._had_gpus = self._had_gpus or bool(gpus)
        if self._had_gpus:
            # Reported even if all GPUs are lost: for a resource that is not reported, the last report stays in force.
            capacity[GPU] = str(len(gpus))
        if gpus:
            models = {gpu.model for gpu in gpus}
            if len(models) == 1:
                labels["gpu-type"] = _label(models.pop())
        return Inventory(capacity, labels, gpus, message)

    def load(self) -> Load:
        """The current load; CPU as an average since the last call."""
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(str(self.folder))
        return Load(self._cores_used(), memory.total - memory.available, disk.used, self._gpu_loads())

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def _cores_used(self) -> float:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Guest time is included in the host's time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        before, self._cpu_before = self._cpu_before, (total, idle)
        if before is None or total <= before[0]:
            return 0.0
        busy = 1 - (idle - before[1]) / (total - before[0])
        return max(0.0, min(1.0, busy)) * (os.cpu_count() or 1)

    def _find_gpus(self) -> tuple[tuple[Gpu, ...], str]:
        if self.fake_gpus is not None:
            fakes = (Gpu(index, FAKE_GPU_MODEL, FAKE_GPU_MEMORY_BYTES) for index in range(self.fake_gpus))
            return tuple(fakes), "the GPUs are not real"
        try:
            return self._ask_driver(), ""
        except Exception as error:  # a broken driver may raise anything; the node works without GPUs
            return (), f"no GPUs were found: {error}"

    def _ask_driver(self) -> tuple[Gpu, ...]:
        import pynvml

        if self._nvml is None:
            pynvml.nvmlInit()
            self._nvml = pynvml
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))

    def _gpu_loads(self) -> tuple[GpuLoad, ...]:
        if self._nvml is None:
            return tuple(GpuLoad(index, 0.0, 0) for index in range(self.fake_gpus or 0))
        try:
            return tuple(_gpu_load(self._nvml, index) for index in range(self._nvml.nvmlDeviceGetCount()))
        except self._nvml.NVMLError:
            return ()


def cores() -> int:
    """The number of CPUs in the agent's affinity mask."""
    return len(os.sched_getaffinity(0))


def memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    name, uuid = _decoded(nvml.nvmlDeviceGetName(handle)), _decoded(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, name, int(memory), uuid, _minor(nvml, handle))


def _minor(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetMinorNumber(handle))
    except Exception:  # some drivers do not support this
        return None


def _gpu_load(nvml: Any, index: int) -> GpuLoad:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return GpuLoad(index, busy, int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def _decoded(text: str | bytes) -> str:
    """Older NVML bindings return bytes."""
    return text.decode() if isinstance(text, bytes) else text


def _architecture() -> str:
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _label(text: str) -> str:
    """The text as a valid label value."""
    plain = "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "-" for one in text)
    return plain[:63].strip("-_.")
