"""One PostgreSQL and two servers for all workers of a run, with `--share`: each worker's own ones cost seconds of CPU.

The process that distributes the tests starts them in the background and ends them after the last test. Workers wait for
a file that says how to reach them.
"""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = "shared_directory"  # in the input of workers
READY_SECONDS_MAX = 120.0

Facts = dict[str, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", action="store_true", help="share one PostgreSQL and two servers among all workers")


def shared(config: pytest.Config, name: str) -> Facts | None:
    """How to reach a shared service; None where each process has its own."""
    directory = getattr(config, "workerinput", {}).get(DIRECTORY, "")
    if not directory:
        return None
    file, until = Path(directory) / name, time.monotonic() + READY_SECONDS_MAX
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{name} was not started")
        time.sleep(0.05)
    facts: Facts = json.loads(file.read_text())
    if "error" in facts:
        raise RuntimeError(f"{name} cannot be started: {facts['error']}")
    return facts


class Sharing:
    """The plugin of the process that distributes the tests."""

    def __init__(self, services: dict[str, Callable[[], Any]]) -> None:
        self._services = services  # each a context manager that yields its facts
        self._directory = Path(tempfile.mkdtemp(prefix="bursar-shared-"))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=one) for one in services.items()]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        for thread in self._threads:
            thread.start()

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[DIRECTORY] = str(self._directory)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        shutil.rmtree(self._directory)

    def _serve(self, name: str, opened: Callable[[], Any]) -> None:
        try:
            with opened() as facts:
                self._tell(name, facts)
                self._ended.wait()
        except Exception as error:
            self._tell(name, {"error": repr(error)})

    def _tell(self, name: str, facts: Facts) -> None:
        file = self._directory / f"{name}.{os.getpid()}"
        file.write_text(json.dumps(facts))
        file.rename(self._directory / name)


def shares(config: pytest.Config) -> bool:
    """Whether this process distributes tests to workers that share services."""
    return bool(config.getoption("--share") and config.getoption("numprocesses", None)) and not hasattr(
        config, "workerinput"
    )


@contextmanager
def temporary_directory(parent: Path | None, prefix: str) -> Iterator[Path]:
    """A directory that an unprivileged database may enter."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    directory.chmod(0o711)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
