"""Tests of the store begin with no object at all."""

import pytest


@pytest.fixture(scope="session")
def database_template(blank_template: str) -> str:
    return blank_template
