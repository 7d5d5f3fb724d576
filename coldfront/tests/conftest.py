"""A real ColdFront on SQLite, driven through its web views, beside a real Bursar.

The database is prepared once per session and copied for each test. `make coldfront` runs these tests in ColdFront's own
virtual environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PREPARED = Path(os.environ.get("COLDFRONT_TEST_DIR", HERE.parent.parent / ".coldfront"))
MAPPING = """
[attributes."GPU Count"]
dimension = "nvidia.com/gpu"

[attributes."Clusters"]
dimension = "clusters"

[attributes."Memory (GB)"]
dimension = "memory"
unit = "Gi"
"""


def pytest_configure() -> None:
    """Set ColdFront up before any of its models is imported."""
    PREPARED.mkdir(exist_ok=True)
    (PREPARED / "mapping.toml").write_text(MAPPING)
    (PREPARED / "env").write_text(f"DEBUG=False\nSECRET_KEY=test\nDB_URL=sqlite:///{PREPARED}/base.db\n")
    os.environ |= {"COLDFRONT_CONFIG": str(HERE / "coldfront_settings.py"), "COLDFRONT_ENV": str(PREPARED / "env")}
    os.environ["BURSAR_TEST_MAPPING"] = str(PREPARED / "mapping.toml")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "coldfront.config.settings")
    if not (PREPARED / "ready").exists():
        (PREPARED / "base.db").unlink(missing_ok=True)
        command = [str(Path(sys.executable).parent / "coldfront"), "initial_setup", "-f"]
        subprocess.run(command, check=True, capture_output=True)
        (PREPARED / "ready").touch()
    import django

    django.setup()


@pytest.fixture
def coldfront(tmp_path: Path) -> Iterator[Any]:
    """ColdFront with a project, its people, and a resource that Bursar governs."""
    from django.db import connection

    from support import Portal

    copy = tmp_path / "coldfront.db"
    shutil.copy(PREPARED / "base.db", copy)
    connection.close()
    connection.settings_dict["NAME"] = str(copy)
    yield Portal()
    connection.close()


@pytest.fixture
def settings_of() -> Iterator[Any]:
    """Django's settings; what a test sets is undone after it."""
    from django.conf import settings

    names = ("BURSAR_URL", "BURSAR_TOKEN", "BURSAR_ON_END", "BURSAR_PREFIX", "BURSAR_PARENT")
    before = {name: getattr(settings, name, None) for name in names}
    yield settings
    for name, value in before.items():
        if value is None:
            if hasattr(settings, name):
                delattr(settings, name)
        else:
            setattr(settings, name, value)
