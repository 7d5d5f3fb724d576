"""Fixtures shared by all tests."""

import gc
import importlib
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import hypothesis
import pytest
import structlog

from support.process.light_waldur import import_models_when_named

pytest_plugins = ["support.runtime.shared", "support.runtime.postgres", "support.runtime.runtime"]

# A shared machine may pause any test: deadlines would only tell how busy it is.
hypothesis.settings.register_profile(
    "bursar", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("bursar")

import_models_when_named()

# As `bursar` logs: structlog's own default draws every variable of every frame, for a tenth of a second each time.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A shell that starts tests in the background has interrupts ignored, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

WAITING = ("process", "bench")  # folders of tests that wait for other processes more than they compute
GC_THRESHOLDS = (50_000, 20, 50)  # as `bursar` sets them
STARTED = {"embedded_postgres", "server", "empty_server", "uid"}  # fixtures that start other processes


def pytest_addoption(parser: pytest.Parser) -> None:
    left_out = "leave out property tests, and tests that start a server or work on a node"
    parser.addoption("--fast", action="store_true", help=left_out)


def pytest_configure(config: pytest.Config) -> None:
    # Imported here: pytest registers the plugins above before anything may import them.
    from support.runtime.shared import Sharing, shares

    if shares(config):
        from support.process.server import shared_server
        from support.runtime.postgres import shared_postgres

        services = {"postgres": shared_postgres, "server": shared_server, "empty-server": shared_server}
        config.pluginmanager.register(Sharing(services))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        left_out = [item for item in items if not _is_fast(item)]
        items[:] = [item for item in items if _is_fast(item)]
        config.hook.pytest_deselected(items=left_out)
    _spread(items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Freeze collected tests: they stay until the end, and the cyclic garbage collector would traverse them in vain.
    Where assertions are rewritten too, that is almost half of the time that collecting takes."""
    gc.disable()
    _import_share(session.config)
    collected = yield
    gc.collect()
    gc.freeze()
    # A scheduler that starts thaws the heap of its process before it collects: here that would be all of the above.
    gc.freeze = gc.unfreeze = _leave_frozen
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    return collected


def _leave_frozen() -> None:
    return None


def _is_fast(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    starts = STARTED & set(item.fixturenames) or item.get_closest_marker("starts_processes")
    return not (starts or hypothesis.is_hypothesis_test(item.obj))


def _spread(items: list[pytest.Item]) -> None:
    """Spread the files that wait evenly among those that compute.

    Each worker takes a consecutive share of the list. A worker whose share only waits would be the last to end.
    """
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    computing = sum(len(file) for file in files if not _waits(file[0]))
    waiting = sum(len(file) for file in files if _waits(file[0]))
    place: dict[Path, float] = {}
    seen = {True: 0, False: 0}
    for file in files:
        waits = _waits(file[0])
        place[file[0].path] = seen[waits] / max(1, waiting if waits else computing)
        seen[waits] += len(file)
    items.sort(key=lambda item: place[item.path])


def _waits(item: pytest.Item) -> bool:
    return item.path.parent.name in WAITING


def _import_share(config: pytest.Config) -> None:
    """Import a share of the test modules before all others, in each worker another share.

    Where no rewritten assertions are cached yet, each module is rewritten by one worker, which caches it for the rest.
    """
    if worker := getattr(config, "workerinput", None):
        named = [Path(argument.partition("::")[0]) for argument in config.args]
        modules = {module for one in named for module in (one.rglob("test_*.py") if one.is_dir() else [one])}
        number = int(worker["workerid"].removeprefix("gw"))
        for path in sorted(modules)[number :: worker["workercount"]]:
            sys.path.insert(0, str(path.parent))
            # Collecting it says what is wrong with it, or why it is skipped.
            with suppress(Exception, pytest.skip.Exception):
                importlib.import_module(path.stem)
            sys.path.remove(str(path.parent))
