"""The models of Waldur's client, each imported when it is named: importing all 2,400 takes seconds in every process."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "waldur_api_client.models"


def import_models_when_named() -> None:
    """Put a light package in the place of the one whose `__init__` imports all models."""
    spec = importlib.util.find_spec("waldur_api_client")
    if PACKAGE in sys.modules or spec is None or not spec.submodule_search_locations:
        return
    place = Path(spec.submodule_search_locations[0]) / "models"
    listed = re.findall(r"^from \.(\w+) import (?:\(\s*)?(\w+)", (place / "__init__.py").read_text(), re.MULTILINE)
    modules = {name: module for module, name in listed}
    package = ModuleType(PACKAGE)
    package.__path__ = [str(place)]

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(name)
        return getattr(importlib.import_module(f"{PACKAGE}.{modules[name]}"), name)

    package.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[PACKAGE] = package
